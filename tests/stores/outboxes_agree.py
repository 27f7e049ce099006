"""As ``test_stores_agree.py``, with jobs: every verb of the outbox beside every verb of the keys, on both at once.

Which of two jobs of the same moment comes first is not defined, so nothing is taken in part.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from oncekey.core.audit import Audit
from oncekey.core.jobs import Conclusion, Job, JobEnd, JobState, NewJob
from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import Outbox
from oncekey.stores.memory import MemoryStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters
from tests import databases
from tests.stores.outbox_model import OutboxModel
from tests.stores.test_outbox import POSTGRES_ENQUEUE
from tests.stores.test_stores_agree import AUDITS, GRID, IDS, KEYS, RESPONSES, SECONDS, SqliteAgrees, StoresAgree

ALL = 1_000
TASKS = ["send", "Send"]
WORKERS = st.sampled_from(["worker-1", "worker-2"])
SETTLING = [(JobEnd.DONE, State.COMPLETED), (JobEnd.DONE, State.FAILED), (JobEnd.DEAD, State.UNKNOWN)]
ENDS = st.sampled_from([*((end, None) for end in JobEnd), *SETTLING])
LATE = StoredResponse(408, (("content-type", "text/plain"),), b"late")


class OutboxesAgree(StoresAgree):
    model: OutboxModel
    store: Outbox

    def make_model(self, clock: Callable[[], float]) -> MemoryStore:
        return OutboxModel(clock)

    def add(self, job: NewJob) -> None:
        raise NotImplementedError

    def later(self, seconds: float) -> float:
        """On the clock of the store under test."""
        return self.clock() + seconds

    @rule(data=st.data(), at=st.sampled_from(KEYS), task=st.sampled_from(TASKS), seconds=SECONDS, settles=st.booleans())
    def enqueue(self, data: st.DataObject, at: tuple[str, str], task: str, seconds: float, settles: bool) -> None:
        """Of the key's owner where it has one in progress, which is deferred where the job settles it."""
        self.numbers += 1
        (mine,), (right,) = self.store.read([at]), self.model.read([at])
        owner = "no-owner" if right is None else right.owner
        job = NewJob(
            id=f"job-{self.numbers:05d}",
            scope=at[0],
            key=at[1],
            key_owner=owner,
            operation="POST /payments",
            task=task,
            payload=b'{"to":"\xc3\xa9"}',
            downstream_key=data.draw(IDS) or "oncekey-1",
            run_at=self.later(seconds),
            settles=settles,
        )
        self.add(job)
        self.model.add(replace(job, run_at=self.clock() + seconds))
        if settles and mine is not None and right is not None and right.state is State.IN_PROGRESS:
            response = data.draw(RESPONSES)
            moves = [swap(row, Event.DEFER, Actor.OWNER, response=response) for row in (mine, right)]
            self._same(self.store.swap(moves[:1])[0], self.model.swap(moves[1:])[0])

    @rule(owner=WORKERS, tasks=st.lists(st.sampled_from(TASKS), min_size=1, unique=True), seconds=SECONDS)
    def claim(self, owner: str, tasks: list[str], seconds: float) -> None:
        mine, right = (store.claim(owner, tasks, ALL, seconds) for store in (self.store, self.model))
        assert [job.run_at for job in mine] == sorted(job.run_at for job in mine)
        self._same_jobs(mine, right)

    @rule(data=st.data(), owner=WORKERS, seconds=SECONDS)
    def renew(self, data: st.DataObject, owner: str, seconds: float) -> None:
        ids = self._some(data)
        mine, right = (store.renew_jobs(owner, ids, seconds) for store in (self.store, self.model))
        assert sorted(mine) == sorted(right)

    @rule(data=st.data(), owner=WORKERS)
    def conclude(self, data: st.DataObject, owner: str) -> None:
        batch = []
        for job_id in self._some(data):
            end, settle = data.draw(ENDS)
            final = settle in (State.COMPLETED, State.FAILED)
            error = None if end is JobEnd.DONE else data.draw(st.sampled_from(["Ünïcödé '%_\0", None, "x" * 600]))
            if end in (JobEnd.RETRY, JobEnd.DEAD) and error is None:
                error = "failed"
            response = data.draw(RESPONSES) if final else None
            batch.append(Conclusion(job_id, owner, end, data.draw(SECONDS), error, settle, response))
        assert self.store.conclude(batch) == self.model.conclude(batch)

    @rule(data=st.data(), owner=WORKERS, provider_id=st.sampled_from(["x", "X"]))
    def note_provider(self, data: st.DataObject, owner: str, provider_id: str) -> None:
        for job_id in self._some(data):
            mine, right = (store.note_provider(job_id, owner, provider_id) for store in (self.store, self.model))
            assert mine == right

    @rule(data=st.data(), to_state=st.sampled_from([JobState.READY, JobState.CANCELLED]), audit=AUDITS)
    def redirect(self, data: st.DataObject, to_state: JobState, audit: Audit) -> None:
        for job_id in self._some(data):
            mine, right = (store.redirect(job_id, to_state, audit) for store in (self.store, self.model))
            self._same_jobs([mine] if mine else [], [right] if right else [])

    @rule()
    def time_out(self) -> None:
        mine, right = (store.time_out(ALL, LATE) for store in (self.store, self.model))
        assert sorted(mine) == sorted(right)

    @rule(seconds=SECONDS)
    def purge_jobs(self, seconds: float) -> None:
        assert self.store.purge_jobs(ALL, seconds + GRID / 2) == self.model.purge_jobs(ALL, seconds + GRID / 2)

    @invariant()
    def all_jobs_agree(self) -> None:
        for state in JobState:
            self._same_jobs(self.store.jobs(state, ALL), self.model.jobs(state, ALL))
        for at in KEYS:
            self._same_jobs(self.store.jobs_of(*at, ALL), self.model.jobs_of(*at, ALL))
        mine, right = self.store.outbox_health(), self.model.outbox_health()
        assert (mine.ready, mine.dead) == (right.ready, right.dead)
        assert mine.lag_seconds == pytest.approx(right.lag_seconds, abs=GRID / 2)

    def _some(self, data: st.DataObject) -> list[str]:
        ids = [*self.model.by_id, "no-such-job"]
        return data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=3, unique=True))

    def _same_jobs(self, mine: list[Job], right: list[Job]) -> None:
        now = self.clock()
        shown = ([_comparable(job, job.now) for job in mine], [_comparable(job, now) for job in right])
        assert sorted(shown[0], key=repr) == sorted(shown[1], key=repr)


def _comparable(job: Job, now: float) -> dict[str, Any]:
    """Without the moments that only one clock knows; times on their grid, from now."""
    history = [{"attempt": each["attempt"], "error": each["error"]} for each in orjson.loads(job.history)]
    values = {name: getattr(job, name) for name in Job.__match_args__ if name not in ("created_at", "now")}
    for name in ("lease_until", "run_at", "finished_at"):
        values[name] = None if values[name] is None else round((values[name] - now) / GRID)
    return values | {"history": history}


class SqliteOutboxAgrees(OutboxesAgree, SqliteAgrees):
    def add(self, job: NewJob) -> None:
        with closing(sqlite3.connect(Path(self.folder.name) / "keys.db")) as own, own:
            own.execute(enqueue_statement("sqlite"), job_parameters(job))


AGED = {
    "idempotency_keys": ("lease_until", "expires_at", "reconcile_at", "created_at", "finished_at"),
    "idempotency_outbox": ("lease_until", "run_at", "finished_at"),
}


class PostgresOutboxAgrees(OutboxesAgree):
    exact = False
    url: str

    def make_store(self, clock: Callable[[], float]) -> Outbox:
        databases.empty(self.url)
        return PostgresStore(self.url)

    def add(self, job: NewJob) -> None:
        self._run(POSTGRES_ENQUEUE, job_parameters(job))

    def later(self, seconds: float) -> float:
        return time.time() + seconds

    def tick(self, seconds: float) -> None:
        for table, columns in AGED.items():
            past = ", ".join(f"{name} = {name} - interval '{seconds} seconds'" for name in columns)
            self._run(f"UPDATE {table} SET {past}")

    def _run(self, statement: str, parameters: Any = None) -> None:
        with psycopg.connect(self.url, autocommit=True) as own:
            own.execute(statement.encode(), parameters)
