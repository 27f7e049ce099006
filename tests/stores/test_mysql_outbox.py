"""The outbox on MySQL (MariaDB here): the public suite, the model, and what only several writers can get wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from oncekey.core.jobs import NewJob
from oncekey.stores.api import Outbox, Store
from oncekey.stores.mysql import MysqlStore
from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters
from oncekey.testing.conformance.jobs_base import RIVAL, claim
from oncekey.testing.store_suite import OutboxSuite
from tests.stores.mysql import connect, empty, older, run
from tests.stores.outboxes_agree import AGED, OutboxesAgree
from tests.stores.test_outbox import new_job

pytestmark = pytest.mark.stores

ENQUEUE = re.sub(r"(?<!\w):(\w+)", r"%(\1)s", enqueue_statement("mysql"))


def age_jobs(url: str, seconds: float, job_id: str | None = None) -> None:
    columns = ("lease_until", "run_at", "finished_at")
    past = ", ".join(f"{name} = {name} - INTERVAL {round(seconds * 1e6)} MICROSECOND" for name in columns)
    which = "" if job_id is None else f" WHERE id = '{job_id}'"
    run(url, f"UPDATE idempotency_outbox SET {past}{which}")


@pytest.mark.stores
class TestMysqlOutbox(OutboxSuite):
    @pytest.fixture(autouse=True)
    def _database(self, ready_mysql: str) -> None:
        self.url = ready_mysql

    def make_store(self) -> MysqlStore:
        return MysqlStore(self.url)

    def add_job(self, store: Outbox, job: NewJob) -> None:
        run(self.url, ENQUEUE, **job_parameters(job))

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        older(self.url, seconds, scope, key)

    def age_job(self, store: Outbox, job_id: str, seconds: float) -> None:
        age_jobs(self.url, seconds, job_id)

    def now(self) -> float:
        return time.time()

    # company

    def test_job_that_commits_late_is_delivered(self, store: Outbox) -> None:
        """Hazard 10: a transaction is left open while later jobs are added, claimed and done."""
        late = connect(self.url)
        try:
            late.cursor().execute(ENQUEUE, job_parameters(new_job("late")))
            self.add_job(store, new_job("early"))
            assert [job.id for job in claim(store)] == ["early"]
            late.commit()
        finally:
            late.close()
        assert [job.id for job in claim(store)] == ["late"]

    def test_claim_skips_jobs_that_another_worker_is_claiming(self, store: Outbox) -> None:
        for number in range(4):
            self.add_job(store, new_job(f"job-{number}"))
        other = connect(self.url)
        try:
            other.cursor().execute("SELECT id FROM idempotency_outbox WHERE id IN ('job-0', 'job-1') FOR UPDATE")
            assert {job.id for job in claim(store)} == {"job-2", "job-3"}, "a claim that waits for them fails with 1205"
            other.rollback()
        finally:
            other.close()
        assert {job.id for job in claim(store, RIVAL)} == {"job-0", "job-1"}

    def test_claim_takes_no_more_than_its_limit_of_lapsed_and_due_jobs(self, store: Outbox) -> None:
        for number in range(6):
            self.add_job(store, new_job(f"job-{number}"))
        assert len(claim(store, limit=3)) == 3
        age_jobs(self.url, 3600.0)
        assert len(claim(store, RIVAL, limit=4)) == 4


class MysqlOutboxAgrees(OutboxesAgree):
    exact = False
    url: str

    def make_store(self, clock: Callable[[], float]) -> Outbox:
        empty(self.url)
        return MysqlStore(self.url)

    def add(self, job: NewJob) -> None:
        run(self.url, ENQUEUE, **job_parameters(job))

    def later(self, seconds: float) -> float:
        return time.time() + seconds

    def tick(self, seconds: float) -> None:
        for table, columns in AGED.items():
            past = ", ".join(f"{name} = {name} - INTERVAL {round(seconds * 1e6)} MICROSECOND" for name in columns)
            run(self.url, f"UPDATE {table} SET {past}")


@pytest.mark.stores
@pytest.mark.timeout(300)
def test_outbox_agrees_with_the_model(ready_mysql: str) -> None:
    """Random moves of keys and jobs against MySQL and the dictionary: every answer and every row is the same."""
    from hypothesis.stateful import run_state_machine_as_test

    MysqlOutboxAgrees.url = ready_mysql
    options: dict[str, Any] = {"database": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(MysqlOutboxAgrees, settings=settings(max_examples=15, stateful_step_count=20, **options))
