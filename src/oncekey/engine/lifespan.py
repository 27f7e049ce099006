"""How an app opens and closes its OnceKey: check the tables at the start, let requests end before the process does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from oncekey.engine.engine import Engine
from oncekey.stores.api import Store

_log = logging.getLogger("oncekey")


class Lifespan:
    """The start and the end of an engine. :class:`oncekey.engine.once.OnceKey` adds policies and a scope."""

    def __init__(self, engine: Engine, *, migrate: bool, grace: float) -> None:
        self.engine = engine
        self.grace = grace
        self._migrate = migrate
        self._on_close: list[Callable[[], object]] = []

    @property
    def store(self) -> Store:
        return self.engine.store

    def start(self) -> None:
        """Check the tables. With ``migrate=True``, first bring them up to date. SchemaError says what to run. Blocks.

        It opens again after a close: an app may have more than one lifespan, as in tests.
        """
        self.engine.open()
        if self._migrate:
            self.store.migrate()
        self.store.check()
        self.store.disconnect()

    def close(self, timeout: float = 10.0) -> bool:
        """Store unfinished outcomes, end the threads and disconnect. False: a thread still waits for the store.

        The next use opens it again; then it needs another close.
        """
        stops, self._on_close = self._on_close, []
        for stop in stops:
            stop()
        return self.engine.close(timeout)

    def on_close(self, stop: Callable[[], object]) -> None:
        """Call this at the beginning of the next :meth:`close`: for what runs beside the app's requests."""
        self._on_close.append(stop)

    async def drain(self, grace: float | None = None) -> bool:
        """Wait for the handlers that run in this loop, up to ``grace`` seconds. False: some are still running.

        Call it at the beginning of a shutdown, before the app closes what its handlers use.
        """
        grace = self.grace if grace is None else grace
        loop, this = asyncio.get_running_loop(), asyncio.current_task()
        until = loop.time() + grace
        while running := [task for task in self.engine.tasks if task is not this and task.get_loop() is loop]:
            left = until - loop.time()
            if left <= 0:
                _log.warning(
                    "%d requests are still running %g s after the shutdown began, and are not waited for any longer: "
                    "if they do not end before the process does, their keys are left to their leases, and effects= "
                    "says what that means. OnceKey(grace=…) gives them more time",
                    len(running),
                    grace,
                )
                return False
            await asyncio.wait(running, timeout=left)
        return True

    async def aclose(self, grace: float | None = None) -> bool:
        """As :meth:`close`, after the handlers that are still running in this loop had ``grace`` seconds to end."""
        grace = self.grace if grace is None else grace
        await self.drain(grace)
        return await asyncio.to_thread(self.close, grace)

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: frameworks copy the arguments of their middleware (Litestar, for each controller)."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
