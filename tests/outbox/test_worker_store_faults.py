"""A worker over a store that fails: answers that get lost, rows that are refused, a server that is down."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from oncekey.core.jobs import Conclusion, Job, JobState
from oncekey.core.states import State
from oncekey.errors import StoreError, StoreUnavailable
from oncekey.outbox import Context, Response
from oncekey.stores.sqlite import SqliteStore
from oncekey.telemetry import events
from oncekey.testing.servers import PostgresServer
from tests.engine.doubles import PATIENCE
from tests.outbox.outbox_table import OutboxTable
from tests.outbox.workers import drain, make, until


class Faulty(SqliteStore):
    """A real store whose answers get lost (the work is done, and the answer is lost), or that refuses a row."""

    lose: str | None = None
    lose_looks = 0
    turns = 0
    refuse: str | None = None

    def _lost(self, verb: str) -> None:
        if self.lose == verb:
            self.lose = None
            raise StoreUnavailable(f"the answer to {verb} was lost")

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        jobs = super().claim(owner, tasks, limit, lease_seconds)
        self._lost("claim")
        return jobs

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        if any(item.id == self.refuse and item.settle is State.COMPLETED for item in batch):
            raise StoreError("a value cannot be stored")
        answers = super().conclude(batch)
        self._lost("conclude")
        return answers

    def turn(
        self, ended: Sequence[Conclusion], owner: str, tasks: Sequence[str], limit: int, lease_seconds: float
    ) -> tuple[list[bool], list[Job]]:
        if any(item.id == self.refuse and item.settle is State.COMPLETED for item in ended):
            raise StoreError("a value cannot be stored")
        both = super().turn(ended, owner, tasks, limit, lease_seconds)
        self.turns += 1
        self._lost("turn")
        return both

    def job(self, job_id: str) -> Job | None:
        if self.lose_looks:
            self.lose_looks -= 1
            raise StoreUnavailable("no answer")
        return super().job(job_id)

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        if self.lose == "renewals":
            raise StoreUnavailable("no answer")
        return super().renew_jobs(owner, ids, lease_seconds)


@pytest.fixture
def faulty(tmp_path: Any) -> Any:
    outbox = OutboxTable(f"sqlite:///{tmp_path}/keys.db")
    outbox.store = Faulty(tmp_path / "keys.db")
    yield outbox
    outbox.close()


@pytest.mark.parametrize("verb", ["conclude", "turn"])
async def test_an_end_whose_answer_was_lost_is_still_ours(faulty: OutboxTable, verb: str) -> None:
    """Hazard 9: the retry finds the job done by our own token, and does not call it lost."""
    worker = make(faulty, concurrency=1 if verb == "turn" else 8)

    @worker.task()
    async def quick(ctx: Context, payload: Any) -> None: ...

    faulty.store.lose = verb  # type: ignore[attr-defined]
    jobs = [faulty.add("quick") for _ in range(1 if verb == "conclude" else 3)]
    counts = await drain(worker)
    assert (counts.done, counts.lost) == (len(jobs), 0)
    assert {faulty.get(each).state for each in jobs} == {JobState.DONE}
    assert faulty.store.lose is None  # type: ignore[attr-defined]


async def test_an_end_whose_answer_was_lost_keeps_no_place_when_the_look_for_it_fails_too(faulty: OutboxTable) -> None:
    """It stays unsaved until the store can say: a place that is never free again stops a worker for good (I8)."""
    worker = make(faulty, concurrency=1)

    @worker.task()
    async def quick(ctx: Context, payload: Any) -> None: ...

    faulty.store.lose, faulty.store.lose_looks = "turn", 2  # type: ignore[attr-defined]
    jobs = [faulty.add("quick") for _ in range(3)]
    counts = await drain(worker)
    assert (counts.done, counts.lost) == (3, 0)
    assert {faulty.get(each).state for each in jobs} == {JobState.DONE}


async def test_a_claim_whose_answer_was_lost_is_given_back(faulty: OutboxTable) -> None:
    """Not after a whole lease, but as soon as the store answers; and no attempt is lost by it."""
    worker = make(faulty, lease=3600.0)
    attempts: list[int] = []

    @worker.task()
    async def quick(ctx: Context, payload: Any) -> None:
        attempts.append(ctx.attempt)

    faulty.store.lose = "claim"  # type: ignore[attr-defined]
    faulty.add("quick")
    assert (await drain(worker)).done == 1
    assert attempts == [1]


async def test_jobs_claimed_by_a_lost_turn_are_given_back_with_their_attempt(faulty: OutboxTable) -> None:
    """The turn ended one job and claimed the next one, and its answer was lost: no job waits for the end of a lease."""
    worker = make(faulty, lease=3600.0, concurrency=1)
    attempts: list[int] = []

    @worker.task()
    async def quick(ctx: Context, payload: Any) -> None:
        attempts.append(ctx.attempt)

    faulty.store.lose = "turn"  # type: ignore[attr-defined]
    for _ in range(3):
        faulty.add("quick")
    assert (await drain(worker)).done == 3
    assert attempts == [1, 1, 1]


async def test_worker_ends_jobs_and_claims_the_next_in_one_commit(faulty: OutboxTable) -> None:
    """One claim to begin with. Then one commit for each job, which ends it and claims the next one.

    (A task of one attempt: none of its jobs is claimed ahead.)
    """
    worker = make(faulty, concurrency=1)

    @worker.task(max_attempts=1)
    async def quick(ctx: Context, payload: Any) -> None: ...

    for _ in range(5):
        faulty.add("quick")
    assert (await drain(worker)).done == 5
    assert faulty.store.turns == 5  # type: ignore[attr-defined]


async def test_job_whose_end_cannot_be_stored_is_dead_and_the_others_are_done(faulty: OutboxTable) -> None:
    """Hazard 25: the others of its batch are done; it is a dead letter, and its key unknown."""
    worker = make(faulty)

    @worker.task()
    async def pay(ctx: Context, payload: Any) -> Response:
        return Response(201)

    keys = faulty.pending(4)
    jobs = [faulty.job("pay", of=key) for key in keys]
    faulty.insert(jobs)
    faulty.store.refuse = jobs[1].id  # type: ignore[attr-defined]
    counts = await drain(worker)
    assert (counts.done, counts.dead) == (3, 1)
    states = [faulty.key(key).state for key in keys]
    assert states == [State.COMPLETED, State.UNKNOWN, State.COMPLETED, State.COMPLETED]
    assert "refused" in (faulty.get(jobs[1].id).last_error or "")


async def test_a_lease_that_cannot_be_renewed_ends_the_attempt(faulty: OutboxTable) -> None:
    """The store does not answer for a whole lease: the job may be a rival's by now, so the task is cancelled."""
    worker = make(faulty, lease=0.3)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    @worker.task(backoff=600.0)
    async def slow(ctx: Context, payload: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    job_id = faulty.add("slow")
    work = asyncio.ensure_future(worker.serve())
    await asyncio.wait_for(begun.wait(), PATIENCE)
    faulty.store.lose = "renewals"  # type: ignore[attr-defined]
    await asyncio.wait_for(cancelled.wait(), PATIENCE)
    faulty.store.lose = None  # type: ignore[attr-defined]
    await until(lambda: faulty.get(job_id).state is JobState.READY)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert "lease ran out" in (faulty.get(job_id).last_error or "")


async def test_a_store_that_is_down_is_waited_for(postgres_server: PostgresServer, postgres_url: str) -> None:
    """Killed while jobs run, and back: the ends are stored then, and what was added meanwhile is done."""
    outbox = OutboxTable(postgres_url)
    seen: list[events.Event] = []
    worker = make(outbox, on_event=seen.append)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @worker.task()
    async def slow(ctx: Context, payload: Any) -> None:
        begun.set()
        await go_on.wait()

    outbox.add("slow")
    work = asyncio.ensure_future(worker.serve())
    await asyncio.wait_for(begun.wait(), PATIENCE)
    postgres_server.kill()
    go_on.set()
    await until(lambda: any(isinstance(event, events.StoreFailed) for event in seen), "it noticed")
    postgres_server.start()  # in this thread: a server ends with the thread that started it
    outbox.store.disconnect()
    outbox.add("slow")
    await until(lambda: worker._shift and worker._shift._pump.counts.done == 2, "both are done")
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert outbox.count(JobState.DONE) == 2
    outbox.close()


async def test_a_stop_while_the_store_is_down_is_a_stop(faulty: OutboxTable) -> None:
    worker = make(faulty)

    @worker.task()
    async def quick(ctx: Context, payload: Any) -> None: ...

    work = asyncio.ensure_future(worker.serve())
    faulty.store.claim = _down  # type: ignore[method-assign, assignment]
    await until(lambda: worker._shift and worker._shift._pump._failures > 1)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)


def _down(*_: object) -> list[Job]:
    raise StoreUnavailable("down")
