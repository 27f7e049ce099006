"""The outbox of each SQL store against the public suite, and what is true of one of them alone."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncekey.core.jobs import Conclusion, JobEnd, JobState, NewJob
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import EventLoops, Outbox, SharedCommit, Store, Transactions
from oncekey.stores.memory import MemoryStore
from oncekey.stores.postgres import PostgresStore, arrays
from oncekey.stores.postgres import outbox as postgres_outbox
from oncekey.stores.postgres.connection import settings
from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters
from oncekey.stores.sqlite import SqliteStore
from oncekey.stores.sqlite import outbox as sqlite_outbox
from oncekey.testing.conformance.jobs_base import RIVAL, TASK, TIMEOUT_RESPONSE, WORKER, claim, one_job
from oncekey.testing.store_suite import OutboxSuite
from oncekey.upkeep import Reaper
from tests import databases
from tests.engine.doubles import eventually, reservation

POSTGRES_ENQUEUE = re.sub(r":(\w+)", r"%(\1)s", enqueue_statement("postgresql"))
OLDER_KEY = """
UPDATE idempotency_keys SET
    lease_until = lease_until - %(by)s, expires_at = expires_at - %(by)s, reconcile_at = reconcile_at - %(by)s
WHERE scope = %(scope)s AND key = %(key)s
"""
OLDER_JOB = """
UPDATE idempotency_outbox SET
    lease_until = lease_until - %(by)s, run_at = run_at - %(by)s, finished_at = finished_at - %(by)s
WHERE id = %(id)s
"""
CLAIM: dict[str, Any] = {
    "tasks": [TASK],
    "owner": "w",
    "lease_seconds": 1.0,
    "limit": 5,
    "shared": 2,
    "after": "",
}


class TestSqliteOutbox(OutboxSuite):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "keys.db"

    def make_store(self) -> SqliteStore:
        return SqliteStore(self.path, clock=self.clock)

    def add_job(self, store: Outbox, job: NewJob) -> None:
        with closing(sqlite3.connect(self.path)) as own, own:
            own.execute(enqueue_statement("sqlite"), job_parameters(job))


class TestPostgresOutbox(OutboxSuite):
    @pytest.fixture(autouse=True)
    def _database(self, ready_url: str) -> None:
        self.url = ready_url

    def make_store(self) -> PostgresStore:
        return PostgresStore(self.url)

    def run(self, statement: str, **parameters: Any) -> None:
        with databases.beside(self.url) as own:
            own.execute(statement.encode(), parameters)

    def add_job(self, store: Outbox, job: NewJob) -> None:
        self.run(POSTGRES_ENQUEUE, **job_parameters(job))

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        self.run(OLDER_KEY.replace("%(by)s", f"interval '{seconds} seconds'"), scope=scope, key=key)

    def age_job(self, store: Outbox, job_id: str, seconds: float) -> None:
        self.run(OLDER_JOB.replace("%(by)s", f"interval '{seconds} seconds'"), id=job_id)

    def now(self) -> float:
        return time.time()

    # company: what only a server with several writers can get wrong

    def test_a_job_that_commits_late_is_delivered(self, store: Outbox) -> None:
        """Hazard 10: a transaction left open while later jobs are added, claimed and done."""
        with psycopg.connect(self.url) as late:
            late.execute(POSTGRES_ENQUEUE, job_parameters(new_job("late")))
            for number in range(5):
                self.added(store, number)
            assert len(claim(store)) == 5
            assert claim(store) == []
            late.commit()
        assert [job.id for job in claim(store, RIVAL)] == ["late"]

    def test_claim_skips_locked_jobs(self, store: Outbox) -> None:
        """Rows that another transaction holds are skipped, the others are taken."""
        held, free = self.added(store, 1), self.added(store, 2)
        with psycopg.connect(self.url) as holder:
            holder.execute("SELECT FROM idempotency_outbox WHERE id = %s FOR NO KEY UPDATE", [held])
            assert [job.id for job in claim(store, limit=1)] == [free]
        assert [job.id for job in claim(store, RIVAL)] == [held]

    @pytest.mark.parametrize("verb", ["renew", "conclude"])
    def test_an_owner_whose_row_is_held_waits_for_it(self, store: Outbox, verb: str) -> None:
        """Skipped would look like lost. The holder moves the row while we wait: it is found all the same."""
        job_id = self.running(store)

        answers: list[object] = []

        def ask() -> None:
            if verb == "renew":
                answers.append(store.renew_jobs(WORKER, [job_id], 30.0))
            else:
                answers.append(store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE)]))
            store.disconnect()

        with psycopg.connect(self.url) as holder:
            holder.execute("UPDATE idempotency_outbox SET lease_until = lease_until + interval '1 s'")
            asking = threading.Thread(target=ask)
            asking.start()
            with psycopg.connect(self.url, autocommit=True) as own:
                eventually(
                    lambda: own.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone(),
                    "the verb waits for the row",
                )
            holder.commit()
        asking.join(10)
        assert answers == [[job_id] if verb == "renew" else [True]]

    def test_a_job_that_is_being_claimed_is_not_timed_out(self, store: Outbox) -> None:
        """Whether the claim commits before or after the reaper looks: the worker has it, and its key stays pending."""
        key = self.drive(store, State.PENDING)
        job_id = self.added(store, of=key)
        self.age(store, key.scope, key.key, 10_000)
        take = "UPDATE idempotency_outbox SET state = 'running', owner = 'w', lease_until = now() + interval '1 h'"
        with psycopg.connect(self.url) as claiming:
            claiming.execute(take)
            assert store.time_out(10, TIMEOUT_RESPONSE) == []
            claiming.commit()
        assert one_job(store, job_id).state is JobState.RUNNING
        (row,) = store.read([(key.scope, key.key)])
        assert row is not None
        assert row.state is State.PENDING

    def test_every_statement_uses_its_index(self, store: Outbox) -> None:
        """On a table where reading it whole would be dear: no sequential scan, and each partial index by name."""
        self.run(
            "INSERT INTO idempotency_outbox (id, scope, key, key_owner, operation, task, payload, downstream_key,"
            " state, run_at, finished_at, lease_until) "
            "SELECT n::text, 's', n::text, 'o', 'op', %(task)s, '{}', n::text,"
            " (ARRAY['ready', 'running', 'done', 'dead'])[n %% 4 + 1], now(), now(), now()"
            " FROM generate_series(1, 4000) AS n",
            task=TASK,
        )
        self.run("ANALYZE")
        wanted: dict[str, tuple[str, dict[str, Any]]] = {
            "claim": (postgres_outbox._CLAIM, CLAIM),
            "turn": (postgres_outbox._TURN, CLAIM | postgres_outbox._columns([Conclusion("1", "w", JobEnd.DONE)])),
            "health": (postgres_outbox._HEALTH, {}),
            "purge": (postgres_outbox._PURGE, {"limit": 5, "keep_seconds": 1.0}),
            "ready": (postgres_outbox._JOBS[JobState.READY], {"limit": 5}),
            "running": (postgres_outbox._JOBS[JobState.RUNNING], {"limit": 5}),
            "dead": (postgres_outbox._JOBS[JobState.DEAD], {"limit": 5}),
            "over": (postgres_outbox._JOBS[JobState.DONE], {"limit": 5}),
            "time_out": (
                postgres_outbox._TIME_OUT,
                {"limit": 5, "status": 408, "headers": "[]", "body": b"", "schema_version": 1},
            ),
        }
        indexes = {
            "claim": ["outbox_ready", "outbox_running", "outbox_turns"],
            "turn": ["outbox_ready", "outbox_running", "outbox_turns", "outbox_pkey"],
            "health": ["outbox_ready", "outbox_dead"],
            "purge": ["outbox_over"],
            "time_out": ["keys_abandoned", "outbox_key"],
        }
        with psycopg.connect(self.url) as own:
            arrays.register(own.adapters)
            own.execute(settings(5.0, 1.0))
            for name, (statement, parameters) in wanted.items():
                plan = "\n".join(row[0] for row in own.execute(b"EXPLAIN " + statement.encode(), parameters))
                assert "Seq Scan on" not in plan, (name, plan)
                for index in indexes.get(name, [f"outbox_{name}"]):
                    assert f"idempotency_{index}" in plan, (name, plan)
                if name in ("claim", "turn"):
                    assert plan.count("idempotency_outbox_turns") == 3, plan
            own.rollback()

    @pytest.mark.parametrize("statistics", [None, "ANALYZE", "VACUUM ANALYZE"])
    def test_a_backlog_is_neither_sorted_nor_read_whole(self, store: Outbox, statistics: str | None) -> None:
        """The planner takes a backlog of thousands for a few rows: before the first ANALYZE, and after one at a moment
        when no job was ready or running. Then rows of the wrong index, sorted, look as cheap as those of the right one.
        """
        fill = (
            "INSERT INTO idempotency_outbox"
            " (id, scope, key, key_owner, operation, task, payload, downstream_key, state, run_at, finished_at)"
            " SELECT gen_random_uuid()::text, 's', n::text, 'o', 'op', %(task)s, '{}', n::text, %(state)s, now(), now()"
            " FROM generate_series(1, 4000) AS n"
        )
        self.run(fill, task=TASK, state="done")
        if statistics:
            with psycopg.connect(self.url, autocommit=True) as own:
                own.execute(statistics.encode())
        self.run(fill, task=TASK, state="ready")
        ended = [Conclusion("1", "w", JobEnd.DONE)]
        plans = {}
        with psycopg.connect(self.url) as own:
            arrays.register(own.adapters)
            own.execute(settings(5.0, 1.0))
            for name, statement, parameters in (
                ("claim", postgres_outbox._CLAIM, CLAIM),
                ("turn", postgres_outbox._TURN, CLAIM | postgres_outbox._columns(ended)),
                ("conclude", postgres_outbox._CONCLUDE, postgres_outbox._columns(ended)),
                ("renew", postgres_outbox._RENEW, {"owner": "w", "ids": arrays.Text(["1"]), "lease_seconds": 1.0}),
            ):
                plans[name] = "\n".join(row[0] for row in own.execute(b"EXPLAIN " + statement.encode(), parameters))
            own.rollback()
        for name, plan in plans.items():
            claims = name in ("claim", "turn")
            sorts = re.findall(r"Sort Key: (.*)", plan)
            assert sorts == ([] if name == "claim" else [sorts[0]]), "only the ids of a batch are sorted"
            assert all(re.match(r"[wu]\w*\.id", each) for each in sorts), plan
            assert plan.count("using idempotency_outbox_turns") == 3 * claims, "first scope, next scopes, jobs of each"
            assert plan.count("using idempotency_outbox_running") == claims, "only leases that are over are looked for"
            assert "using idempotency_keys_abandoned" not in plan, "pending keys are not read whole"


class TestSqliteAlone:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[SqliteStore]:
        with closing(SqliteStore(tmp_path / "keys.db")) as store:
            store.migrate()
            yield store

    def test_a_claim_that_finds_nothing_takes_no_lock(self, store: SqliteStore) -> None:
        """Idle workers poll: while another process holds the file for long, they must not queue up behind it."""
        with closing(sqlite3.connect(store.path, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            assert claim(store) == []
            holder.execute("ROLLBACK")

    def test_a_job_that_is_not_committed_is_not_there(self, store: SqliteStore) -> None:
        """Rolled back with the business write, or seen as soon as that is committed."""
        with closing(sqlite3.connect(store.path)) as own:
            own.execute(enqueue_statement("sqlite"), job_parameters(new_job("first")))
            assert claim(store) == []
            own.rollback()
            assert claim(store) == []
            own.execute(enqueue_statement("sqlite"), job_parameters(new_job("second")))
            own.commit()
        assert [job.id for job in claim(store)] == ["second"]

    def test_every_statement_uses_its_index(self, store: SqliteStore) -> None:
        """SQLite takes a partial index only where its condition is repeated word for word."""
        wanted = {
            "ready": [sqlite_outbox._of_tasks("due", 2), sqlite_outbox._JOBS[JobState.READY]],
            "running": [sqlite_outbox._of_tasks("lapsed", 2), sqlite_outbox._JOBS[JobState.RUNNING]],
            "dead": [sqlite_outbox._JOBS[JobState.DEAD], sqlite_outbox._HEALTH],
            "over": [
                sqlite_outbox._PURGE,
                sqlite_outbox._JOBS[JobState.DONE],
                sqlite_outbox._JOBS[JobState.CANCELLED],
            ],
            "key": [sqlite_outbox._LATE, sqlite_outbox._CANCEL],
            "turns": [sqlite_outbox._NEXT_SCOPE, sqlite_outbox._of_tasks("due_of", 2, 4)],
        }
        with closing(sqlite3.connect(store.path)) as own:
            for index, statements in wanted.items():
                for statement in statements:
                    places = len(set(re.findall(r"\?(\d)", statement)))
                    rows = own.execute(f"EXPLAIN QUERY PLAN {statement}", (1,) * places).fetchall()
                    plan = "\n".join(row[3] for row in rows)
                    assert f"idempotency_outbox_{index}" in plan, plan
                    assert "SCAN idempotency_outbox\n" not in f"{plan}\n", plan


def test_memory_has_no_part_of_a_database() -> None:
    """A dictionary has no transaction that a job could share."""
    parts = (Outbox, Transactions, SharedCommit, EventLoops)
    assert not any(isinstance(MemoryStore(), part) for part in parts)


def test_reaper_without_outbox_fails_pending_keys_past_their_expiry() -> None:
    now = [1_000.0]
    store = MemoryStore(lambda: now[0])
    record = store.reserve([reservation()])[0].record
    assert record
    store.swap([swap(record, Event.DEFER, Actor.OWNER)])
    assert Reaper(store).run().timed_out == 0
    now[0] += 100_000
    assert Reaper(store).run().timed_out == 1
    (found,) = store.read([(record.scope, record.key)])
    assert found is not None
    assert (found.state, found.response and found.response.status) == (State.FAILED, 408)


def new_job(job_id: str, task: str = TASK) -> NewJob:
    return NewJob(job_id, "tenant-1", f"key of {job_id}", "owner-0", "POST /", task, b"{}", f"d-{job_id}", None, False)
