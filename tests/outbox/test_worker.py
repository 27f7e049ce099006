"""A worker over a real outbox, in the process of the test: how it runs and stops, what it tells, and mistakes."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.jobs import JobState
from oncekey.errors import ConfigurationError, SchemaError
from oncekey.outbox import Context, Worker, shift
from oncekey.outbox.attempts import Counts
from oncekey.stores.memory import MemoryStore
from oncekey.telemetry import events
from tests.engine.doubles import PATIENCE
from tests.outbox.outbox_table import OutboxTable, errors
from tests.outbox.workers import drain, make, until

# running, and the end


async def test_no_more_jobs_run_than_there_are_slots(outbox: OutboxTable) -> None:
    worker = make(outbox, concurrency=3)
    now, most = 0, 0

    @worker.task()
    async def counted(ctx: Context, payload: Any) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.002)
        now -= 1

    outbox.insert([outbox.job("counted") for _ in range(30)])
    assert (await drain(worker)).done == 30
    assert most == 3


async def test_a_stop_lets_running_tasks_end_and_claims_nothing_more(outbox: OutboxTable) -> None:
    worker = make(outbox, concurrency=1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @worker.task()
    async def slow(ctx: Context, payload: Any) -> None:
        begun.set()
        await go_on.wait()

    first, second = outbox.add("slow"), outbox.add("slow")
    work = asyncio.ensure_future(worker.serve(grace=PATIENCE))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    worker.stop()
    await asyncio.sleep(0)
    go_on.set()
    counts = await asyncio.wait_for(work, PATIENCE)
    assert (counts.done, counts.released) == (1, 0)
    assert [outbox.get(job_id).state for job_id in (first, second)] == [JobState.DONE, JobState.READY]


@pytest.mark.parametrize("attempts", [8, 1])
async def test_after_the_grace_jobs_are_released(outbox: OutboxTable, attempts: int) -> None:
    """The task is cancelled; its job is ready at once, and the attempt does not count.

    One that may be tried once only has been tried: whether it had its effect is not known.
    """
    worker = make(outbox)
    begun = asyncio.Event()

    @worker.task(max_attempts=attempts)
    async def endless(ctx: Context, payload: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    job_id = outbox.add("endless")
    work = asyncio.ensure_future(worker.serve(grace=0.02))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    worker.stop()
    counts = await asyncio.wait_for(work, PATIENCE)
    assert (counts.released, counts.dead, counts.done) == ((1, 0, 0) if attempts > 1 else (0, 1, 0))
    job = outbox.get(job_id)
    assert (job.state, job.attempt) == ((JobState.READY, 0) if attempts > 1 else (JobState.DEAD, 1))
    (told,) = errors(job)
    assert "cut off" in told


async def test_after_the_grace_a_thread_keeps_its_lease(outbox: OutboxTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Released, another worker would run the job beside it. The worker ends all the same, and at once."""
    monkeypatch.setattr(shift, "END_SECONDS", 3600.0)
    worker = make(outbox)
    begun, go_on = threading.Event(), threading.Event()

    @worker.task()
    def endless(ctx: Context, payload: Any) -> None:
        begun.set()
        go_on.wait(PATIENCE)

    job_id = outbox.add("endless")
    work = asyncio.ensure_future(worker.serve(grace=0.02))
    await until(begun.is_set)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    job = outbox.get(job_id)
    assert (job.state, job.attempt) == (JobState.RUNNING, 1)
    assert (job.lease_until or 0) > job.now
    go_on.set()


async def test_one_batch_and_no_more(outbox: OutboxTable) -> None:
    worker = make(outbox, concurrency=4)

    @worker.task()
    async def quick(ctx: Context, payload: Any) -> None: ...

    outbox.insert([outbox.job("quick") for _ in range(10)])
    assert (await asyncio.wait_for(worker.serve(until="once"), PATIENCE)).done == 4
    assert outbox.count(JobState.READY) == 6


async def test_draining_worker_leaves_jobs_that_are_due_later(outbox: OutboxTable) -> None:
    worker = make(outbox)

    @worker.task(backoff=600.0)
    async def fails(ctx: Context, payload: Any) -> None:
        raise ConnectionError

    outbox.add("fails", run_at=time.time() + 600)
    outbox.add("fails")
    assert (await drain(worker)).failed == 1
    assert outbox.count(JobState.READY) == 2


async def test_draining_worker_repeats_a_job_that_is_due_again_at_once(outbox: OutboxTable) -> None:
    """The claim in the commit of its failure does not take it, and so must not be the last one."""
    worker = make(outbox, poll=1e-6)  # a claim is always due, and shares the commit of a failure

    @worker.task(max_attempts=3, backoff=0.0)
    async def fails(ctx: Context, payload: Any) -> None:
        raise ConnectionError

    outbox.add("fails")
    counts = await drain(worker)
    assert (counts.failed, counts.dead) == (2, 1)


async def test_progress_function_gets_the_counts(outbox: OutboxTable) -> None:
    worker = make(outbox)
    told: list[int] = []
    go_on = asyncio.Event()

    @worker.task()
    async def slow(ctx: Context, payload: Any) -> None:
        await go_on.wait()

    def progress(counts: Counts) -> None:
        told.append(counts.done)
        go_on.set()

    outbox.add("slow")
    counts = await worker.serve(until="drained", progress=progress, interval=0.01)
    assert told[0] == 0
    assert counts.as_json()["done"] == 1
    assert counts.as_json()["lag_seconds"] >= 0


async def test_events_of_jobs_contain_no_keys(outbox: OutboxTable) -> None:
    seen: list[events.Event] = []
    worker = make(outbox, on_event=seen.append)

    @worker.task(max_attempts=2, backoff=0.0)
    async def fails(ctx: Context, payload: Any) -> None:
        raise ValueError(f"of '{ctx.key}'")

    @worker.task()
    async def works(ctx: Context, payload: Any) -> None: ...

    outbox.add("works")
    outbox.add("fails")
    await drain(worker)
    kinds = [type(event).__name__ for event in seen]
    assert sorted(kinds) == ["JobDead", "JobDone", "JobRetried", "JobStarted", "JobStarted", "JobStarted"]
    assert "of-the-client" not in repr(seen)
    assert {event.task for event in seen if isinstance(event, events.JobEvent)} == {"fails", "works"}


# mistakes


async def test_worker_refuses_wrong_settings_before_it_runs(outbox: OutboxTable) -> None:
    with pytest.raises(ConfigurationError, match="no tasks"):
        await Worker(outbox.store).serve()
    for wrong in ({"concurrency": 0}, {"lease": 0}, {"poll": -1}):
        with pytest.raises(ConfigurationError, match="more than 0"):
            Worker(outbox.store, **wrong)  # type: ignore[arg-type]
    worker = Worker()

    @worker.task()
    async def known(ctx: Context, payload: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="registered twice"):
        worker.task("known")(known)
    with pytest.raises(ConfigurationError, match="brackets"):
        worker.task(known)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has no store"):
        await worker.serve()
    with pytest.raises(ConfigurationError, match="no outbox"):
        await worker.serve(store=MemoryStore())


async def test_worker_without_tables_names_migrate(postgres_url: str) -> None:
    worker = Worker(postgres_url)

    @worker.task()
    async def known(ctx: Context, payload: Any) -> None: ...

    with pytest.raises(SchemaError, match="oncekey migrate"):
        await worker.serve()


async def test_one_run_at_a_time(outbox: OutboxTable) -> None:
    worker = make(outbox)

    @worker.task()
    async def known(ctx: Context, payload: Any) -> None: ...

    work = asyncio.ensure_future(worker.serve())
    await asyncio.sleep(0)
    with pytest.raises(ConfigurationError, match="running already"):
        await worker.serve()
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert (await drain(worker)).done == 0  # and again, afterwards


async def test_a_worker_takes_the_apps_own_store_and_events(outbox: OutboxTable) -> None:
    seen: list[events.Event] = []
    with OnceKey(outbox.store, scope=SINGLE_TENANT, on_event=seen.append) as once:
        worker = Worker(once, poll=0.01)

        @worker.task()
        async def known(ctx: Context, payload: Any) -> None: ...

        outbox.add("known")
        assert (await drain(worker)).done == 1
        assert [type(event).__name__ for event in seen] == ["JobStarted", "JobDone"]
