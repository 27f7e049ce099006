"""A worker and time: tasks that take too long, leases that are renewed, and leases that are lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from oncekey.core.jobs import Job, JobState
from oncekey.core.states import State
from oncekey.outbox import Context, Response
from oncekey.telemetry import events
from tests.engine.doubles import PATIENCE
from tests.outbox.outbox_table import OutboxTable, errors
from tests.outbox.workers import drain, make, until


async def test_an_async_task_that_takes_too_long_is_cancelled(outbox: OutboxTable) -> None:
    worker = make(outbox)
    cancelled: list[int] = []

    @worker.task(max_attempts=2, timeout=0.02, backoff=0.0)
    async def hangs(ctx: Context, payload: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(ctx.attempt)
            raise

    @worker.task(max_attempts=1)
    async def raises_timeout_itself(ctx: Context, payload: Any) -> None:
        raise TimeoutError("of the mail server")

    job_id, other = outbox.add("hangs"), outbox.add("raises_timeout_itself")
    assert (await drain(worker)).dead == 2
    assert cancelled == [1, 2]
    assert errors(outbox.get(job_id)) == ["TimeoutError: took longer than 0.02 s"] * 2
    assert outbox.get(other).last_error == "TimeoutError: of the mail server"


async def test_leases_are_renewed_while_tasks_live(outbox: OutboxTable) -> None:
    """A task that outlives its lease is not taken by a rival that claims all the time, even if it blocks the loop."""
    worker = make(outbox, lease=2.0)  # a busy machine may hold up a renewal for a second
    go_on = threading.Event()

    @worker.task(timeout=PATIENCE)
    async def blocks_the_loop(ctx: Context, payload: Any) -> None:
        go_on.wait(PATIENCE)

    job_id = outbox.add("blocks_the_loop")
    running = asyncio.to_thread(lambda: asyncio.run(worker.serve(until="drained")))
    work = asyncio.ensure_future(running)
    await until(lambda: outbox.get(job_id).state is JobState.RUNNING)
    first = outbox.get(job_id).lease_until or 0.0
    while (outbox.get(job_id).lease_until or 0.0) < first + 1.1 * worker.lease:  # the first would be over
        assert outbox.store.claim("a-rival", ["blocks_the_loop"], 1, 60.0) == []
        await asyncio.sleep(0.02)
    go_on.set()
    counts = await asyncio.wait_for(work, PATIENCE)
    assert (counts.done, counts.lost, outbox.get(job_id).attempt) == (1, 0, 1)


async def test_a_lost_lease_stops_an_async_task(outbox: OutboxTable) -> None:
    """Its job is a rival's: the task is cancelled, and writes nothing."""
    worker = make(outbox, lease=3.0)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    @worker.task()
    async def slow(ctx: Context, payload: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    job_id = outbox.add("slow")
    work = asyncio.ensure_future(worker.serve())
    await asyncio.wait_for(begun.wait(), PATIENCE)
    assert worker._shift
    (attempt,) = worker._shift._places.running
    stolen = outbox.steal(job_id)
    await asyncio.wait_for(cancelled.wait(), PATIENCE)
    assert (attempt.lost, attempt.expired) == (True, False)  # by the store's word, and before its time was over
    worker.stop()
    counts = await asyncio.wait_for(work, PATIENCE)
    assert (counts.lost, counts.done, counts.released) == (1, 0, 0)
    job = outbox.get(job_id)
    assert (job.state, job.owner, job.attempt) == (JobState.RUNNING, "a-thief", stolen.attempt)


async def test_result_of_a_thread_that_lost_its_lease_is_dropped(outbox: OutboxTable) -> None:
    """A thread cannot be stopped; its result finds the job with another owner, and the key too."""
    worker = make(outbox, lease=60.0)
    begun, go_on = threading.Event(), threading.Event()

    @worker.task()
    def slow(ctx: Context, payload: Any) -> Response:
        begun.set()
        go_on.wait(PATIENCE)
        return Response(201)

    (key,) = outbox.pending()
    job_id = outbox.add("slow", of=key)
    work = asyncio.ensure_future(worker.serve())
    await until(begun.is_set)
    outbox.steal(job_id)
    go_on.set()
    await until(lambda: worker._shift and worker._shift._pump.counts.lost)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert (outbox.get(job_id).owner, outbox.key(key).state) == ("a-thief", State.PENDING)


async def test_a_thread_that_overruns_loses_its_lease_honestly(outbox: OutboxTable) -> None:
    """It is not renewed any more, so a rival gets the job while the thread still runs; the slot stays taken."""
    seen: list[events.Event] = []
    worker = make(outbox, lease=0.4, on_event=seen.append)
    go_on = threading.Event()

    @worker.task(timeout=0.05)
    def stuck(ctx: Context, payload: Any) -> None:
        go_on.wait(PATIENCE)

    job_id = outbox.add("stuck")
    work = asyncio.ensure_future(worker.serve(concurrency=1))
    rivals: list[Job] = []
    await until(lambda: outbox.get(job_id).state is JobState.RUNNING)
    while not rivals:
        rivals = outbox.store.claim("a-rival", ["stuck"], 1, 60.0)
        await asyncio.sleep(0.01)
    assert rivals[0].attempt == 2
    go_on.set()
    await until(lambda: worker._shift and worker._shift._pump.counts.lost)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert [type(event) for event in seen if isinstance(event, events.JobOverran)] == [events.JobOverran]
    assert outbox.get(job_id).owner == "a-rival"


async def test_two_attempts_of_one_worker_do_not_pass_for_one(outbox: OutboxTable) -> None:
    """A worker whose thread overran claims its own job again; the first thread's end is not the second's."""
    seen: list[events.Event] = []
    worker = make(outbox, lease=60.0, on_event=seen.append)
    gates = {1: threading.Event(), 2: threading.Event()}
    begun: list[int] = []

    @worker.task(timeout=0.05)
    def stuck(ctx: Context, payload: Any) -> None:
        begun.append(ctx.attempt)
        gates[ctx.attempt].wait(PATIENCE)

    job_id = outbox.add("stuck")
    work = asyncio.ensure_future(worker.serve())
    await until(lambda: any(isinstance(event, events.JobOverran) for event in seen), "the first overran")
    outbox.lapse(job_id)  # only this lease: the second attempt must not lose its own
    await until(lambda: begun == [1, 2], "the worker has claimed its own job again")
    gates[1].set()
    await until(lambda: worker._shift and worker._shift._pump.counts.lost, "the first is refused")
    assert (outbox.get(job_id).state, outbox.get(job_id).attempt) == (JobState.RUNNING, 2)
    gates[2].set()
    await until(lambda: outbox.get(job_id).state is JobState.DONE)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert outbox.get(job_id).attempt == 2
