"""A store with keys for the tests of upkeep: ways to make keys of any kind, and to let time pass."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.jobs import NewJob
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.stores.api import Outbox, Store
from oncekey.stores.memory import MemoryStore
from oncekey.stores.registry import open_store
from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters
from oncekey.stores.sqlite import SqliteStore
from oncekey.telemetry.events import Event as Told
from tests import databases
from tests.outbox.outbox_table import POSTGRES_ENQUEUE

SCOPE = "single-tenant"
OPERATION = "POST /payments"
LEASE = 60.0
RETENTION = 7200.0
RESPONSE = StoredResponse(201, (("content-type", "application/json"),), b'{"id":"pay_1"}')
_TIMES = ("lease_until", "reconcile_at", "created_at", "finished_at", "expires_at")
_JOB_TIMES = ("lease_until", "run_at", "created_at", "finished_at")


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class KeyStore:
    """One empty store, and what it tells."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clock = Clock()
        self.store = self.another()
        self.store.migrate()
        self.told: list[Told] = []
        self._numbers = count(1)
        self._onces: list[OnceKey] = []

    @property
    def kind(self) -> str:
        return self.url.partition(":")[0]

    @property
    def outbox(self) -> Outbox:
        assert isinstance(self.store, Outbox)
        return self.store

    def another(self) -> Store:
        """Another way to the same keys, as another process has it."""
        if self.kind == "memory":
            return MemoryStore(self.clock) if not hasattr(self, "store") else self.store
        if self.kind == "sqlite":
            return SqliteStore(Path(self.url.removeprefix("sqlite:///")), clock=self.clock)
        return open_store(self.url)

    def once(self, store: Store | None = None, **policy: Any) -> OnceKey:
        """An app's OnceKey over these keys."""
        made = OnceKey(
            store or self.store,
            scope=SINGLE_TENANT,
            policy=Policy(**policy),
            on_event=self.told.append,
        )
        self._onces.append(made)
        return made

    def close(self) -> None:
        for once in self._onces:
            once.close()
        self.store.disconnect()
        self.store.close()

    def age(self, seconds: float) -> None:
        """Let time pass, for every row."""
        if self.kind != "postgresql":
            self.clock.now += seconds
            return
        with databases.beside(self.url) as connection, connection.transaction():
            for table, columns in (("idempotency_keys", _TIMES), ("idempotency_outbox", _JOB_TIMES)):
                past = ", ".join(f"{name} = {name} - interval '{seconds} seconds'" for name in columns)
                connection.execute(f"UPDATE {table} SET {past}".encode())
            connection.execute(f"UPDATE idempotency_audit SET at = at - interval '{seconds} seconds'".encode())

    # -- keys --------------------------------------------------------------------------------------------------------

    def reservations(
        self,
        number: int,
        *,
        effects: Effects = Effects.EXTERNAL,
        lease: float = LEASE,
        retention: float = RETENTION,
        operation: str = OPERATION,
        scope: str = SCOPE,
        quarantine: float | None = None,
    ) -> list[Reservation]:
        return [
            Reservation(
                *(scope, f"key-{each:08d}", operation, each.to_bytes(32, "big"), 1),
                *(effects, f"owner-{each}", lease, retention),
                quarantine_seconds=quarantine,
            )
            for each in (next(self._numbers) for _ in range(number))
        ]

    def reserved(self, number: int = 1, **how: Any) -> list[Record]:
        """Keys in progress, with live owners."""
        found = self.store.reserve(self.reservations(number, **how))
        return [each.record for each in found if each.record]

    def moved(self, records: Sequence[Record], event: Event, by: Actor = Actor.OWNER, **how: Any) -> list[Record]:
        changes: list[Swap] = [swap(record, event, by, **how) for record in records]
        moved = [record for record in self.store.swap(changes) if record]
        assert len(moved) == len(records)
        return moved

    def finished(self, number: int = 1, **how: Any) -> list[Record]:
        return self.moved(self.reserved(number, **how), Event.COMPLETE, response=RESPONSE)

    def unknown(self, number: int = 1, **how: Any) -> list[Record]:
        return self.moved(self.reserved(number, **how), Event.DOUBT, last_error="the handler raised")

    def half_done(self, number: int = 1, **how: Any) -> list[Record]:
        """Retryable, with a step that is done and one that is intended."""
        records = self.reserved(number, effects=Effects.PHASED, **how)
        for name, state in (("ride", StepState.DONE), ("charge", StepState.INTENDED)):
            step = Step(name, StepKind.EFFECT, state, True, b'{"id":7}' if name == "ride" else None)
            records = self.moved(records, Event.ADVANCE, recovery_point=name, step=step, lease_seconds=LEASE)
        return self.moved(records, Event.RELEASE, last_error="ConnectionError")

    def pending(self, number: int = 1, **how: Any) -> list[Record]:
        return self.moved(self.reserved(number, effects=Effects.TRANSACTIONAL, **how), Event.DEFER)

    def step(self, record: Record, name: str, downstream_key: str, provider_id: str | None) -> Record:
        """The owner writes a step that a webhook can find the key by."""
        step = Step(name, StepKind.EFFECT, StepState.INTENDED, False, None, downstream_key, provider_id)
        (moved,) = self.moved([record], Event.ADVANCE, recovery_point="started", step=step, lease_seconds=LEASE)
        return moved

    def job(self, record: Record, *, settles: bool = True, downstream_key: str = "down-1") -> str:
        """A job of this key, committed as a request commits it."""
        number = next(self._numbers)
        job = NewJob(
            *(f"job-{number}", record.scope, record.key, record.owner, record.operation, "charge", b"{}"),
            *(downstream_key, None, settles),
        )
        parameters = job_parameters(job)
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=30)) as own, own:
                own.execute(enqueue_statement("sqlite"), parameters)
                own.execute("UPDATE idempotency_outbox SET run_at = ? WHERE id = ?", (self.clock.now, job.id))
        else:
            with databases.beside(self.url) as connection:
                connection.execute(POSTGRES_ENQUEUE.encode(), parameters)
        return job.id

    def get(self, record: Record) -> Record:
        (found,) = self.store.read([(record.scope, record.key)])
        assert found is not None
        return found

    def states(self, records: Sequence[Record]) -> list[State | None]:
        return [found.state if found else None for found in self.store.read([(r.scope, r.key) for r in records])]

    def audit(self, record: Record) -> list[tuple[str, str, str | None]]:
        """The lines of a key that changed something, oldest first: who, before, after."""
        lines = reversed(self.store.audit(record.scope, record.key, 100))
        return [(line.who, line.before, line.after) for line in lines if line.before != line.after]

    def names(self) -> list[str]:
        """The events that were told, by name."""
        return [type(event).__name__ for event in self.told]
