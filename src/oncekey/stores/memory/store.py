"""The store in a dictionary: for tests, examples, and as the model that every other store is compared with.

It loses everything when the process ends. Read it to learn what the verbs mean: the SQL of the other stores does the
same.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from oncekey.core.audit import AuditLine
from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.core.health import StoreHealth, health_of
from oncekey.core.rates import Tally
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import Swap
from oncekey.stores.api import FOUND, Capabilities, Duty
from oncekey.stores.duties import Turns, is_over, to_purge
from oncekey.stores.memory.kept import MemoryKept

At = tuple[str, str]


class MemoryStore(MemoryKept):
    capabilities = Capabilities(durable=False, shared=False, server_clock=False, writers=1, embedded=True)

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._rows: dict[At, Record] = {}
        self._steps: dict[At, dict[str, Step]] = {}
        self._audit: dict[int, AuditLine] = {}
        self._lines = itertools.count(1)
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
        if row is None or not change.fits(row, now):
            return None
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
            steps[step.name] = step.written_over(steps.get(step.name))
        if (line := change.audit_line(now)) is not None:
            self._note(line)

    def _note(self, line: AuditLine) -> None:
        self._audit[next(self._lines)] = line

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
            return self._turns.hand_out_of(self._rows.values(), duty, limit, self._clock())

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        with self._lock:
            doomed = to_purge(self._rows.values(), self._clock(), limit, expired_state_only=expired_state_only)
            for row in doomed:
                del self._rows[row.scope, row.key]
                self._steps.pop((row.scope, row.key), None)
            return len(doomed)

    # -- for operators and webhooks ------------------------------------------------------------------------------

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        with self._lock:
            return [line for line in reversed(self._audit.values()) if (line.scope, line.key) == (scope, key)][:limit]

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        with self._lock:
            until = self._clock() - keep_seconds
            lines = self._audit.items()
            over = [(number, line.at) for number, line in lines if is_over(self._rows.get((line.scope, line.key)))]
            doomed = [number for number, at in over if at <= until][:limit]
            for number in doomed:
                del self._audit[number]
            return len(doomed)

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[At]:
        with self._lock:
            return sorted(
                at
                for at, steps in self._steps.items()
                if any(step.carries(downstream_key, provider_id) for step in steps.values())
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
                if row.meets(state, scope, operation, None if older_than is None else now - older_than)
                and (after is None or at > after)
            ][:limit]

    def tally(self, asked: Tally) -> int:
        with self._lock:
            since = None if asked.newer_than is None else self._clock() - asked.newer_than
            rows = [row for (scope, _), row in self._rows.items() if asked.tenant <= scope < asked.end]
            return min(asked.limit, len([row for row in rows if since is None or row.created_at > since]))

    def counts(self) -> StoreHealth:
        with self._lock:
            return health_of(self._rows.values(), self._clock())

    def diagnose(self) -> list[Diagnosis]:
        found = "keys are in this process alone, and are lost with it"
        return [Diagnosis("durability", Level.WARN, found, "use sqlite:/// or postgresql://, except in tests")]

    def migrate(self) -> list[str]:
        return []

    def check(self) -> None:
        return None

    def disconnect(self) -> None:
        return None

    def close(self) -> None:
        return None
