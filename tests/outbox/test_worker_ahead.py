"""Jobs that a worker claims ahead of free places: when it does, how they wait, and how they are given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from oncekey.core.jobs import JobState
from oncekey.outbox import Context, Worker
from oncekey.outbox import places as places_module
from oncekey.outbox import pump as pump_module
from oncekey.outbox.pump import AHEAD
from tests.engine.doubles import PATIENCE
from tests.outbox.outbox_table import OutboxTable
from tests.outbox.workers import make, until

PLACES = 2
QUICK = 2
JOBS = 20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs wait for as long as the test does, also on a busy machine."""
    monkeypatch.setattr(places_module, "WAIT_SECONDS", 2 * PATIENCE)


class Shop:
    """A worker whose first jobs are quick, and whose later ones wait for ``go_on``."""

    def __init__(self, outbox: OutboxTable, **settings: Any) -> None:
        self.outbox = outbox
        self.worker: Worker = make(outbox, concurrency=PLACES, **settings)
        self.begun: list[str] = []
        self.go_on = asyncio.Event()
        self.worker.task("step", max_attempts=3)(self._step)
        outbox.insert([outbox.job("step") for _ in range(JOBS)])

    async def _step(self, ctx: Context, payload: Any) -> None:
        self.begun.append(ctx.job_id)
        if len(self.begun) > QUICK:
            await self.go_on.wait()

    async def until_places_are_taken(self) -> asyncio.Future[Any]:
        work = asyncio.ensure_future(self.worker.serve(grace=PATIENCE))
        await until(lambda: len(self.begun) == QUICK + PLACES, "slow jobs have begun")
        return work

    def waiting(self) -> set[str]:
        """The jobs that the worker holds and has not begun."""
        return {job.id for job in self.outbox.store.jobs(JobState.RUNNING, JOBS)} - set(self.begun)

    async def finish(self, work: asyncio.Future[Any]) -> Any:
        self.go_on.set()
        self.worker.stop()
        return await asyncio.wait_for(work, PATIENCE)


async def test_after_quick_jobs_the_next_are_claimed_ahead_and_wait_for_a_place(outbox: OutboxTable) -> None:
    shop = Shop(outbox)
    work = await shop.until_places_are_taken()
    assert len(shop.waiting()) == AHEAD * PLACES
    shop.go_on.set()
    await until(lambda: outbox.count(JobState.DONE) == JOBS, "all jobs are done")
    assert sorted(shop.begun) == sorted(set(shop.begun)), "each job ran once"
    assert (await shop.finish(work)).done == JOBS


async def test_stopping_worker_gives_back_jobs_that_have_not_begun(outbox: OutboxTable) -> None:
    """At once, while the tasks that run have their grace. The attempt does not count."""
    shop = Shop(outbox)
    work = await shop.until_places_are_taken()
    waiting = shop.waiting()
    shop.worker.stop()
    await until(lambda: not shop.waiting(), "jobs are given back")
    assert {(job.state, job.attempt) for job in map(outbox.get, waiting)} == {(JobState.READY, 0)}
    counts = await shop.finish(work)
    assert (counts.done, counts.released, len(shop.begun)) == (QUICK + PLACES, len(waiting), QUICK + PLACES)


async def test_jobs_that_waited_too_long_are_given_back(outbox: OutboxTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs that run are slow, and another worker may have a free place. No more are claimed ahead."""
    monkeypatch.setattr(places_module, "WAIT_SECONDS", 0.05)
    shop = Shop(outbox)
    work = await shop.until_places_are_taken()
    await until(lambda: outbox.count(JobState.READY) == JOBS - QUICK - PLACES, "jobs are given back")
    assert {job.attempt for job in outbox.store.jobs(JobState.READY, JOBS)} == {0}
    assert len(shop.begun) == QUICK + PLACES
    shop.go_on.set()
    await until(lambda: outbox.count(JobState.DONE) == JOBS, "all jobs are done")
    await shop.finish(work)
    assert sorted(shop.begun) == sorted(set(shop.begun)), "each job ran once"


async def test_after_slow_jobs_none_is_claimed_ahead(outbox: OutboxTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump_module, "QUICK_SECONDS", -1.0)
    shop = Shop(outbox)
    work = await shop.until_places_are_taken()
    assert shop.waiting() == set()
    await shop.finish(work)


async def test_worker_with_a_task_of_one_attempt_claims_none_ahead(outbox: OutboxTable) -> None:
    """A claim counts as an attempt. If the worker died, a job that has not begun would be a dead letter."""
    shop = Shop(outbox)

    @shop.worker.task(max_attempts=1)
    async def once_only(ctx: Context, payload: Any) -> None: ...

    work = await shop.until_places_are_taken()
    assert shop.waiting() == set()
    await shop.finish(work)


async def test_job_that_was_lost_while_it_waited_is_not_begun(outbox: OutboxTable) -> None:
    shop = Shop(outbox, lease=3.0)
    work = await shop.until_places_are_taken()
    stolen = min(shop.waiting())
    outbox.steal(stolen)
    assert shop.worker._shift is not None
    live = shop.worker._shift._pump._live
    await until(lambda: any(each.lost for each in list(live.values())), "the worker sees that it lost the job")
    shop.go_on.set()
    await until(lambda: outbox.count(JobState.DONE) == JOBS - 1, "all other jobs are done")
    counts = await shop.finish(work)
    assert counts.lost == 1
    assert stolen not in shop.begun
    assert outbox.get(stolen).owner == "a-thief"
