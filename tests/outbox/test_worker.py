"""A worker over a real outbox, in the process of the test: every way in which an attempt can end.

No test sleeps to synchronise: tasks wait for events, and tests wait for rows (``until``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.jobs import Conclusion, Job, JobState
from oncekey.core.record import StoredResponse
from oncekey.core.states import State
from oncekey.errors import ConfigurationError, Dead, JobLost, SchemaError, StoreError, StoreUnavailable
from oncekey.outbox import Context, Response, Worker
from oncekey.outbox import worker as worker_module
from oncekey.outbox.attempts import Counts
from oncekey.stores.memory import MemoryStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.telemetry import events
from oncekey.testing.servers import PostgresServer
from tests.engine.doubles import PATIENCE
from tests.outbox.boxes import Box, errors


async def until(check: Callable[[], Any], what: str = "") -> None:
    """Wait until it is so, with the loop free."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, f"did not happen in time: {what}"
        await asyncio.sleep(0.005)


def make(box: Box, **settings: Any) -> Worker:
    return Worker(box.store, **({"poll": 0.01} | settings))


async def drain(worker: Worker) -> Counts:
    return await asyncio.wait_for(worker.serve(until="drained"), PATIENCE)


# what a task gets, and gives


async def test_tasks_run_with_their_payload_and_context(box: Box) -> None:
    """Async in the loop, sync in a thread; both know whose job it is and what to call it downstream."""
    worker = make(box)
    seen: list[tuple[Any, ...]] = []

    @worker.task()
    async def by_loop(ctx: Context, payload: Any) -> None:
        seen.append((ctx.task, ctx.job_id, payload, ctx.downstream_key, ctx.attempt, threading.current_thread()))

    @worker.task("by another name")
    def by_thread(ctx: Context, payload: Any) -> None:
        seen.append((ctx.task, ctx.job_id, payload, ctx.downstream_key, ctx.scope, threading.current_thread()))

    first = box.add("by_loop", {"cents": 5})
    second = box.add("by another name", ["é"])
    counts = await drain(worker)
    here = threading.current_thread()
    assert (counts.done, counts.failed, counts.dead) == (2, 0, 0)
    by_name = {line[0]: line for line in seen}
    assert by_name["by_loop"] == ("by_loop", first, {"cents": 5}, "oncekey-down-000001", 1, here)
    assert by_name["by another name"][1:5] == (second, ["é"], "oncekey-down-000002", "acme")
    assert by_name["by another name"][5] is not here
    assert [box.get(job_id).state for job_id in (first, second)] == [JobState.DONE] * 2


async def test_a_failure_is_retried_and_remembered(box: Box) -> None:
    """Until it goes well; each failure stands in the history."""
    worker = make(box)

    @worker.task(max_attempts=3, backoff=0.0)
    async def flaky(ctx: Context, payload: Any) -> None:
        if ctx.attempt < 3:
            raise ConnectionError(f"try {ctx.attempt}")
        assert ctx.last_attempt

    job_id = box.add("flaky")
    counts = await drain(worker)
    assert (counts.done, counts.failed, counts.dead) == (1, 2, 0)
    job = box.get(job_id)
    assert (job.state, job.attempt, errors(job)) == (
        *(JobState.DONE, 3),
        ["ConnectionError: try 1", "ConnectionError: try 2"],
    )


async def test_a_poison_job_ends_in_the_dead_letters(box: Box) -> None:
    """After its last attempt, with its error and its history; jobs beside it are done."""
    worker = make(box)

    @worker.task(max_attempts=2, backoff=0.0)
    def poison(ctx: Context, payload: Any) -> None:
        raise ValueError(f"indigestible {ctx.attempt}")

    @worker.task()
    def good(ctx: Context, payload: Any) -> None: ...

    job_id = box.add("poison")
    box.insert([box.job("good") for _ in range(20)])
    counts = await drain(worker)
    assert (counts.done, counts.failed, counts.dead) == (20, 1, 1)
    (job,) = box.store.jobs(JobState.DEAD, 10)
    assert (job.id, job.attempt, job.last_error) == (job_id, 2, "ValueError: indigestible 2")
    assert errors(job) == ["ValueError: indigestible 1", "ValueError: indigestible 2"]


async def test_dead_is_dead_at_once(box: Box) -> None:
    worker = make(box)

    @worker.task(max_attempts=9)
    async def hopeless(ctx: Context, payload: Any) -> None:
        raise Dead("the account is closed")

    job_id = box.add("hopeless")
    await drain(worker)
    assert (box.get(job_id).state, box.get(job_id).attempt) == (JobState.DEAD, 1)
    assert box.get(job_id).last_error == "Dead: the account is closed"


async def test_tasks_that_nobody_registered_are_left_alone(box: Box) -> None:
    worker = make(box)

    @worker.task()
    async def known(ctx: Context, payload: Any) -> None: ...

    left = box.add("of the next release")
    box.add("known")
    assert (await drain(worker)).done == 1
    assert (box.get(left).state, box.get(left).attempt) == (JobState.READY, 0)


async def test_a_job_whose_workers_all_died_is_not_run_again(box: Box) -> None:
    """Its attempts are used up by claims that never ended: dead without a run, and its key is unknown."""
    worker = make(box)
    runs: list[int] = []

    @worker.task(max_attempts=2)
    async def deadly(ctx: Context, payload: Any) -> None:
        runs.append(ctx.attempt)

    (key,) = box.pending()
    job_id = box.add("deadly", of=key)
    box.execute("UPDATE idempotency_outbox SET attempt = 2")
    assert (await drain(worker)).dead == 1
    assert runs == []
    assert box.get(job_id).state is JobState.DEAD
    assert "attempts are used up" in (box.get(job_id).last_error or "")
    assert box.key(key).state is State.UNKNOWN


async def test_strange_ends_are_failures(box: Box) -> None:
    """SystemExit, a cancellation from within, and a sync function that returned a coroutine: none ends the worker."""
    worker = make(box)

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

    ids = {name: box.add(name) for name in worker.tasks}
    assert (await drain(worker)).dead == 4
    assert box.get(ids["exits"]).last_error == "SystemExit: 3"
    assert box.get(ids["exits_in_thread"]).last_error == "SystemExit: 3"
    assert "cancelled" in (box.get(ids["cancels_itself"]).last_error or "")
    assert "make it async def" in (box.get(ids["forgot_async"]).last_error or "")


# settling


async def test_a_task_settles_the_key_of_its_request(box: Box) -> None:
    """The final response is stored with the job's end: completed under 400, failed from there on."""
    worker = make(box)

    @worker.task()
    async def pay(ctx: Context, payload: Any) -> Any:
        if payload["declined"]:
            return 402, {"error": "declined"}
        return Response(201, {"charge": 1}, headers={"Location": "/payments/1"})

    good, bad = box.pending(2)
    box.add("pay", {"declined": False}, of=good)
    box.add("pay", {"declined": True}, of=bad)
    assert (await drain(worker)).done == 2
    headers = (("location", "/payments/1"), ("content-type", "application/json"))
    assert box.key(good).state is State.COMPLETED
    assert box.key(good).response == StoredResponse(201, headers, b'{"charge":1}')
    assert box.key(bad).state is State.FAILED
    assert (box.key(bad).response or Response(200).stored).status == 402


async def test_a_settling_task_that_dies_leaves_its_key_unknown(box: Box) -> None:
    """After its last attempt, and where it returns no response: never pending for ever."""
    worker = make(box)

    @worker.task(max_attempts=2, backoff=0.0)
    async def fails(ctx: Context, payload: Any) -> None:
        raise ConnectionError("no answer")

    @worker.task()
    async def returns_nothing(ctx: Context, payload: Any) -> None: ...

    first, second = box.pending(2)
    box.add("fails", of=first)
    silent = box.add("returns_nothing", of=second)
    assert (await drain(worker)).dead == 2
    assert (box.key(first).state, box.key(first).last_error) == (State.UNKNOWN, "ConnectionError: no answer")
    assert box.key(second).state is State.UNKNOWN
    assert "must return Response" in (box.get(silent).last_error or "")


# time


async def test_an_async_task_that_takes_too_long_is_cancelled(box: Box) -> None:
    worker = make(box)
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

    job_id, other = box.add("hangs"), box.add("raises_timeout_itself")
    assert (await drain(worker)).dead == 2
    assert cancelled == [1, 2]
    assert errors(box.get(job_id)) == ["TimeoutError: took longer than 0.02 s"] * 2
    assert box.get(other).last_error == "TimeoutError: of the mail server"


async def test_leases_are_renewed_while_tasks_live(box: Box) -> None:
    """A task that outlives its lease is not taken by a rival that claims all the time, even if it blocks the loop."""
    worker = make(box, lease=0.6)
    go_on = threading.Event()

    @worker.task(timeout=PATIENCE)
    async def blocks_the_loop(ctx: Context, payload: Any) -> None:
        go_on.wait(PATIENCE)

    job_id = box.add("blocks_the_loop")
    running = asyncio.to_thread(lambda: asyncio.run(worker.serve(until="drained")))
    work = asyncio.ensure_future(running)
    await until(lambda: box.get(job_id).state is JobState.RUNNING)
    first = box.get(job_id).lease_until or 0.0
    while (box.get(job_id).lease_until or 0.0) < first + 1.1 * worker.lease:  # the first would be over
        assert box.store.claim("a-rival", ["blocks_the_loop"], 1, 60.0) == []
        await asyncio.sleep(0.02)
    go_on.set()
    counts = await asyncio.wait_for(work, PATIENCE)
    assert (counts.done, counts.lost, box.get(job_id).attempt) == (1, 0, 1)


async def test_a_lost_lease_stops_an_async_task(box: Box) -> None:
    """Its job is a rival's: the task is cancelled, and writes nothing."""
    worker = make(box, lease=0.9)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    @worker.task()
    async def slow(ctx: Context, payload: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    job_id = box.add("slow")
    work = asyncio.ensure_future(worker.serve())
    await asyncio.wait_for(begun.wait(), PATIENCE)
    assert worker._shift
    (attempt,) = worker._shift._running
    stolen = box.steal(job_id)
    await asyncio.wait_for(cancelled.wait(), PATIENCE)
    assert (attempt.lost, attempt.expired) == (True, False)  # by the store's word, and before its time was over
    worker.stop()
    counts = await asyncio.wait_for(work, PATIENCE)
    assert (counts.lost, counts.done, counts.released) == (1, 0, 0)
    job = box.get(job_id)
    assert (job.state, job.owner, job.attempt) == (JobState.RUNNING, "a-thief", stolen.attempt)


async def test_what_a_thread_brings_too_late_is_dropped(box: Box) -> None:
    """A thread cannot be stopped; its result finds the job somebody else's, and the key too."""
    worker = make(box, lease=60.0)
    begun, go_on = threading.Event(), threading.Event()

    @worker.task()
    def slow(ctx: Context, payload: Any) -> Response:
        begun.set()
        go_on.wait(PATIENCE)
        return Response(201)

    (key,) = box.pending()
    job_id = box.add("slow", of=key)
    work = asyncio.ensure_future(worker.serve())
    await until(begun.is_set)
    box.steal(job_id)
    go_on.set()
    await until(lambda: worker._shift and worker._shift._pump.counts.lost)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert (box.get(job_id).owner, box.key(key).state) == ("a-thief", State.PENDING)


async def test_a_thread_that_overruns_loses_its_lease_honestly(box: Box) -> None:
    """It is not renewed any more, so a rival gets the job while the thread still runs; the slot stays taken."""
    seen: list[events.Event] = []
    worker = make(box, lease=0.4, on_event=seen.append)
    go_on = threading.Event()

    @worker.task(timeout=0.05)
    def stuck(ctx: Context, payload: Any) -> None:
        go_on.wait(PATIENCE)

    job_id = box.add("stuck")
    work = asyncio.ensure_future(worker.serve(concurrency=1))
    rivals: list[Job] = []
    await until(lambda: box.get(job_id).state is JobState.RUNNING)
    while not rivals:
        rivals = box.store.claim("a-rival", ["stuck"], 1, 60.0)
        await asyncio.sleep(0.01)
    assert rivals[0].attempt == 2
    go_on.set()
    await until(lambda: worker._shift and worker._shift._pump.counts.lost)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert [type(event) for event in seen if isinstance(event, events.JobOverran)] == [events.JobOverran]
    assert box.get(job_id).owner == "a-rival"


async def test_two_attempts_of_one_worker_do_not_pass_for_one(box: Box) -> None:
    """A worker whose thread overran claims its own job again; the first thread's end is not the second's."""
    worker = make(box, lease=0.4)
    gates = {1: threading.Event(), 2: threading.Event()}
    begun: list[int] = []

    @worker.task(timeout=0.05)
    def stuck(ctx: Context, payload: Any) -> None:
        begun.append(ctx.attempt)
        gates[ctx.attempt].wait(PATIENCE)

    job_id = box.add("stuck")
    work = asyncio.ensure_future(worker.serve())
    await until(lambda: begun == [1, 2], "the worker has claimed its own job again")
    gates[1].set()
    await until(lambda: worker._shift and worker._shift._pump.counts.lost, "the first is refused")
    assert (box.get(job_id).state, box.get(job_id).attempt) == (JobState.RUNNING, 2)
    gates[2].set()
    await until(lambda: box.get(job_id).state is JobState.DONE)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert box.get(job_id).attempt == 2


# the provider's id


async def test_the_providers_id_is_stored_before_the_end(box: Box) -> None:
    """By async and by sync tasks; the next attempt has it."""
    worker = make(box)
    stored: list[str | None] = []

    @worker.task(max_attempts=2, backoff=0.0)
    async def by_loop(ctx: Context, payload: Any) -> None:
        stored.append(ctx.provider_id)
        await ctx.record("ch_loop")
        stored.append(box.get(ctx.job_id).provider_id)
        if ctx.attempt == 1:
            raise ConnectionError

    @worker.task()
    def by_thread(ctx: Context, payload: Any) -> None:
        ctx.record("ch_thread")

    box.add("by_loop")
    job_id = box.add("by_thread")
    await drain(worker)
    assert stored == [None, "ch_loop", "ch_loop", "ch_loop"]
    assert box.get(job_id).provider_id == "ch_thread"


@pytest.mark.parametrize("provider_id", ["", "a\nb", "\x00", None, 7])
async def test_a_providers_id_is_text(tmp_path: Any, provider_id: Any) -> None:
    box = Box(f"sqlite:///{tmp_path}/keys.db")
    worker = make(box)

    @worker.task()
    async def records(ctx: Context, payload: Any) -> None:
        await ctx.record(provider_id)

    job_id = box.add("records")
    await drain(worker)
    assert "ctx.record" in (box.get(job_id).last_error or "")
    box.close()


async def test_recording_for_a_lost_job_says_so(box: Box) -> None:
    worker = make(box)
    told: list[BaseException] = []

    @worker.task(max_attempts=1)
    async def records(ctx: Context, payload: Any) -> None:
        box.steal(ctx.job_id)
        try:
            await ctx.record("ch_1")
        except JobLost as error:
            told.append(error)

    job_id = box.add("records")
    counts = await drain(worker)
    assert (len(told), counts.lost, box.get(job_id).provider_id) == (1, 1, None)


# running, and the end


async def test_no_more_jobs_run_than_there_are_slots(box: Box) -> None:
    worker = make(box, concurrency=3)
    now, most = 0, 0

    @worker.task()
    async def counted(ctx: Context, payload: Any) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.002)
        now -= 1

    box.insert([box.job("counted") for _ in range(30)])
    assert (await drain(worker)).done == 30
    assert most == 3


async def test_a_stop_lets_running_tasks_end_and_claims_nothing_more(box: Box) -> None:
    worker = make(box, concurrency=1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @worker.task()
    async def slow(ctx: Context, payload: Any) -> None:
        begun.set()
        await go_on.wait()

    first, second = box.add("slow"), box.add("slow")
    work = asyncio.ensure_future(worker.serve(grace=PATIENCE))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    worker.stop()
    await asyncio.sleep(0)
    go_on.set()
    counts = await asyncio.wait_for(work, PATIENCE)
    assert (counts.done, counts.released) == (1, 0)
    assert [box.get(job_id).state for job_id in (first, second)] == [JobState.DONE, JobState.READY]


@pytest.mark.parametrize("attempts", [8, 1])
async def test_after_the_grace_jobs_are_released(box: Box, attempts: int) -> None:
    """The task is cancelled; its job is ready at once, and the attempt does not count.

    One that may be tried once only has been tried: whether it had its effect, nobody knows.
    """
    worker = make(box)
    begun = asyncio.Event()

    @worker.task(max_attempts=attempts)
    async def endless(ctx: Context, payload: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    job_id = box.add("endless")
    work = asyncio.ensure_future(worker.serve(grace=0.02))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    worker.stop()
    counts = await asyncio.wait_for(work, PATIENCE)
    assert (counts.released, counts.dead, counts.done) == ((1, 0, 0) if attempts > 1 else (0, 1, 0))
    job = box.get(job_id)
    assert (job.state, job.attempt) == ((JobState.READY, 0) if attempts > 1 else (JobState.DEAD, 1))
    (told,) = errors(job)
    assert "cut off" in told


async def test_after_the_grace_a_thread_keeps_its_lease(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Released, another worker would run the job beside it. The worker ends all the same, and at once."""
    monkeypatch.setattr(worker_module, "END_SECONDS", 3600.0)
    worker = make(box)
    begun, go_on = threading.Event(), threading.Event()

    @worker.task()
    def endless(ctx: Context, payload: Any) -> None:
        begun.set()
        go_on.wait(PATIENCE)

    job_id = box.add("endless")
    work = asyncio.ensure_future(worker.serve(grace=0.02))
    await until(begun.is_set)
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    job = box.get(job_id)
    assert (job.state, job.attempt) == (JobState.RUNNING, 1)
    assert (job.lease_until or 0) > job.now
    go_on.set()


async def test_one_batch_and_no_more(box: Box) -> None:
    worker = make(box, concurrency=4)

    @worker.task()
    async def quick(ctx: Context, payload: Any) -> None: ...

    box.insert([box.job("quick") for _ in range(10)])
    assert (await asyncio.wait_for(worker.serve(until="once"), PATIENCE)).done == 4
    assert box.count(JobState.READY) == 6


async def test_a_drained_worker_does_not_wait_for_what_is_due_later(box: Box) -> None:
    worker = make(box)

    @worker.task(backoff=600.0)
    async def fails(ctx: Context, payload: Any) -> None:
        raise ConnectionError

    box.add("fails", run_at=time.time() + 600)
    box.add("fails")
    assert (await drain(worker)).failed in (0, 1)
    assert box.count(JobState.READY) >= 1


async def test_progress_is_told(box: Box) -> None:
    worker = make(box)
    told: list[int] = []
    go_on = asyncio.Event()

    @worker.task()
    async def slow(ctx: Context, payload: Any) -> None:
        await go_on.wait()

    def progress(counts: Counts) -> None:
        told.append(counts.done)
        go_on.set()

    box.add("slow")
    counts = await worker.serve(until="drained", progress=progress, interval=0.01)
    assert told[0] == 0
    assert counts.as_json()["done"] == 1
    assert counts.as_json()["lag_seconds"] >= 0


async def test_events_tell_what_happened_without_keys(box: Box) -> None:
    seen: list[events.Event] = []
    worker = make(box, on_event=seen.append)

    @worker.task(max_attempts=2, backoff=0.0)
    async def fails(ctx: Context, payload: Any) -> None:
        raise ValueError(f"of '{ctx.key}'")

    @worker.task()
    async def works(ctx: Context, payload: Any) -> None: ...

    box.add("works")
    box.add("fails")
    await drain(worker)
    kinds = [type(event).__name__ for event in seen]
    assert sorted(kinds) == ["JobDead", "JobDone", "JobRetried", "JobStarted", "JobStarted", "JobStarted"]
    assert "of-the-client" not in repr(seen)
    assert {event.task for event in seen if isinstance(event, events.JobEvent)} == {"fails", "works"}


# a store that fails


class Faulty(SqliteStore):
    """A real store whose answers get lost (the work is done, and nobody hears), or that refuses a row."""

    lose: str | None = None
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

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        if self.lose == "renewals":
            raise StoreUnavailable("nobody answers")
        return super().renew_jobs(owner, ids, lease_seconds)


@pytest.fixture
def faulty(tmp_path: Any) -> Any:
    box = Box(f"sqlite:///{tmp_path}/keys.db")
    box.store = Faulty(tmp_path / "keys.db")
    yield box
    box.close()


async def test_an_end_whose_answer_was_lost_is_still_ours(faulty: Box) -> None:
    """Hazard 9: the retry finds the job done by our own token, and does not call it lost."""
    worker = make(faulty)

    @worker.task()
    async def quick(ctx: Context, payload: Any) -> None: ...

    faulty.store.lose = "conclude"  # type: ignore[attr-defined]
    job_id = faulty.add("quick")
    counts = await drain(worker)
    assert (counts.done, counts.lost, faulty.get(job_id).state) == (1, 0, JobState.DONE)


async def test_a_claim_whose_answer_was_lost_is_given_back(faulty: Box) -> None:
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


async def test_one_end_that_cannot_be_stored_harms_nobody_else(faulty: Box) -> None:
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


async def test_a_lease_that_cannot_be_renewed_ends_the_attempt(faulty: Box) -> None:
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
    box = Box(postgres_url)
    seen: list[events.Event] = []
    worker = make(box, on_event=seen.append)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @worker.task()
    async def slow(ctx: Context, payload: Any) -> None:
        begun.set()
        await go_on.wait()

    box.add("slow")
    work = asyncio.ensure_future(worker.serve())
    await asyncio.wait_for(begun.wait(), PATIENCE)
    postgres_server.kill()
    go_on.set()
    await until(lambda: any(isinstance(event, events.StoreFailed) for event in seen), "it noticed")
    postgres_server.start()  # in this thread: a server ends with the thread that started it
    box.store.disconnect()
    box.add("slow")
    await until(lambda: worker._shift and worker._shift._pump.counts.done == 2, "both are done")
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert box.count(JobState.DONE) == 2
    box.close()


async def test_a_stop_while_the_store_is_down_is_a_stop(faulty: Box) -> None:
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


# mistakes


async def test_mistakes_are_told_before_anything_runs(box: Box) -> None:
    with pytest.raises(ConfigurationError, match="no tasks"):
        await Worker(box.store).serve()
    for wrong in ({"concurrency": 0}, {"lease": 0}, {"poll": -1}):
        with pytest.raises(ConfigurationError, match="more than 0"):
            Worker(box.store, **wrong)  # type: ignore[arg-type]
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


async def test_missing_tables_are_said_at_once(postgres_server: PostgresServer) -> None:
    worker = Worker(postgres_server.database("without_tables"))

    @worker.task()
    async def known(ctx: Context, payload: Any) -> None: ...

    with pytest.raises(SchemaError, match="oncekey migrate"):
        await worker.serve()
    postgres_server.drop_database("without_tables")


async def test_one_run_at_a_time(box: Box) -> None:
    worker = make(box)

    @worker.task()
    async def known(ctx: Context, payload: Any) -> None: ...

    work = asyncio.ensure_future(worker.serve())
    await asyncio.sleep(0)
    with pytest.raises(ConfigurationError, match="running already"):
        await worker.serve()
    worker.stop()
    await asyncio.wait_for(work, PATIENCE)
    assert (await drain(worker)).done == 0  # and again, afterwards


async def test_a_worker_takes_the_apps_own_store_and_events(box: Box) -> None:
    seen: list[events.Event] = []
    with OnceKey(box.store, scope=SINGLE_TENANT, on_event=seen.append) as once:
        worker = Worker(once, poll=0.01)

        @worker.task()
        async def known(ctx: Context, payload: Any) -> None: ...

        box.add("known")
        assert (await drain(worker)).done == 1
        assert [type(event).__name__ for event in seen] == ["JobStarted", "JobDone"]
