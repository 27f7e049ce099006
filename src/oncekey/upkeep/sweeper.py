"""The sweeper moves keys whose lease is over, so that a retry or the reconciler finds them.

The row alone decides: if a second run is harmless, the key becomes retryable, otherwise unknown. The sweeper never
takes a key from a live owner, also if several sweepers run or the clock of their host is wrong. The store compares the
lease with its own clock, first when it lists the keys, and again in the statement that moves each key. An owner that
holds its row in an open transaction is alive, so the sweeper skips it.
"""

from __future__ import annotations

import threading
from typing import Any

from oncekey.core.record import Record
from oncekey.core.states import MAY_RERUN, Actor, Event
from oncekey.core.swaps import Swap, swap
from oncekey.core.values import value
from oncekey.stores.api import Duty, Store
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.events import about
from oncekey.upkeep.leases import LeaseWatch

BATCH = 500
COUNTED = 10_000
"""A dry run counts at most this many keys."""
_REASON = "the lease ran out"


@value
class Swept:
    """What one run did, or with ``dry_run`` would do (counted up to 10,000)."""

    released: int = 0
    """Keys that are retryable now."""
    doubted: int = 0
    """Keys that are unknown now, and on the reconciler's list."""

    def as_json(self) -> dict[str, Any]:
        return {"released": self.released, "doubted": self.doubted}


class Sweeper:
    """``run`` blocks. Several sweepers may run at once, also in several processes."""

    def __init__(self, store: Store, *, batch: int = BATCH, emitter: Emitter | None = None) -> None:
        self._store = store
        self._batch = batch
        self._emitter = emitter or Emitter()
        self._leases = LeaseWatch(store, self._emitter)

    def run(self, stop: threading.Event | None = None, *, dry_run: bool = False) -> Swept:
        """Move all keys that are due now. ``stop`` ends the run after a batch."""
        if dry_run:
            return _counted(self._store.due(Duty.LEASES, COUNTED))
        stop = stop or threading.Event()
        released = doubted = 0
        while not stop.is_set():
            due = self._store.due(Duty.LEASES, self._batch)
            moved = [record for record in self._store.swap([_move(each) for each in due]) if record] if due else []
            for record in moved:
                self._tell(record)
            swept = _counted(moved)
            released, doubted = released + swept.released, doubted + swept.doubted
            if len(due) < self._batch or not moved:  # none moved: other transactions hold all of them now
                break
        self._leases.look()
        return Swept(released, doubted)

    def _tell(self, record: Record) -> None:
        self._emitter.emit(events.ZombieFound(*about(record)))
        if record.effects in MAY_RERUN:
            self._emitter.emit(events.Released(*about(record), reason=_REASON))
        else:
            self._emitter.emit(events.Doubted(*about(record), reason=_REASON))
            self._emitter.emit(events.ReconcileScheduled(*about(record), in_seconds=0.0))


def _move(record: Record) -> Swap:
    event = Event.RELEASE if record.effects in MAY_RERUN else Event.DOUBT
    return swap(record, event, Actor.SWEEPER, last_error=_REASON)


def _counted(records: list[Record]) -> Swept:
    released = sum(record.effects in MAY_RERUN for record in records)
    return Swept(released, len(records) - released)
