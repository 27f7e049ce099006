"""A worker's attempt at a job: what a task gets and gives, every way in which it can end, and what it settles."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from oncekey.core.jobs import JobState
from oncekey.core.record import StoredResponse
from oncekey.core.states import State
from oncekey.errors import Dead, JobLost
from oncekey.outbox import Context, Response
from tests.outbox.outbox_table import OutboxTable, errors
from tests.outbox.workers import drain, make

# what a task gets, and gives


async def test_tasks_run_with_their_payload_and_context(outbox: OutboxTable) -> None:
    """Async in the loop, sync in a thread; both know whose job it is and what to call it downstream."""
    worker = make(outbox)
    seen: list[tuple[Any, ...]] = []

    @worker.task()
    async def by_loop(ctx: Context, payload: Any) -> None:
        seen.append((ctx.task, ctx.job_id, payload, ctx.downstream_key, ctx.attempt, threading.current_thread()))

    @worker.task("by another name")
    def by_thread(ctx: Context, payload: Any) -> None:
        seen.append((ctx.task, ctx.job_id, payload, ctx.downstream_key, ctx.scope, threading.current_thread()))

    first = outbox.add("by_loop", {"cents": 5})
    second = outbox.add("by another name", ["é"])
    counts = await drain(worker)
    here = threading.current_thread()
    assert (counts.done, counts.failed, counts.dead) == (2, 0, 0)
    by_name = {line[0]: line for line in seen}
    assert by_name["by_loop"] == ("by_loop", first, {"cents": 5}, "oncekey-down-000001", 1, here)
    assert by_name["by another name"][1:5] == (second, ["é"], "oncekey-down-000002", "acme")
    assert by_name["by another name"][5] is not here
    assert [outbox.get(job_id).state for job_id in (first, second)] == [JobState.DONE] * 2


async def test_a_failure_is_retried_and_remembered(outbox: OutboxTable) -> None:
    """Until it goes well; each failure stands in the history."""
    worker = make(outbox)

    @worker.task(max_attempts=3, backoff=0.0)
    async def flaky(ctx: Context, payload: Any) -> None:
        if ctx.attempt < 3:
            raise ConnectionError(f"try {ctx.attempt}")
        assert ctx.last_attempt

    job_id = outbox.add("flaky")
    counts = await drain(worker)
    assert (counts.done, counts.failed, counts.dead) == (1, 2, 0)
    job = outbox.get(job_id)
    assert (job.state, job.attempt, errors(job)) == (
        *(JobState.DONE, 3),
        ["ConnectionError: try 1", "ConnectionError: try 2"],
    )


async def test_a_poison_job_ends_in_the_dead_letters(outbox: OutboxTable) -> None:
    """After its last attempt, with its error and its history; jobs beside it are done."""
    worker = make(outbox)

    @worker.task(max_attempts=2, backoff=0.0)
    def poison(ctx: Context, payload: Any) -> None:
        raise ValueError(f"indigestible {ctx.attempt}")

    @worker.task()
    def good(ctx: Context, payload: Any) -> None: ...

    job_id = outbox.add("poison")
    outbox.insert([outbox.job("good") for _ in range(20)])
    counts = await drain(worker)
    assert (counts.done, counts.failed, counts.dead) == (20, 1, 1)
    (job,) = outbox.store.jobs(JobState.DEAD, 10)
    assert (job.id, job.attempt, job.last_error) == (job_id, 2, "ValueError: indigestible 2")
    assert errors(job) == ["ValueError: indigestible 1", "ValueError: indigestible 2"]


async def test_dead_is_dead_at_once(outbox: OutboxTable) -> None:
    worker = make(outbox)

    @worker.task(max_attempts=9)
    async def hopeless(ctx: Context, payload: Any) -> None:
        raise Dead("the account is closed")

    job_id = outbox.add("hopeless")
    await drain(worker)
    assert (outbox.get(job_id).state, outbox.get(job_id).attempt) == (JobState.DEAD, 1)
    assert outbox.get(job_id).last_error == "Dead: the account is closed"


async def test_jobs_of_unregistered_tasks_stay_ready(outbox: OutboxTable) -> None:
    worker = make(outbox)

    @worker.task()
    async def known(ctx: Context, payload: Any) -> None: ...

    left = outbox.add("of the next release")
    outbox.add("known")
    assert (await drain(worker)).done == 1
    assert (outbox.get(left).state, outbox.get(left).attempt) == (JobState.READY, 0)


async def test_a_job_whose_workers_all_died_is_not_run_again(outbox: OutboxTable) -> None:
    """Its attempts are used up by claims that never ended: dead without a run, and its key is unknown."""
    worker = make(outbox)
    runs: list[int] = []

    @worker.task(max_attempts=2)
    async def deadly(ctx: Context, payload: Any) -> None:
        runs.append(ctx.attempt)

    (key,) = outbox.pending()
    job_id = outbox.add("deadly", of=key)
    outbox.execute("UPDATE idempotency_outbox SET attempt = 2")
    assert (await drain(worker)).dead == 1
    assert runs == []
    assert outbox.get(job_id).state is JobState.DEAD
    assert "attempts are used up" in (outbox.get(job_id).last_error or "")
    assert outbox.key(key).state is State.UNKNOWN


async def test_strange_ends_are_failures(outbox: OutboxTable) -> None:
    """SystemExit, a cancellation from within, and a sync function that returned a coroutine: none ends the worker."""
    worker = make(outbox)

    @worker.task(max_attempts=1)
    async def exits(ctx: Context, payload: Any) -> None:
        raise SystemExit(3)

    @worker.task(max_attempts=1)
    def exits_in_thread(ctx: Context, payload: Any) -> None:
        raise SystemExit(3)

    @worker.task(max_attempts=1)
    async def cancels_itself(ctx: Context, payload: Any) -> None:
        raise asyncio.CancelledError

    async def never_run() -> None: ...

    @worker.task(max_attempts=5)
    def forgot_async(ctx: Context, payload: Any) -> Any:
        return never_run()

    ids = {name: outbox.add(name) for name in worker.tasks}
    assert (await drain(worker)).dead == 4
    assert outbox.get(ids["exits"]).last_error == "SystemExit: 3"
    assert outbox.get(ids["exits_in_thread"]).last_error == "SystemExit: 3"
    assert "cancelled" in (outbox.get(ids["cancels_itself"]).last_error or "")
    assert "make it async def" in (outbox.get(ids["forgot_async"]).last_error or "")


# settling


async def test_a_task_settles_the_key_of_its_request(outbox: OutboxTable) -> None:
    """The final response is stored with the job's end: completed under 400, failed from there on."""
    worker = make(outbox)

    @worker.task()
    async def pay(ctx: Context, payload: Any) -> Any:
        if payload["declined"]:
            return 402, {"error": "declined"}
        return Response(201, {"charge": 1}, headers={"Location": "/payments/1"})

    good, bad = outbox.pending(2)
    outbox.add("pay", {"declined": False}, of=good)
    outbox.add("pay", {"declined": True}, of=bad)
    assert (await drain(worker)).done == 2
    headers = (("location", "/payments/1"), ("content-type", "application/json"))
    assert outbox.key(good).state is State.COMPLETED
    assert outbox.key(good).response == StoredResponse(201, headers, b'{"charge":1}')
    assert outbox.key(bad).state is State.FAILED
    assert (outbox.key(bad).response or Response(200).stored).status == 402


async def test_a_settling_task_that_dies_leaves_its_key_unknown(outbox: OutboxTable) -> None:
    """After its last attempt, and where it returns no response: never pending for ever."""
    worker = make(outbox)

    @worker.task(max_attempts=2, backoff=0.0)
    async def fails(ctx: Context, payload: Any) -> None:
        raise ConnectionError("no answer")

    @worker.task()
    async def returns_nothing(ctx: Context, payload: Any) -> None: ...

    first, second = outbox.pending(2)
    outbox.add("fails", of=first)
    silent = outbox.add("returns_nothing", of=second)
    assert (await drain(worker)).dead == 2
    assert (outbox.key(first).state, outbox.key(first).last_error) == (State.UNKNOWN, "ConnectionError: no answer")
    assert outbox.key(second).state is State.UNKNOWN
    assert "must return Response" in (outbox.get(silent).last_error or "")


# the provider's id


async def test_the_providers_id_is_stored_before_the_end(outbox: OutboxTable) -> None:
    """By async and by sync tasks; the next attempt has it."""
    worker = make(outbox)
    stored: list[str | None] = []

    @worker.task(max_attempts=2, backoff=0.0)
    async def by_loop(ctx: Context, payload: Any) -> None:
        stored.append(ctx.provider_id)
        await ctx.record("ch_loop")
        stored.append(outbox.get(ctx.job_id).provider_id)
        if ctx.attempt == 1:
            raise ConnectionError

    @worker.task()
    def by_thread(ctx: Context, payload: Any) -> None:
        ctx.record("ch_thread")

    outbox.add("by_loop")
    job_id = outbox.add("by_thread")
    await drain(worker)
    assert stored == [None, "ch_loop", "ch_loop", "ch_loop"]
    assert outbox.get(job_id).provider_id == "ch_thread"


@pytest.mark.parametrize("provider_id", ["", "a\nb", "\x00", None, 7])
async def test_a_providers_id_is_text(tmp_path: Any, provider_id: Any) -> None:
    outbox = OutboxTable(f"sqlite:///{tmp_path}/keys.db")
    worker = make(outbox)

    @worker.task()
    async def records(ctx: Context, payload: Any) -> None:
        await ctx.record(provider_id)

    job_id = outbox.add("records")
    await drain(worker)
    assert "ctx.record" in (outbox.get(job_id).last_error or "")
    outbox.close()


async def test_recording_for_a_lost_job_says_so(outbox: OutboxTable) -> None:
    worker = make(outbox)
    told: list[BaseException] = []

    @worker.task(max_attempts=1)
    async def records(ctx: Context, payload: Any) -> None:
        outbox.steal(ctx.job_id)
        try:
            await ctx.record("ch_1")
        except JobLost as error:
            told.append(error)

    job_id = outbox.add("records")
    counts = await drain(worker)
    assert (len(told), counts.lost, outbox.get(job_id).provider_id) == (1, 1, None)
