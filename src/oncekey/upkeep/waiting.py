"""Logs which half-done keys wait for their client, because no resume function is registered for their operation.

Such a key is charged, for example, and its receipt is missing. It becomes unknown at the end of its ttl, which may be a
day later, so the log names its operation before that. It names an operation as ``upkeep/unasked.py`` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from oncekey.core.by_operation import ByOperation
from oncekey.core.health import WAITING_SECONDS, HalfDoneOf
from oncekey.engine.resumption import Registered
from oncekey.stores.api import Store
from oncekey.upkeep.unasked import News, counted_keys, shown_operation

_log = logging.getLogger("oncekey")

_MINUTES = f"{WAITING_SECONDS / 60:.0f} min"
LOOK_SECONDS = 60.0
"""How often the rows are counted at most."""


def half_done(each: HalfDoneOf) -> str:
    """The sentence for ``oncekey upkeep`` and ``oncekey doctor``, which do not know the app's functions."""
    return (
        f"{counted_keys(each.keys)} half done for over {_MINUTES}, without an attempt of a client or of upkeep, for "
        f"{shown_operation(each.operation)}"
    )


def advice(operation: str) -> str:
    return (
        f"register a function with once.resume({operation!r}, fn) and run upkeep with the app (docs/phases.md), or "
        "have the client send the request again with its key; at the end of its ttl a half-done key becomes unknown"
    )


class HalfDoneWatch:
    """Logs the operations whose half-done keys have no resume function in this process."""

    def __init__(
        self,
        store: Store,
        functions: ByOperation[Registered],
        clock: Callable[[], float] = time.monotonic,
        route_of: Callable[[str], str] = str,
    ) -> None:
        self._store = store
        self._functions = functions
        self._news = News(clock, route_of)
        self._clock = clock
        self._looked_at: float | None = None

    def look(self) -> None:
        """Count the rows, unless that was just done."""
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        waiting = self._store.counts().half_done
        found = {each.operation: each.keys for each in waiting if self._functions.of(each.operation) is None}
        for operation, number in self._news.among(found).items():
            shown = (counted_keys(number), _MINUTES, shown_operation(operation), advice(operation))
            _log.warning("%s half done for over %s and no resume function is registered for %s: %s", *shown)
