"""The circuit breaker: when the store fails again and again, requests are refused without queueing for it.

The breaker gates *begin* only. An owner that already holds a key may always try to renew, finish and release it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from oncekey.engine import process

FAILURES_TO_OPEN = 5
"""Failures in a row. One failed batch fails all its callers, so a busy app reaches this quickly. At one request a
second, a single dropped connection does not open the breaker."""
OPEN_SECONDS = 1.0
"""How long the breaker refuses before one request may try. Short, because each refused request is a refused payment."""
_CLOSED = float("-inf")


class Breaker:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[bool, Exception | None], None] | None = None,
    ) -> None:
        self._clock = clock
        self._on_change = on_change or (lambda is_open, error: None)
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at = _CLOSED
        self.calm = True
        """No failure since the last success: ``allows`` is True, and ``succeeded`` has nothing to do."""
        self.reason = ""
        """The message of the last failure."""
        process.enroll(self)

    def allows(self) -> bool:
        """Whether a request may ask the store. An open breaker lets one request through after each pause."""
        if self._retry_at == _CLOSED:
            return True
        with self._lock:
            now = self._clock()
            if now < self._retry_at:
                return False
            if self._retry_at != _CLOSED:
                self._retry_at = now + OPEN_SECONDS  # this request is the probe; the next waits for a pause
            return True

    def after_fork(self) -> None:
        """In a child: the thread that held the lock exists only in the parent."""
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        if self._failures == 0 and self._retry_at == _CLOSED:
            return
        with self._lock:
            was_open = self._retry_at != _CLOSED
            self._failures, self._retry_at, self.calm = 0, _CLOSED, True
        if was_open:
            self._on_change(False, None)

    def failed(self, error: Exception) -> None:
        with self._lock:
            self._failures, self.calm, self.reason = self._failures + 1, False, str(error)
            opens = self._failures >= FAILURES_TO_OPEN and self._retry_at == _CLOSED
            if self._failures >= FAILURES_TO_OPEN:
                self._retry_at = self._clock() + OPEN_SECONDS
        if opens:
            self._on_change(True, error)
