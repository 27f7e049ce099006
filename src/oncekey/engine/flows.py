"""What a flow yields: the interface between the engine's generators and the two loops that drive them.

A flow yields what it wants of the store (``Work``) and is sent the answer. Everything else that it wants is an
``Aside``: to wait for a while, or to call something on the connection that the handler enlisted.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from oncekey.core.record import Record
from oncekey.core.values import value
from oncekey.engine.batching.ticket import Work
from oncekey.errors import ApplicationError

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


def called(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """What a Call makes of an effect's function in async code. A plain function may block, so it runs in a thread."""
    work = partial(fn, *args, **kwargs)
    if _is_async(fn):
        return work

    async def in_thread() -> Any:
        result = await asyncio.to_thread(work)
        return await result if inspect.isawaitable(result) else result  # such as lambda: client.post(…)

    return in_thread


def plain(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """What a Call makes of a step's function in sync code."""
    if _is_async(fn):  # checked before the intent is written: after it, the key would become unknown for nothing
        raise ApplicationError("op.blocking takes plain functions: this one is async. Await op.… in async code")
    return partial(fn, *args, **kwargs)


def _is_async(fn: Callable[..., Any]) -> bool:
    target = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(target)
