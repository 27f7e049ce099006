"""The reaper ends keys whose time is over.

In this order:

1. deferred requests that no job settled fail with 408, and their jobs are cancelled (never one that a worker runs). If
   the job was tried, the key becomes unknown instead, since it may have happened;
2. half-done requests whose client did not retry become unknown. They go to the reconciler first, not to the dead
   letters: a resolver may settle them, and after the last try they become dead letters;
3. final keys past their expiry are deleted, or with ``soft`` kept in the state ``expired`` for a second retention;
4. jobs that are done are deleted after a week. Dead letters stay until an operator redirects them;
5. lines of the audit are deleted after 400 days; the lines of keys that are not over stay.

The reaper never touches a key in flight, and the store checks every condition in the statement that acts. The reaper
works in batches, with pauses four times as long as the batch took. So a backlog of a million keys takes only a bounded
share of the store's time from requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from oncekey.core.policy_headers import STORED_HEADERS
from oncekey.core.problems import ProfileName, Situation, problem
from oncekey.core.record import StoredResponse
from oncekey.core.sealed import unless_sealed
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import Swap, swap
from oncekey.core.values import value
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Duty, Outbox, Store
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.events import about

BATCH = 500
SHARE = 0.2
"""The part of the time in which a reaper with a backlog works. It pauses for the rest."""
KEEP_JOBS_SECONDS = 7 * 86_400.0
AUDIT_RETENTION = timedelta(days=400)
"""Longer than the twelve months that PCI DSS (10.5.1) requires for audit logs, and the table does not grow for ever."""
COUNTED = 10_000
"""A dry run counts at most this many keys."""
_REASON = "half done, and the client did not retry before the key expired"


@value
class Reaped:
    """What one run did. With ``dry_run``: what is due, up to 10,000 each, without jobs, audit and keys in the state
    ``expired``."""

    timed_out: int = 0
    doubted: int = 0
    expired: int = 0
    """Kept in the state ``expired``."""
    deleted: int = 0
    jobs: int = 0
    audit_lines: int = 0

    def as_json(self) -> dict[str, Any]:
        names = ("timed_out", "doubted", "expired", "deleted", "jobs", "audit_lines")
        return {name: getattr(self, name) for name in names}


class Reaper:
    """``run`` blocks. Several reapers may run at once, also in several processes.

    ``audit_retention`` how long a line of the audit is kept after its key is over; None: for ever
    """

    def __init__(
        self,
        store: Store,
        *,
        soft: bool = False,
        batch: int = BATCH,
        share: float = SHARE,
        keep_jobs: float = KEEP_JOBS_SECONDS,
        audit_retention: timedelta | None = AUDIT_RETENTION,
        profile: ProfileName = "ietf",
        emitter: Emitter | None = None,
    ) -> None:
        if not 0 < share <= 1:
            raise ConfigurationError(f"Reaper(share={share}): it must be more than 0 and at most 1")
        if audit_retention is not None and audit_retention <= timedelta(0):
            raise ConfigurationError(
                f"Reaper(audit_retention={audit_retention!r}): it must be more than 0; None keeps the audit for ever"
            )
        self._store = store
        self._outbox = store if isinstance(store, Outbox) else None
        self._soft = soft
        self._batch = batch
        self._share = share
        self._keep_jobs = keep_jobs
        self._keep_audit = None if audit_retention is None else audit_retention.total_seconds()
        self._late = timed_out_response(profile)
        self._emitter = emitter or Emitter()

    def run(self, stop: threading.Event | None = None, *, dry_run: bool = False) -> Reaped:
        """Do once all that is due. ``stop`` ends the run after a batch, and ends a pause at once."""
        if dry_run:
            return self._count()
        stop = stop or threading.Event()
        timed_out = self._batches(stop, self._time_out)
        doubted = self._batches(stop, self._doubt)
        expired = self._batches(stop, self._expire) if self._soft else 0
        deleted = self._batches(stop, self._purge)
        jobs = lines = 0
        if (outbox := self._outbox) is not None:
            jobs = self._batches(stop, lambda: outbox.purge_jobs(self._batch, self._keep_jobs))
        if (keep := self._keep_audit) is not None:
            lines = self._batches(stop, lambda: self._store.purge_audit(self._batch, keep))
        return Reaped(timed_out, doubted, expired, deleted, jobs, lines)

    def _batches(self, stop: threading.Event, work: Callable[[], int]) -> int:
        total = 0
        while not stop.is_set():
            began = time.monotonic()
            done = work()
            total += done
            if done < self._batch:
                break
            stop.wait((time.monotonic() - began) * (1 / self._share - 1))
        return total

    def _time_out(self) -> int:
        if self._outbox is not None:
            late = len(self._outbox.time_out(self._batch, self._late))
        else:  # there are no jobs, so none was tried
            due = self._store.due(Duty.ABANDONED, self._batch)
            late = self._move(
                [
                    swap(record, Event.TIME_OUT, Actor.REAPER, to_state=State.FAILED, response=self._late)
                    for record in due
                ]
            )
        if late:
            self._emitter.emit(events.TimedOut(late))
        return late

    def _doubt(self) -> int:
        lapsed = self._store.due(Duty.LAPSED, self._batch)
        moves = [
            swap(record, Event.DOUBT, Actor.REAPER, last_error=unless_sealed(record.last_error, _REASON))
            for record in lapsed
        ]
        moved = [record for record in self._store.swap(moves) if record] if moves else []
        for record in moved:
            self._emitter.emit(events.Doubted(*about(record), reason=_REASON))
            self._emitter.emit(events.ReconcileScheduled(*about(record), in_seconds=0.0))
        return len(moved)

    def _expire(self) -> int:
        due = self._store.due(Duty.EXPIRED, self._batch)
        moves = [swap(record, Event.EXPIRE, Actor.REAPER, to_state=State.EXPIRED) for record in due]
        return self._pruned(self._move(moves))

    def _move(self, moves: list[Swap]) -> int:
        return sum(record is not None for record in self._store.swap(moves)) if moves else 0

    def _purge(self) -> int:
        return self._pruned(self._store.purge(self._batch, expired_state_only=self._soft))

    def _pruned(self, rows: int) -> int:
        if rows:
            self._emitter.emit(events.Pruned(rows))
        return rows

    def _count(self) -> Reaped:
        late, lapsed, expired = (
            len(self._store.due(duty, COUNTED)) for duty in (Duty.ABANDONED, Duty.LAPSED, Duty.EXPIRED)
        )
        return Reaped(late, lapsed, expired if self._soft else 0, 0 if self._soft else expired)


def timed_out_response(profile: ProfileName) -> StoredResponse:
    """The final answer of a deferred request that no job settled in time."""
    answer = problem(profile, Situation.TIMED_OUT)
    headers = ((name.decode(), text.decode("latin-1")) for name, text in answer.headers)
    return StoredResponse(answer.status, tuple(item for item in headers if item[0] in STORED_HEADERS), answer.body)
