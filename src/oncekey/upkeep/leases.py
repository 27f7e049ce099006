"""Whether leases are long enough, by what stands in the rows.

What it measures: of keys that were finished by the owner of their first attempt, while it held the lease, how long
that took (``finished_at - created_at``); and as the lease of an operation, the shortest that any of them was given
(``lease_until - created_at``; a lease that was renewed looks longer). It needs no app for it. Keys that a worker or
the reconciler finished ended after their lease, and say nothing about a handler; they are left out.

A sweep looks at a few hundred keys where the last one stopped, in the order of the primary key, and so comes round to
all of them in time: never a scan.
"""

from __future__ import annotations

from collections import deque

from oncekey.core.record import Record
from oncekey.core.states import FINAL
from oncekey.core.values import value
from oncekey.stores.base import Store
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.events import LeaseTooShort

LOOKED_AT = 200
"""Keys in one look."""
KEPT = 1_000
"""Handler times that are remembered for each operation, the newest."""
ENOUGH = 100
"""Below this many, the 99th percentile is one slow request."""
OPERATIONS = 200
"""Paths that no route lists are operations of their own: more than these are not watched."""


@value
class _Seen:
    seconds: float
    lease: float


class LeaseWatch:
    def __init__(self, store: Store, emitter: Emitter) -> None:
        self._store = store
        self._emitter = emitter
        self._after: tuple[str, str] | None = None
        self._seen: dict[str, deque[_Seen]] = {}
        self._told: dict[str, float] = {}

    def look(self) -> None:
        """Read on, and say so once where a lease turns out to be too short."""
        rows = self._store.listing(limit=LOOKED_AT, after=self._after)
        self._after = (rows[-1].scope, rows[-1].key) if len(rows) == LOOKED_AT else None
        for operation in {row.operation for row in rows if self._add(row)}:
            found = self.measured(operation)
            if found is None:
                continue
            lease, slow = found
            if slow > lease and self._told.get(operation) != lease:
                self._told[operation] = lease
                self._emitter.emit(LeaseTooShort(operation, lease_seconds=round(lease, 3), p99_seconds=round(slow, 3)))

    def measured(self, operation: str) -> tuple[float, float] | None:
        """The lease of an operation and the 99th percentile of its handler times; None: too few were seen."""
        seen = self._seen.get(operation, ())
        if len(seen) < ENOUGH:
            return None
        times = sorted(each.seconds for each in seen)
        return min(each.lease for each in seen), times[int(len(times) * 0.99)]

    def _add(self, row: Record) -> bool:
        if row.state not in FINAL or row.attempt != 1 or row.finished_at is None or row.finished_at > row.lease_until:
            return False
        seen = self._seen.get(row.operation)
        if seen is None:
            if len(self._seen) >= OPERATIONS:
                return False
            seen = self._seen[row.operation] = deque(maxlen=KEPT)
        seen.append(_Seen(row.finished_at - row.created_at, row.lease_until - row.created_at))
        return True
