"""The store in a dictionary: for tests, examples, and as the model that every other store is compared with.

It loses everything when the process ends. Read it to learn what the verbs mean: the SQL of the other stores does the
same.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from oncekey.core.audit import AuditLine
from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.core.health import COUNTED, NO_RESOLVER, OPERATIONS, StoreHealth, UnknownsOf
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import FINAL, State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import Swap
from oncekey.stores.api import FOUND, Capabilities, Duty, InLoop
from oncekey.stores.fairness import Turns
from oncekey.stores.memory.outbox import NoOutbox

At = tuple[str, str]


class MemoryStore(NoOutbox):
    capabilities = Capabilities(durable=False, shared=False, server_clock=False, writers=1, embedded=True)

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._rows: dict[At, Record] = {}
        self._steps: dict[At, dict[str, Step]] = {}
        self._audit: list[AuditLine] = []
        self._lock = threading.Lock()
        self._turns = Turns()

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
        if change.from_effects is not None and row.effects is not change.from_effects:
            return None
        if change.to_state is None and row.state is State.IN_PROGRESS and (row.attempt > 1 or row.has_steps):
            return None  # discard is for a first attempt without steps
        self._write_beside(change, now)
        if change.to_state is None:
            del self._rows[at]
            return replace(row, now=now)
        restarted = change.restart.record(now) if change.restart is not None else None
        self._rows[at] = restarted or change.moved(row, now)
        return self._rows[at]

    def _write_beside(self, change: Swap, now: float) -> None:
        """Write the step and the audit line of a swap, in the same commit as the move of its row."""
        at = (change.scope, change.key)
        if change.forgets_steps:
            self._steps.pop(at, None)
        if (step := change.step) is not None:
            steps = self._steps.setdefault(at, {})
            if (old := steps.get(step.name)) is not None:
                known = old.provider_id if step.provider_id is None else step.provider_id
                step = replace(step, kind=old.kind, provider_id=known)
            steps[step.name] = step
        if (audit := change.audit) is not None:
            before, after = change.from_state, change.to_state
            line = AuditLine(now, audit.who, change.event, change.scope, change.key, None, before, after, audit.why)
            self._audit.append(line)

    def both(self, begins: Sequence[Reservation], ends: Sequence[Swap]) -> tuple[list[Found], list[Record | None]]:
        moved = self.swap(ends)
        return self.reserve(begins), moved

    def read(self, keys: Sequence[At]) -> list[Record | None]:
        with self._lock:
            now = self._clock()
            rows = [self._rows.get(at) for at in keys]
            return [replace(row, now=now) if row else None for row in rows]

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        with self._lock:
            return [list(self._steps.get((asked.scope, asked.key), {}).values()) for asked in keys]

    def due(self, duty: Duty, limit: int) -> list[Record]:
        with self._lock:
            oldest = self._due(lambda row: _due_at(row, duty), limit)
            waiting = [(when, row) for row in self._rows.values() if (when := _due_at(row, duty)) is not None]
            now = self._clock()

            def visit(after: str, most: int) -> list[tuple[str, bool]]:
                scopes = sorted({row.scope for _, row in waiting if row.scope > after})[:most]
                return [(scope, any(row.scope == scope and when <= now for when, row in waiting)) for scope in scopes]

            def take(scopes: Sequence[str], most: int) -> list[Record]:
                due = self._due(lambda row: _due_at(row, duty), len(waiting))
                return [row for scope in scopes for row in [row for row in due if row.scope == scope][:most]]

            return self._turns.hand_out(duty, limit, oldest, visit, take)

    def _due(self, due_at: Callable[[Record], float | None], limit: int) -> list[Record]:
        now = self._clock()
        found = [(when, row) for row in self._rows.values() if (when := due_at(row)) is not None]
        found.sort(key=lambda pair: (pair[0], pair[1].scope, pair[1].key))
        return [replace(row, response=None, now=now) for when, row in found if when <= now][:limit]

    def purge(self, limit: int, *, tombstones_only: bool = False) -> int:
        with self._lock:
            doomed = [] if tombstones_only else self._due(lambda row: _due_at(row, Duty.EXPIRED), limit)
            doomed += self._due(_over_at, limit - len(doomed))
            for row in doomed:
                del self._rows[row.scope, row.key]
                self._steps.pop((row.scope, row.key), None)
            return len(doomed)

    # -- for operators and webhooks ------------------------------------------------------------------------------

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        with self._lock:
            return [line for line in reversed(self._audit) if (line.scope, line.key) == (scope, key)][:limit]

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        with self._lock:
            until = self._clock() - keep_seconds
            kept = {at for at, row in self._rows.items() if row.state not in (*FINAL, State.EXPIRED)}
            doomed = [line for line in self._audit if line.at <= until and (line.scope, line.key) not in kept][:limit]
            gone = set(map(id, doomed))
            self._audit = [line for line in self._audit if id(line) not in gone]
            return len(doomed)

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[At]:
        with self._lock:
            return sorted(
                at
                for at, steps in self._steps.items()
                if any(
                    (downstream_key is not None and step.downstream_key == downstream_key)
                    or (provider_id is not None and step.provider_id == provider_id)
                    for step in steps.values()
                )
            )[:FOUND]

    def listing(
        self,
        state: State | None = None,
        scope: str | None = None,
        operation: str | None = None,
        older_than: float | None = None,
        limit: int = 100,
        after: At | None = None,
    ) -> list[Record]:
        with self._lock:
            now = self._clock()
            return [
                replace(row, response=None, now=now)
                for at, row in sorted(self._rows.items())
                if (state is None or row.state is state)
                and (scope is None or row.scope == scope)
                and (operation is None or row.operation == operation)
                and (older_than is None or row.created_at + older_than <= now)
                and (after is None or at > after)
            ][:limit]

    def counts(self) -> StoreHealth:
        with self._lock:
            now = self._clock()
            rows = self._rows.values()
            counted = Counter(row.state for row in rows)
            unknown = [row for row in rows if row.state is State.UNKNOWN]
            leases = [row.lease_until for row in rows if row.state is State.IN_PROGRESS]
            return StoreHealth(
                counts={state: min(counted[state], COUNTED) for state in State},
                dead=min(sum(row.dead for row in rows), COUNTED),
                oldest_unknown_seconds=max((now - row.created_at for row in unknown), default=0.0),
                lease_over_seconds=max(0.0, now - min(leases, default=now)),
                unknowns=_by_operation(unknown),
            )

    def diagnose(self) -> list[Diagnosis]:
        found = "keys are in this process alone, and are lost with it"
        return [Diagnosis("durability", Level.WARN, found, "use sqlite:/// or postgresql://, except in tests")]

    def in_loop(self) -> InLoop:
        raise NotImplementedError("capabilities.in_loop says that there is none")

    def migrate(self) -> list[str]:
        return []

    def check(self) -> None:
        return None

    def disconnect(self) -> None:
        return None

    def close(self) -> None:
        return None


def _by_operation(unknown: Sequence[Record]) -> tuple[UnknownsOf, ...]:
    keys = Counter(row.operation for row in unknown)
    unasked = Counter(row.operation for row in unknown if (row.last_error or "").startswith(NO_RESOLVER))
    most = sorted(keys, key=lambda operation: (-keys[operation], operation))[:OPERATIONS]
    return tuple(UnknownsOf(operation, keys[operation], unasked[operation]) for operation in most)


def _due_at(row: Record, duty: Duty) -> float | None:
    """When a row becomes due for a duty; None: never, in its present state."""
    match duty:
        case Duty.LEASES if row.state is State.IN_PROGRESS:
            return row.lease_until
        case Duty.EXPIRED if row.state in FINAL:
            return row.expires_at
        case Duty.EXPIRED if row.state is State.FAILED_RETRYABLE and not row.has_steps:
            return row.expires_at
        case Duty.LAPSED if row.state is State.FAILED_RETRYABLE and row.has_steps:
            return row.expires_at
        case Duty.RESUMABLE if row.state is State.FAILED_RETRYABLE:
            return row.reconcile_at
        case Duty.ABANDONED if row.state is State.PENDING:
            return row.expires_at
        case Duty.UNKNOWNS if row.state is State.UNKNOWN:
            return row.reconcile_at
    return None


def _over_at(row: Record) -> float | None:
    """When an expired row is deleted: it is kept for a second retention."""
    return row.expires_at + row.retention_seconds if row.state is State.EXPIRED else None
