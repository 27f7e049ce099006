"""The store in a dictionary: for tests, examples, and as the model that every other store is compared with.

Loses everything with the process. Read it to learn what the verbs mean: the SQL of the others does the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from oncekey.core.record import Found, Record, Reservation, Swap
from oncekey.core.states import FINAL, State
from oncekey.stores.base import Capabilities, Duty


class MemoryStore:
    capabilities = Capabilities(durable=False, shared=False, server_clock=False, writers=1)

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._rows: dict[tuple[str, str], Record] = {}
        self._lock = threading.Lock()

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        with self._lock:
            now = self._clock()
            return [Found(self._read_or_insert(wanted, now)) for wanted in batch]

    def _read_or_insert(self, wanted: Reservation, now: float) -> Record:
        at = (wanted.scope, wanted.key)
        if at not in self._rows:
            self._rows[at] = wanted.record(now)
        return replace(self._rows[at], now=now)

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        with self._lock:
            now = self._clock()
            return [self._compare_and_set(change, now) for change in batch]

    def _compare_and_set(self, change: Swap, now: float) -> Record | None:
        at = (change.scope, change.key)
        row = self._rows.get(at)
        if row is None or row.state is not change.from_state or row.owner != change.owner:
            return None
        if change.lease_over_by is not None and row.lease_until + change.lease_over_by > now:
            return None
        if change.past_expiry and row.expires_at > now:
            return None
        if change.to_state is None:
            del self._rows[at]
            return replace(row, now=now)
        restarted = change.restart.record(now) if change.restart is not None else None
        self._rows[at] = restarted or change.moved(row, now)
        return self._rows[at]

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        with self._lock:
            now = self._clock()
            rows = [self._rows.get(at) for at in keys]
            return [replace(row, now=now) if row else None for row in rows]

    def due(self, duty: Duty, limit: int) -> list[Record]:
        with self._lock:
            return self._due(duty, limit)

    def _due(self, duty: Duty, limit: int) -> list[Record]:
        now = self._clock()
        found = [(when, row) for row in self._rows.values() if (when := _due_at(row, duty)) is not None]
        found.sort(key=lambda pair: (pair[0], pair[1].scope, pair[1].key))
        return [replace(row, now=now) for when, row in found if when <= now][:limit]

    def purge(self, limit: int) -> int:
        with self._lock:
            doomed = self._due(Duty.EXPIRED, limit)
            for row in doomed:
                del self._rows[row.scope, row.key]
            return len(doomed)

    def migrate(self) -> list[str]:
        return []

    def check(self) -> None:
        return None

    def disconnect(self) -> None:
        return None

    def close(self) -> None:
        return None


def _due_at(row: Record, duty: Duty) -> float | None:
    """When a row becomes due for a duty; None: never, as it stands."""
    match duty:
        case Duty.LEASES if row.state is State.IN_PROGRESS:
            return row.lease_until
        case Duty.EXPIRED if row.state in FINAL:
            return row.expires_at
        case Duty.EXPIRED if row.state is State.FAILED_RETRYABLE and not row.has_steps:
            return row.expires_at
        case Duty.ABANDONED if row.state is State.PENDING:
            return row.expires_at
        case Duty.UNKNOWNS if row.state is State.UNKNOWN:
            return row.reconcile_at
    return None
