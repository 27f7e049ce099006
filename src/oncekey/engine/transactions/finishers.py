"""Runs the end of an enlisted transaction under ASGI, so that a cancelled request does not cancel a commit half-way.

A link to an asynchronous driver ends in the event loop. A synchronous one ends in the thread that uses it, or in a
thread of oncekey's own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from oncekey.engine import process
from oncekey.engine.flows import Finished
from oncekey.engine.transactions.stages import Happened
from oncekey.errors import OperatorError

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine
    from oncekey.engine.keeper import Unfinished

_log = logging.getLogger("oncekey")

FINISHERS = 32
"""Threads that end the transactions of sync handlers under ASGI."""


class _Finishers:
    """Threads of oncekey's own. All threads of the loop's default pool may be waiting for the lock that we release."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        process.enroll(self)

    def pool(self) -> ThreadPoolExecutor:
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(FINISHERS, "oncekey-finish")
            return self._pool

    def after_fork(self) -> None:
        self._pool = None
        self._lock = threading.Lock()


_finishers = _Finishers()
pool = _finishers.pool


async def run(engine: Engine, item: Unfinished, timeout: float) -> Finished:
    """Finish in a task of its own, so that a cancelled request does not cancel a commit half-way."""
    enlisted = item.operation.enlisted
    assert enlisted is not None  # noqa: S101 - the caller has checked
    flow = engine.finish(item.operation, item.event, item.response, item.reason)
    loop = asyncio.get_running_loop()

    async def work() -> Finished:
        if enlisted.link.is_async or enlisted.thread == threading.get_ident():
            return await engine.run(flow, timeout)
        if (in_its_thread := enlisted.link.in_its_thread) is not None:
            finished: Finished = await in_its_thread(engine.run_blocking, flow, timeout)
            return finished
        return await loop.run_in_executor(pool(), engine.run_blocking, flow, timeout)

    task = loop.create_task(work())
    engine.tasks.add(task)  # type: ignore[arg-type]
    task.add_done_callback(engine.tasks.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(_left_alone, engine, item))
        await asyncio.wait([task])  # the app closes its session next: it must not be in use then
        raise


def _left_alone(engine: Engine, item: Unfinished, task: asyncio.Task[Finished]) -> None:
    """The request was cancelled: leave what is unfinished to the keeper."""
    enlisted = item.operation.enlisted
    if task.cancelled() and enlisted is not None:
        # The app closes its connection next, and a thread of the app may be using it. So the keeper does not touch the
        # connection, and asks the key's row and the server.
        enlisted.saw(Happened.CUT_OFF)
    if task.cancelled() or isinstance(task.exception(), OperatorError):
        engine.keeper.adopt(item)
    elif (error := task.exception()) is not None:
        _log.error("an enlisted transaction could not be ended", exc_info=error)
    else:
        engine.keeper.unwatch(item.operation)
