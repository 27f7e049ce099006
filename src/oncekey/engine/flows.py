"""What a flow yields: the interface between the engine's generators and the two loops that drive them.

A flow yields what it wants of the store (``Work``) and is sent the answer. Everything else that it wants is an
``Aside``: to wait for a while, or to call something on the connection that the handler enlisted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from oncekey.core.record import Record
from oncekey.core.values import value
from oncekey.engine.batching.ticket import Work

_T = TypeVar("_T")


class Aside:
    """What a flow wants that does not go to the store."""

    __slots__ = ()


@value
class Pause(Aside):
    """Wait this long, or until this process finishes a request of this (scope, key)."""

    at: tuple[str, str]
    seconds: float


@value
class Call(Aside):
    """Call ``do`` in the thread that drives the flow. If it returns an awaitable, await that.

    What it raises is raised in the flow.
    """

    do: Callable[[], Any]


Flow = Generator[Work | Aside, Any, _T]


@value
class Finished:
    """How ``finish`` ended. ``stored``: the store holds what was asked for. Otherwise ``record`` is what it holds."""

    stored: bool
    record: Record | None
    undone: bool = False
    """Not stored, and it is certain that nothing of this attempt happened: the client may try again."""
