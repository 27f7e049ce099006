"""What the parts of the outbox suite share: how a job is added and claimed, and how it ages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import orjson

from oncekey.core.jobs import Conclusion, Job, JobEnd, NewJob
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import State
from oncekey.stores.api import Outbox
from oncekey.testing.conformance.base import LEASE, SuiteBase

WORKER = "worker-1"
RIVAL = "worker-2"
TASK = "send_receipt"
TIMEOUT_RESPONSE = StoredResponse(408, (("content-type", "application/problem+json"),), b'{"status":408}')


class JobSuiteBase(SuiteBase):
    """Makes jobs in the states that tests begin with."""

    needs: ClassVar[type] = Outbox

    def add_job(self, store: Outbox, job: NewJob) -> None:
        raise NotImplementedError("say how a job is added")

    def age_job(self, store: Outbox, job_id: str, seconds: float) -> None:
        """Let ``seconds`` pass for this job. A store with a clock of its own moves the times of the row back."""
        del store, job_id
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock()

    # values

    def added(self, store: Outbox, number: int = 1, *, of: Record | None = None, **changes: Any) -> str:
        """Add a job, and return its id. With ``of`` the job belongs to that key, and settles it."""
        job = NewJob(
            id=f"job-{number:04d}",
            scope=of.scope if of else "tenant-1",
            key=of.key if of else f"key-{number}",
            key_owner=of.owner if of else "owner-0",
            operation="POST /payments",
            task=TASK,
            payload=b'{"to":"a@example.com","note":"\xc3\xa9 \xf0\x9f\x94\x91"}',
            downstream_key=f"oncekey-{number}",
            run_at=None,
            settles=of is not None,
        )
        self.add_job(store, replace(job, **changes))
        return f"job-{number:04d}"

    def running(self, store: Outbox, number: int = 1, *, of: Record | None = None) -> str:
        job_id = self.added(store, number, of=of)
        assert [job.id for job in claim(store)] == [job_id]
        return job_id

    def dead(self, store: Outbox, number: int = 1, *, of: Record | None = None) -> str:
        job_id = self.running(store, number, of=of)
        assert store.conclude(
            [Conclusion(job_id, WORKER, JobEnd.DEAD, error="poison", settle=State.UNKNOWN if of else None)]
        )[0]
        return job_id


def claim(store: Outbox, owner: str = WORKER, *, limit: int = 10) -> list[Job]:
    return store.claim(owner, [TASK], limit, LEASE)


def one_job(store: Outbox, job_id: str) -> Job:
    job = store.job(job_id)
    assert job is not None
    return job


def history(job: Job) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = orjson.loads(job.history)
    return entries
