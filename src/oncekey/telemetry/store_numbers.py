"""The numbers of the store for an exporter: read when they are fetched, and not too often."""

from __future__ import annotations

import logging
import threading
import time

from oncekey.errors import OperatorError
from oncekey.telemetry import instruments
from oncekey.telemetry.instruments import Reading, Readings

_log = logging.getLogger("oncekey")

STORE_SECONDS = 10.0
"""The numbers of the store are read at most this often, however many servers fetch them."""


class StoreNumbers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: Readings | None = None
        self._read_at: float | None = None
        self._last: list[Reading] = []

    def show(self, read: Readings | None) -> None:
        """``read`` asks the store. None: upkeep has ended, and there are no numbers to show."""
        with self._lock:
            self._read, self._read_at = read, None

    def now(self) -> list[Reading]:
        """The numbers. Blocks: it may ask the store. Several callers at once ask it once."""
        with self._lock:
            if self._read is None:
                return []
            if self._read_at is None or time.monotonic() - self._read_at >= STORE_SECONDS:
                self._last = _numbers(self._read)
                self._read_at = time.monotonic()
            return self._last


def _numbers(read: Readings) -> list[Reading]:
    try:
        return [(instruments.STORE_UP, (), 1.0), *read()]
    except OperatorError as error:
        _log.warning("the numbers of the store could not be read for the metrics page: %s", error)
        return [(instruments.STORE_UP, (), 0.0)]
