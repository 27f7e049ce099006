"""Calls functions of the app, sync or async, a few at a time: for the reconciler and the resumer.

Async functions run in the event loop that the duty passes (the app's), or in a new one; sync functions in threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from oncekey.errors import SchemaError, StoreOverloaded, StoreUnavailable
from oncekey.outbox.threads import Threads
from oncekey.telemetry.redaction import describe

_log = logging.getLogger("oncekey")

ABOUT_THE_STORE = (StoreUnavailable, StoreOverloaded, SchemaError)
"""Errors that every key would meet. All others are about one key."""
_ONE_KEY = "upkeep could not go on with one key, and goes on with the others: %s"
_Item = TypeVar("_Item")


class Callers:
    """Only the duty's own thread calls its methods, except where a method says otherwise."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._threads = Threads()
        self._runner: asyncio.Runner | None = None
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def run(
        self,
        items: Iterable[_Item],
        one: Callable[[_Item], Coroutine[Any, Any, None]],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        """Await ``one`` for each item, at most ``concurrency`` at once, in ``loop`` or in a loop of its own.

        An error of one item is logged, and the other items go on. If the store is in trouble, no further item begins,
        the running ones end as they can, and the error is raised.
        """
        work = self._all(items, one)
        with suppress(asyncio.CancelledError, concurrent.futures.CancelledError):
            if loop is None:
                # One loop for all runs: the HTTP clients of the app's functions belong to a loop, and outlive a run.
                self._runner = self._runner or asyncio.Runner()
                self._runner.run(work)
            else:
                asyncio.run_coroutine_threadsafe(work, loop).result()

    async def _all(self, items: Iterable[_Item], one: Callable[[_Item], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - we are a coroutine
        self._task = (asyncio.get_running_loop(), task)
        slots = asyncio.Semaphore(self._concurrency)
        failed: list[Exception] = []

        async def in_a_slot(item: _Item) -> None:
            async with slots:
                if failed:
                    return
                try:
                    await one(item)
                except ABOUT_THE_STORE as error:
                    failed.append(error)
                except Exception as error:
                    _log.error(_ONE_KEY, describe(error), exc_info=error)

        try:
            async with asyncio.TaskGroup() as group:
                for item in items:
                    group.create_task(in_a_slot(item))
        finally:
            self._task = None
        if failed:
            raise failed[0]

    async def call(self, function: Callable[[Any], object], argument: object) -> object:
        """Call the function, and return its result. A sync function runs in a thread, in a copy of this context."""
        if is_async(function):
            answer = function(argument)
        else:
            context = contextvars.copy_context()
            answer = await asyncio.wrap_future(self._threads.submit(context.run, function, argument))
        return await answer if inspect.isawaitable(answer) else answer

    def interrupt(self) -> None:
        """Stop waiting for functions. Any thread may call this."""
        if (running := self._task) is not None:
            with suppress(RuntimeError):  # its loop is closed
                running[0].call_soon_threadsafe(running[1].cancel)

    def close(self) -> None:
        """Close the event loop and the threads. The next run opens new ones."""
        self._threads.close()
        self._threads = Threads()
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
