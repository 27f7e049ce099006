"""Checks whether leases are long enough, from the rows alone: it does not need the app.

It measures keys that the owner of the first attempt finished while it held the lease. Their handler time is
``finished_at - created_at``. The lease of an operation is the shortest ``lease_until - created_at`` among them; a
renewed lease looks longer. Keys that a worker or the reconciler finished ended after their lease. They say nothing
about a handler and are left out.

Each sweep reads a few hundred keys in the order of the primary key, and the next sweep continues there. So all keys are
read in time, without a scan.
"""

from __future__ import annotations

from collections import deque

from oncekey.core.record import Record
from oncekey.core.states import FINAL
from oncekey.core.values import value
from oncekey.stores.api import Store
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.events import LeaseTooShort

LOOKED_AT = 200
"""How many keys one call of ``look`` reads."""
KEPT = 1_000
"""How many handler times are kept for each operation, the newest."""
ENOUGH = 100
"""With fewer handler times, one slow request would decide the 99th percentile."""
OPERATIONS = 200
"""How many operations are watched. Clients can make more: each path that no route lists is an operation."""


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
        self._logged: dict[str, float] = {}

    def look(self) -> None:
        """Read the next keys, and emit ``LeaseTooShort`` once for each operation whose lease is too short."""
        rows = self._store.listing(limit=LOOKED_AT, after=self._after)
        self._after = (rows[-1].scope, rows[-1].key) if len(rows) == LOOKED_AT else None
        for operation in {row.operation for row in rows if self._add(row)}:
            found = self.measured(operation)
            if found is None:
                continue
            lease, slow = found
            if slow > lease and self._logged.get(operation) != lease:
                self._logged[operation] = lease
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
