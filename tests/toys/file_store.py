"""A toy, by the section "Add a store" of CONTRIBUTING.md: all keys are in one file, which every write replaces."""

from __future__ import annotations

import fcntl
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from oncekey.core.audit import AuditLine
from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.core.health import StoreHealth, health_of
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import Swap
from oncekey.stores.api import FOUND, Capabilities, Duty
from oncekey.stores.duties import Turns, is_over, to_purge

At = tuple[str, str]


@dataclass
class Tables:
    rows: dict[At, Record] = field(default_factory=dict)
    steps: dict[At, dict[str, Step]] = field(default_factory=dict)
    audit: list[AuditLine] = field(default_factory=list)


class FileStore:
    capabilities = Capabilities(durable=True, shared=True, server_clock=False, writers=1, embedded=True)

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock, self._turns = path, clock, Turns()

    @contextmanager
    def _tables(self, *, writes: bool = False) -> Iterator[Tables]:
        """The tables under a lock. They are written if the block ends without an error: all of it, or nothing."""
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                tables = pickle.loads(self._path.read_bytes()) if self._path.exists() else Tables()  # noqa: S301 - a toy
                yield tables
                if writes:
                    self._replace(pickle.dumps(tables))
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too

    def _replace(self, content: bytes) -> None:
        with self._path.with_suffix(".new").open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        Path(file.name).replace(self._path)

    # Keys
    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        with self._tables(writes=True) as tables:
            now = self._clock()
            rows = [tables.rows.setdefault((wanted.scope, wanted.key), wanted.record(now)) for wanted in batch]
            return [Found(replace(row, now=now)) for row in rows]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        with self._tables(writes=True) as tables:
            return [self._move(tables, change, self._clock()) for change in batch]

    def _move(self, tables: Tables, change: Swap, now: float) -> Record | None:
        at = (change.scope, change.key)
        row = tables.rows.get(at)
        if row is None or not change.fits(row, now):
            return None
        if change.forgets_steps:
            tables.steps.pop(at, None)
        if (step := change.step) is not None:
            steps = tables.steps.setdefault(at, {})
            steps[step.name] = step.written_over(steps.get(step.name))
        if (line := change.audit_line(now)) is not None:
            tables.audit.append(line)
        if change.to_state is None:
            return replace(tables.rows.pop(at), now=now)
        tables.rows[at] = change.restart.record(now) if change.restart is not None else change.moved(row, now)
        return tables.rows[at]

    def read(self, keys: Sequence[At]) -> list[Record | None]:
        with self._tables() as tables:
            now = self._clock()
            return [replace(tables.rows[at], now=now) if at in tables.rows else None for at in keys]

    def due(self, duty: Duty, limit: int) -> list[Record]:
        with self._tables() as tables:
            return self._turns.hand_out_of(tables.rows.values(), duty, limit, self._clock())

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        with self._tables(writes=True) as tables:
            doomed = to_purge(tables.rows.values(), self._clock(), limit, expired_state_only=expired_state_only)
            for row in doomed:
                del tables.rows[row.scope, row.key]
                tables.steps.pop((row.scope, row.key), None)
            return len(doomed)

    def migrate(self) -> list[str]:
        return []

    def check(self) -> None: ...

    disconnect = close = check

    # Steps
    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        with self._tables() as tables:
            return [list(tables.steps.get((asked.scope, asked.key), {}).values()) for asked in keys]

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[At]:
        with self._tables() as tables:
            steps = [(at, step) for at, steps in tables.steps.items() for step in steps.values()]
            return sorted({at for at, step in steps if step.carries(downstream_key, provider_id)})[:FOUND]

    # Inspect
    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        with self._tables() as tables:
            return [line for line in reversed(tables.audit) if (line.scope, line.key) == (scope, key)][:limit]

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        with self._tables(writes=True) as tables:
            until, rows = self._clock() - keep_seconds, tables.rows
            over = [line for line in tables.audit if line.at <= until and is_over(rows.get((line.scope, line.key)))]
            tables.audit = [line for line in tables.audit if line not in over[:limit]]
            return len(over[:limit])

    # fmt: off
    def listing(self, state: State | None = None, scope: str | None = None, operation: str | None = None,
                older_than: float | None = None, limit: int = 100, after: At | None = None) -> list[Record]:
        # fmt: on
        with self._tables() as tables:
            now = self._clock()
            until = None if older_than is None else now - older_than
            rows = [row for at, row in sorted(tables.rows.items()) if after is None or at > after]
            met = [row for row in rows if row.meets(state, scope, operation, until)]
            return [replace(row, response=None, now=now) for row in met[:limit]]

    def counts(self) -> StoreHealth:
        with self._tables() as tables:
            return health_of(tables.rows.values(), self._clock())

    def diagnose(self) -> list[Diagnosis]:
        return [Diagnosis("durability", Level.OK, "every write replaces the file, after an fsync")]
