"""An outbox to test with: a real store of either kind, a way to add jobs as a request does, and to let time pass."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import Any

import orjson

from oncekey.core.jobs import Job, JobState, NewJob
from oncekey.core.record import Record, Reservation
from oncekey.core.states import Actor, Effects, Event
from oncekey.core.swaps import swap
from oncekey.stores.api import Outbox
from oncekey.stores.registry import open_store
from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters
from oncekey.testing.servers.processes import pause_all
from tests import databases
from tests.stores import mysql

POSTGRES_ENQUEUE = re.sub(r":(\w+)", r"%(\1)s", enqueue_statement("postgresql"))

MYSQL_ENQUEUE = re.sub(r"(?<!\w):(\w+)", r"%(\1)s", enqueue_statement("mysql"))


class OutboxTable:
    def __init__(self, url: str) -> None:
        self.url = url
        store = open_store(url)
        assert isinstance(store, Outbox)
        self.store: Outbox = store
        self.store.migrate()
        self._numbers = count(1)

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    def close(self) -> None:
        self.store.disconnect()
        self.store.close()

    def job(self, task: str, payload: Any = None, *, of: Record | None = None, run_at: float | None = None) -> NewJob:
        number = next(self._numbers)
        return NewJob(
            f"job-{number:06d}",
            of.scope if of else "acme",
            of.key if of else f"key-{number:06d}-of-the-client",
            of.owner if of else "an-owner",
            "POST /payments",
            task,
            orjson.dumps({} if payload is None else payload),
            f"oncekey-down-{number:06d}",
            run_at,
            of is not None,
        )

    def insert(self, jobs: Sequence[NewJob]) -> None:
        """All in one transaction."""
        rows = [job_parameters(job) for job in jobs]
        if self.is_sqlite:
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=30)) as own, own:
                own.executemany(enqueue_statement("sqlite"), rows)
        elif self.url.startswith("mysql"):
            with closing(mysql.connect(self.url)) as own_connection:
                own_connection.cursor().executemany(MYSQL_ENQUEUE, rows)
                own_connection.commit()
        else:
            with databases.beside(self.url) as connection, connection.transaction():
                connection.cursor().executemany(POSTGRES_ENQUEUE, rows)

    def add(self, task: str, payload: Any = None, *, of: Record | None = None, run_at: float | None = None) -> str:
        job = self.job(task, payload, of=of, run_at=run_at)
        self.insert([job])
        return job.id

    def pending(self, count: int = 1) -> list[Record]:
        """Keys whose requests were deferred."""
        wanted = [
            Reservation(
                *("acme", f"pending-{next(self._numbers):06d}", "POST /payments", b"f" * 32, 1),
                *(Effects.TRANSACTIONAL, f"owner-{number}", 60.0, 3600.0),
            )
            for number in range(count)
        ]
        records = [found.record for found in self.store.reserve(wanted)]
        moved = self.store.swap([swap(record, Event.DEFER, Actor.OWNER) for record in records if record])
        return [record for record in moved if record]

    def key(self, record: Record) -> Record:
        (found,) = self.store.read([(record.scope, record.key)])
        assert found is not None
        return found

    def get(self, job_id: str) -> Job:
        job = self.store.job(job_id)
        assert job is not None
        return job

    def count(self, state: JobState) -> int:
        return len(self.store.jobs(state, 100_000))

    def execute(self, statement: str) -> None:
        """SQL that both dialects understand, in a transaction of its own."""
        if self.is_sqlite:
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=30)) as own, own:
                own.execute(statement)
        else:
            with databases.beside(self.url) as connection:
                connection.execute(statement.encode())

    def pause(self, pid: int) -> None:
        """SIGSTOP, at a moment when that process does not lock an SQLite file: no process could write again."""
        if not self.is_sqlite:
            return pause_all([pid])
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=30)) as own:
            own.execute("BEGIN IMMEDIATE")
            pause_all([pid])
            own.rollback()
        return None

    def lapse(self, job_id: str) -> None:
        """The lease of this job is over now."""
        past = "1" if self.is_sqlite else "'epoch'"
        self.execute(f"UPDATE idempotency_outbox SET lease_until = {past} WHERE id = '{job_id}' AND state = 'running'")

    def steal(self, job_id: str) -> Job:
        """Another worker has taken this job, as if our lease had been over; in one step."""
        later = "9e9" if self.is_sqlite else "'infinity'"
        taken = f"owner = 'a-thief', attempt = attempt + 1, lease_until = {later}"
        self.execute(f"UPDATE idempotency_outbox SET {taken} WHERE id = '{job_id}' AND state = 'running'")
        return self.get(job_id)


def errors(job: Job) -> list[str]:
    return [line["error"] for line in orjson.loads(job.history)]
