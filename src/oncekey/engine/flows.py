"""What a flow is made of: the words between the engine's generators and the two loops that drive them.

A flow yields what it wants of the store (``Work``) and is sent the answer. Whatever else it wants is an ``Aside``: to
wait a while, or to have something done on the connection that the handler enlisted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from oncekey.core.record import Record
from oncekey.core.values import value
from oncekey.engine.tickets import Work

_T = TypeVar("_T")


class Aside:
    """Not for the store."""

    __slots__ = ()


@value
class Pause(Aside):
    """Wait this long, or until something happens to this (scope, key) in this process."""

    at: tuple[str, str]
    seconds: float


@value
class Call(Aside):
    """Do this here and now, in the thread that drives the flow; if it returns an awaitable, await that.

    What it raises is raised in the flow.
    """

    do: Callable[[], Any]


Flow = Generator[Work | Aside, Any, _T]


@value
class Finished:
    """How finish ended. ``stored``: as wanted. Otherwise the record says how it is."""

    stored: bool
    record: Record | None
    undone: bool = False
    """Not stored, and it is certain that nothing of this attempt happened: the client may simply try again."""
