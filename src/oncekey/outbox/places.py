"""The places of a worker: which attempts run, which wait for a free place, and when an async task has taken too long.

The pump claims quick jobs ahead of free places, so that tasks run while the store commits. A job that waits here has
not begun. If it waits too long, or the worker stops, it is given back. Only the event loop uses this module.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from oncekey.outbox.attempts import Attempt

WAIT_SECONDS = 1.0
"""How long a job may wait here for a place. Then it is given back, for other workers."""


class Places:
    """``start`` begins an attempt, and sets its ``work``. ``give_back`` ends one that has not begun."""

    def __init__(
        self,
        concurrency: int,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[Attempt], None],
        give_back: Callable[[Attempt], None],
    ) -> None:
        self.running: set[Attempt] = set()
        self._concurrency = concurrency
        self._loop = loop
        self._start, self._give_back = start, give_back
        self._waiting: deque[Attempt] = deque()  # the oldest first
        self._wait_timer: asyncio.TimerHandle | None = None
        self._limit_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def begin(self, attempts: Sequence[Attempt]) -> None:
        self._waiting.extend(attempts)
        self._fill()

    def end(self, attempt: Attempt) -> None:
        """Free the place of an attempt whose task ended."""
        self.running.discard(attempt)
        attempt.seconds = time.monotonic() - attempt.began

    def refill(self) -> None:
        """Start the next attempt. Call it when the end of the last one is with the pump."""
        if self._waiting:
            self._fill()

    def close(self) -> None:
        """Start no more attempts: give back those that wait, and those that still come."""
        self._closed = True
        self._fill()

    def _fill(self) -> None:
        while self._waiting and (self._closed or len(self.running) < self._concurrency):
            attempt = self._waiting.popleft()
            if self._closed or attempt.lost or attempt.expired:
                self._give_back(attempt)
                continue
            self.running.add(attempt)
            attempt.began = time.monotonic()
            self._start(attempt)
            if attempt.task.is_async:
                self._watch(attempt.began + attempt.task.timeout)
        if self._waiting and self._wait_timer is None:
            self._wait_timer = self._loop.call_later(WAIT_SECONDS, self._waited)

    def _waited(self) -> None:
        """Tasks take longer now than when these jobs were claimed."""
        self._wait_timer = None
        latest = time.monotonic() - WAIT_SECONDS
        while self._waiting and self._waiting[0].began <= latest:
            self._give_back(self._waiting.popleft())
        self._fill()

    # -- timeouts --------------------------------------------------------------------------------------------------

    def _watch(self, at: float) -> None:
        """Look at this time whether tasks overran. One timer for all of them: ``asyncio.timeout`` took 7 µs a job."""
        when = at - time.monotonic() + self._loop.time()
        if self._limit_timer is not None:
            if self._limit_timer.when() <= when:
                return
            self._limit_timer.cancel()
        self._limit_timer = self._loop.call_at(when, self._overran)

    def _overran(self) -> None:
        """Cancel async tasks that took longer than their timeout. A thread cannot be cancelled."""
        self._limit_timer = None
        now, following = time.monotonic(), float("inf")
        for attempt in self.running:
            if attempt.work is None or not attempt.task.is_async or attempt.timed_out:
                continue
            at = attempt.began + attempt.task.timeout
            if at <= now:
                attempt.timed_out = True
                attempt.work.cancel()
            else:
                following = min(following, at)
        if following < float("inf"):
            self._watch(following)
