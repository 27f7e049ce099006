"""The part of the store suite that is about the outbox: for stores whose transactions a request can enlist.

A class of its own, because it needs a way to add a job as a request does, in a transaction of its own::

    class TestMyOutbox(OutboxSuite):
        def make_store(self): ...

        def add_job(self, store, job):
            ...  # run enqueue_statement(dialect) with job_parameters(job), and commit

A store that takes no ``clock`` also says how a job ages (:meth:`OutboxSuite.age_job`) and what time it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from oncekey.core.jobs import Conclusion, Job, JobEnd, JobState, NewJob
from oncekey.core.record import Audit, Record, StoredResponse, swap
from oncekey.core.states import Actor, Event, State
from oncekey.errors import IllegalTransition
from oncekey.stores.base import Duty, Store
from oncekey.testing.company import in_threads
from oncekey.testing.store_suite_base import LEASE, RESPONSE, RETENTION, SuiteBase, one, stored

WORKER = "worker-1"
RIVAL = "worker-2"
TASK = "send_receipt"
TIMEOUT_RESPONSE = StoredResponse(408, (("content-type", "application/problem+json"),), b'{"status":408}')
_THREADS = 8
_RACED = 200


class OutboxSuite(SuiteBase):
    """Subclass it as ``Test…``; see the module's docstring."""

    def add_job(self, store: Store, job: NewJob) -> None:
        raise NotImplementedError("say how a job is added")

    def age_job(self, store: Store, job_id: str, seconds: float) -> None:
        """Let ``seconds`` pass for this job. A store with a clock of its own moves the times of the row back."""
        del store, job_id
        self.clock.advance(seconds)

    def now(self) -> float:
        return self.clock()

    # values

    def added(self, store: Store, number: int = 1, *, of: Record | None = None, **changes: Any) -> str:
        """A job, added; its id. With ``of`` it belongs to that key, and settles it."""
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

    def running(self, store: Store, number: int = 1, *, of: Record | None = None) -> str:
        job_id = self.added(store, number, of=of)
        assert [job.id for job in claim(store)] == [job_id]
        return job_id

    def dead(self, store: Store, number: int = 1, *, of: Record | None = None) -> str:
        job_id = self.running(store, number, of=of)
        assert store.conclude(
            [Conclusion(job_id, WORKER, JobEnd.DEAD, error="poison", settle=State.UNKNOWN if of else None)]
        )[0]
        return job_id

    # claims

    def test_a_job_is_claimed_as_it_was_added(self, store: Store) -> None:
        """Every field arrives; it is running under the claim's owner, with attempt 1 and a lease from now."""
        job_id = self.added(store)
        (job,) = claim(store)
        assert (job.id, job.scope, job.key, job.key_owner) == (job_id, "tenant-1", "key-1", "owner-0")
        assert (job.operation, job.task, job.downstream_key) == ("POST /payments", TASK, "oncekey-1")
        assert orjson.loads(job.payload) == {"to": "a@example.com", "note": "é 🔑"}
        assert (job.state, job.attempt, job.owner, job.settles) == (JobState.RUNNING, 1, WORKER, False)
        assert job.lease_until == pytest.approx(job.now + LEASE)
        assert (job.provider_id, job.last_error, job.history, job.finished_at) == (None, None, b"[]", None)
        assert job.lag >= 0.0
        assert replace(one_job(store, job_id), now=job.now) == job

    def test_a_claimed_job_is_nobody_elses(self, store: Store) -> None:
        self.running(store)
        assert claim(store, RIVAL) == []

    def test_a_claim_takes_the_oldest_and_no_more_than_asked(self, store: Store) -> None:
        """Three of five, in the order in which they were due."""
        for number, ago in enumerate((10, 50, 30, 40, 20), start=1):
            self.added(store, number, run_at=self.now() - ago)
        assert [job.id for job in claim(store, limit=3)] == ["job-0002", "job-0004", "job-0003"]
        assert [job.id for job in claim(store, RIVAL)] == ["job-0005", "job-0001"]

    def test_only_tasks_that_are_asked_for_are_claimed(self, store: Store) -> None:
        self.added(store, 1, task="other")
        job_id = self.added(store, 2)
        assert [job.id for job in store.claim(WORKER, [TASK, "third"], 10, LEASE)] == [job_id]

    def test_a_job_waits_for_its_time(self, store: Store) -> None:
        job_id = self.added(store, run_at=self.now() + 100)
        assert claim(store) == []
        self.age_job(store, job_id, 101)
        assert [job.id for job in claim(store)] == [job_id]

    def test_of_many_threads_one_has_a_job(self, store: Store) -> None:
        """8 threads claim 200 jobs in small batches: each job is claimed exactly once."""
        for number in range(_RACED):
            self.added(store, number)

        def work(number: int) -> list[str]:
            mine: list[str] = []
            while found := claim(store, f"worker-{number}", limit=7):
                mine += [job.id for job in found]
            return mine

        claimed = [job_id for mine in in_threads(store, work, _THREADS) for job_id in mine]
        assert sorted(claimed) == [f"job-{number:04d}" for number in range(_RACED)]

    # leases

    def test_a_job_whose_lease_is_over_is_claimed_again(self, store: Store) -> None:
        """Attempt 2 under the new owner; the lost attempt is in the history, and its owner can write nothing."""
        job_id = self.running(store)
        self.age_job(store, job_id, LEASE + 1)
        (job,) = claim(store, RIVAL)
        assert (job.id, job.attempt, job.owner, job.last_error) == (job_id, 2, RIVAL, "the worker's lease ran out")
        assert [(line["attempt"], line["error"]) for line in history(job)] == [(1, "the worker's lease ran out")]
        assert store.renew_jobs(WORKER, [job_id], LEASE) == []
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE)]) == [False]
        assert store.note_provider(job_id, WORKER, "ch_1") is False
        assert replace(one_job(store, job_id), now=job.now) == job

    def test_lost_jobs_come_before_new_ones(self, store: Store) -> None:
        """And both together are never more than asked."""
        lost = self.running(store, 1)
        self.age_job(store, lost, LEASE + 1)
        new = self.added(store, 2)
        assert [job.id for job in claim(store, RIVAL, limit=1)] == [lost]
        assert [job.id for job in claim(store, RIVAL, limit=1)] == [new]

    def test_lost_and_new_jobs_share_one_limit(self, store: Store) -> None:
        lost = [self.running(store, number) for number in (1, 2)]
        for job_id in lost:
            self.age_job(store, job_id, LEASE + 1)
        for number in (3, 4, 5):
            self.added(store, number)
        assert {job.id for job in claim(store, RIVAL, limit=3)} > set(lost)
        assert len(claim(store, RIVAL)) == 2

    def test_a_renewed_lease_holds_from_now(self, store: Store) -> None:
        """Of three ids, one is not ours and one never was: only ours is renewed, and outlives its first lease."""
        mine, done = self.running(store, 1), self.running(store, 2)
        store.conclude([Conclusion(done, WORKER, JobEnd.DONE)])
        self.age_job(store, mine, LEASE - 1)
        assert store.renew_jobs(WORKER, [mine, done, "never"], LEASE) == [mine]
        self.age_job(store, mine, LEASE - 1)
        assert claim(store, RIVAL) == []
        self.age_job(store, mine, 2)
        assert [job.id for job in claim(store, RIVAL)] == [mine]

    # ends

    def test_done_is_done_once(self, store: Store) -> None:
        job_id = self.running(store)
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE)]) == [True]
        job = one_job(store, job_id)
        assert (job.state, job.lease_until, job.last_error, job.attempt) == (JobState.DONE, None, None, 1)
        assert job.finished_at is not None
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DEAD, error="late")]) == [False]
        assert claim(store, RIVAL) == []
        assert one_job(store, job_id).state is JobState.DONE

    def test_a_failed_attempt_is_tried_again_later(self, store: Store) -> None:
        """Not before its time; the error stands in the row and in the history, also after it went well."""
        job_id = self.running(store)
        failed = Conclusion(job_id, WORKER, JobEnd.RETRY, retry_in=100.0, error="the mail server said no")
        assert store.conclude([failed]) == [True]
        job = one_job(store, job_id)
        assert (job.state, job.last_error, job.finished_at) == (JobState.READY, "the mail server said no", None)
        assert job.run_at == pytest.approx(job.now + 100.0, abs=5.0)
        assert claim(store) == []
        self.age_job(store, job_id, 101)
        (again,) = claim(store, RIVAL)
        assert (again.attempt, again.owner) == (2, RIVAL)
        store.conclude([Conclusion(job_id, RIVAL, JobEnd.DONE)])
        ((attempt, error),) = [(line["attempt"], line["error"]) for line in history(one_job(store, job_id))]
        assert (attempt, error) == (1, "the mail server said no")

    @pytest.mark.parametrize("error", [None, "cut off"])
    def test_a_released_job_has_its_attempt_back(self, store: Store, error: str | None) -> None:
        """Ready at once, and the attempt does not count; that the task had begun is remembered, where it had."""
        job_id = self.running(store)
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.RELEASE, error=error)]) == [True]
        job = one_job(store, job_id)
        assert (job.state, job.attempt, job.last_error) == (JobState.READY, 0, None)
        assert [line["error"] for line in history(job)] == ([error] if error else [])
        (again,) = claim(store, RIVAL)
        assert again.attempt == 1

    def test_a_dead_letter_stays_with_its_error(self, store: Store) -> None:
        job_id = self.dead(store)
        job = one_job(store, job_id)
        assert (job.state, job.last_error, len(history(job))) == (JobState.DEAD, "poison", 1)
        assert job.finished_at is not None
        assert claim(store, RIVAL) == []

    def test_a_history_is_cut_and_so_are_errors(self, store: Store) -> None:
        """The last 20 attempts, at most 500 characters each, and no text that the store could not take."""
        job_id = self.added(store)
        for number in range(1, 24):
            assert [job.id for job in claim(store)] == [job_id]
            error = f"{number} \x00 \ud800 " + "x" * 600
            assert store.conclude([Conclusion(job_id, WORKER, JobEnd.RETRY, error=error)]) == [True]
        job = one_job(store, job_id)
        assert [line["attempt"] for line in history(job)] == list(range(4, 24))
        assert job.last_error is not None
        assert {len(line["error"]) for line in history(job)} == {500}
        assert job.last_error == history(job)[-1]["error"]
        assert all(line["at"] == pytest.approx(job.now, abs=60) for line in history(job))

    def test_a_batch_ends_each_as_it_says(self, store: Store) -> None:
        """Four kinds of end and one that is not ours, in one batch; the answers stand in its order."""
        for number in range(1, 6):
            self.added(store, number)
        ids = [job.id for job in claim(store)]
        ends = (JobEnd.DEAD, JobEnd.RELEASE, JobEnd.DONE, JobEnd.RETRY)
        batch = [Conclusion(job_id, WORKER, end) for job_id, end in zip(ids, ends, strict=False)]
        batch.insert(2, Conclusion(ids[4], RIVAL, JobEnd.DONE))
        assert store.conclude(batch) == [True, True, False, True, True]
        states = [one_job(store, job_id).state for job_id in ids]
        assert states == [JobState.DEAD, JobState.READY, JobState.DONE, JobState.READY, JobState.RUNNING]

    # settling

    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    def test_a_job_settles_its_key_with_its_own_end(self, store: Store, state: State) -> None:
        """The response is stored, the key is final, and kept for its whole retention from now on."""
        key = self.drive(store, State.PENDING)
        job_id = self.running(store, of=key)
        self.age(store, key.scope, key.key, RETENTION - 10)
        store.renew_jobs(WORKER, [job_id], LEASE)
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE, settle=state, response=RESPONSE)]) == [True]
        (row,) = store.read([(key.scope, key.key)])
        row = one(row)
        assert (row.state, row.response, row.owner, row.last_error) == (state, RESPONSE, key.owner, None)
        assert row.finished_at is not None
        assert row.expires_at == pytest.approx(row.finished_at + RETENTION)

    def test_a_dead_letter_makes_its_key_unknown(self, store: Store) -> None:
        """And it is on the reconciler's list at once (I4)."""
        key = self.drive(store, State.PENDING)
        self.dead(store, of=key)
        (row,) = store.read([(key.scope, key.key)])
        row = one(row)
        assert (row.state, row.last_error, row.response, row.finished_at) == (State.UNKNOWN, "poison", None, None)
        assert row.reconcile_at is not None
        assert row.reconcile_at <= row.now

    def test_only_the_keys_own_generation_is_settled(self, store: Store) -> None:
        """A key that is pending for another attempt's job stays as it is; the job itself is done."""
        key = self.drive(store, State.PENDING)
        before = stored(store)
        job_id = self.running(store, of=replace(key, owner="an earlier owner"))
        settled = Conclusion(job_id, WORKER, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)
        assert store.conclude([settled]) == [True]
        assert stored(store) == before
        assert one_job(store, job_id).state is JobState.DONE

    def test_a_key_that_is_not_pending_is_not_settled(self, store: Store) -> None:
        key = self.drive(store, State.IN_PROGRESS)
        before = stored(store)
        job_id = self.running(store, of=key)
        store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)])
        assert stored(store) == before

    def test_who_has_lost_the_job_settles_nothing(self, store: Store) -> None:
        """I3: the key follows the job's new owner."""
        key = self.drive(store, State.PENDING)
        job_id = self.running(store, of=key)
        self.age_job(store, job_id, LEASE + 1)
        claim(store, RIVAL)
        late = Conclusion(job_id, WORKER, JobEnd.DONE, settle=State.FAILED, response=TIMEOUT_RESPONSE)
        assert store.conclude([late]) == [False]
        assert one(stored(store)).state is State.PENDING
        good = Conclusion(job_id, RIVAL, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)
        assert store.conclude([good]) == [True]
        assert one(stored(store)).response == RESPONSE

    def test_a_job_that_settles_nothing_leaves_its_key(self, store: Store) -> None:
        key = self.drive(store, State.PENDING)
        job_id = self.added(store, of=key, settles=False)
        claim(store)
        store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)])
        assert one(stored(store)).state is State.PENDING

    # the provider's id, lists, health

    def test_the_providers_id_is_kept(self, store: Store) -> None:
        """Before the job is done, and a later attempt sees it."""
        job_id = self.running(store)
        assert store.note_provider(job_id, WORKER, "ch_123") is True
        self.age_job(store, job_id, LEASE + 1)
        (job,) = claim(store, RIVAL)
        assert job.provider_id == "ch_123"

    def test_jobs_are_listed_by_state(self, store: Store) -> None:
        """Oldest first, no more than asked; and one by its id."""
        self.dead(store, 1)
        done = self.running(store, 2)
        store.conclude([Conclusion(done, WORKER, JobEnd.DONE)])
        cancelled = self.dead(store, 3)
        store.redirect(cancelled, JobState.CANCELLED, Audit("ops", "no use"))
        running = self.running(store, 4)
        ready = [self.added(store, number, run_at=self.now() - ago) for number, ago in ((5, 10), (6, 20), (7, 5))]
        found = {state: [job.id for job in store.jobs(state, 10)] for state in JobState}
        assert found == {
            JobState.READY: [ready[1], ready[0], ready[2]],
            JobState.RUNNING: [running],
            JobState.DONE: [done],
            JobState.DEAD: ["job-0001"],
            JobState.CANCELLED: [cancelled],
        }
        assert [job.id for job in store.jobs(JobState.READY, 2)] == [ready[1], ready[0]]
        assert store.job("never") is None

    def test_health_counts_what_is_due_and_dead(self, store: Store) -> None:
        assert (store.outbox_health().ready, store.outbox_health().lag_seconds, store.outbox_health().dead) == (0, 0, 0)
        self.dead(store, 1)
        self.running(store, 2)
        self.added(store, 3, run_at=self.now() - 50)
        self.added(store, 4, run_at=self.now() + 50)
        health = store.outbox_health()
        assert (health.ready, health.dead) == (1, 1)
        assert health.lag_seconds == pytest.approx(50, abs=5)

    # operators

    def test_an_operator_takes_a_dead_letter_up_again(self, store: Store) -> None:
        """Attempts start over, the history stays, the key is pending again and lives to see it, and it is audited."""
        key = self.drive(store, State.PENDING)
        job_id = self.dead(store, of=key)
        self.age(store, key.scope, key.key, RETENTION + 100)
        job = store.redirect(job_id, JobState.READY, Audit("alice", "the provider is back"))
        assert job is not None
        assert (job.state, job.attempt, job.finished_at, len(history(job))) == (JobState.READY, 0, None, 1)
        (row,) = store.read([(key.scope, key.key)])
        row = one(row)
        assert (row.state, row.owner, row.reconcile_at, row.last_error) == (State.PENDING, key.owner, None, None)
        assert row.expires_at == pytest.approx(row.now + RETENTION, abs=5)
        (line,) = store.audit(key.scope, key.key, 10)
        assert (line.who, line.event, line.job_id, line.before, line.after, line.why) == (
            *("alice", "retry_job", job_id, "dead", "ready"),
            "the provider is back",
        )
        (again,) = claim(store, RIVAL)
        assert again.attempt == 1
        settled = Conclusion(job_id, RIVAL, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)
        assert store.conclude([settled]) == [True]
        assert one(stored(store)).state is State.COMPLETED

    def test_a_key_that_was_resolved_meanwhile_stays_so(self, store: Store) -> None:
        """The job may run again, but what an operator or the reconciler said of the key is not undone."""
        key = self.drive(store, State.PENDING)
        job_id = self.dead(store, of=key)
        unknown = one(store.read([(key.scope, key.key)])[0])
        assert store.swap([swap(unknown, Event.CONFIRM, Actor.RECONCILER, response=RESPONSE)])[0]
        before = stored(store)
        assert store.redirect(job_id, JobState.READY, Audit("alice", "again"))
        assert stored(store) == before

    def test_a_job_that_settles_nothing_reopens_nothing(self, store: Store) -> None:
        """A key that is unknown for reasons of its own is not a receipt's to reopen."""
        key = self.drive(store, State.UNKNOWN)
        before = stored(store)
        job_id = self.added(store, of=key, settles=False)
        claim(store)
        store.conclude([Conclusion(job_id, WORKER, JobEnd.DEAD, error="poison")])
        assert store.redirect(job_id, JobState.READY, Audit("alice", "again"))
        assert stored(store) == before

    def test_an_operator_puts_a_dead_letter_away(self, store: Store) -> None:
        """Its key stays unknown: that it did not happen is not said by this."""
        key = self.drive(store, State.PENDING)
        job_id = self.dead(store, of=key)
        job = store.redirect(job_id, JobState.CANCELLED, Audit("bob", "obsolete"))
        assert job is not None
        assert (job.state, job.attempt) == (JobState.CANCELLED, 1)
        assert one(stored(store)).state is State.UNKNOWN
        assert [line.event for line in store.audit(key.scope, key.key, 10)] == ["discard_job"]

    def test_only_dead_letters_are_moved_by_hand(self, store: Store) -> None:
        job_id = self.running(store)
        assert store.redirect(job_id, JobState.READY, Audit("bob", "impatient")) is None
        assert store.redirect("never", JobState.READY, Audit("bob", "typo")) is None
        assert one_job(store, job_id).state is JobState.RUNNING
        assert store.audit("tenant-1", "key-1", 10) == []
        with pytest.raises(IllegalTransition, match="ready or cancelled"):
            store.redirect(job_id, JobState.DONE, Audit("bob", "wishful"))

    # the reaper

    def test_jobs_that_are_over_are_purged(self, store: Store) -> None:
        """Done and cancelled ones, old enough, at most so many; never one that somebody must still look at."""
        self.dead(store, 1)
        over = [self.running(store, number) for number in (2, 3)]
        store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE) for job_id in over])
        over.append(self.dead(store, 4))
        store.redirect(over[2], JobState.CANCELLED, Audit("bob", "obsolete"))
        self.running(store, 5)
        self.added(store, 6)
        for job_id in ["job-0001", *over]:
            self.age_job(store, job_id, 100)
        fresh = self.running_of(store, 7)
        store.conclude([Conclusion(fresh, RIVAL, JobEnd.DONE)])
        assert store.purge_jobs(2, 50.0) == 2
        assert store.purge_jobs(10, 50.0) == 1
        left = {job.id for state in JobState for job in store.jobs(state, 10)}
        assert left == {"job-0001", "job-0005", "job-0006", fresh}

    def running_of(self, store: Store, number: int) -> str:
        """A job that RIVAL runs, whatever else is due."""
        job_id = self.added(store, number, task="mine")
        assert [job.id for job in store.claim(RIVAL, ["mine"], 1, LEASE)] == [job_id]
        return job_id

    def test_a_key_that_nobody_settled_in_time_fails(self, store: Store) -> None:
        """Key and job in one step: the response is the reaper's, and no worker will ever run the job."""
        key = self.drive(store, State.PENDING)
        job_id = self.added(store, of=key)
        assert store.time_out(10, TIMEOUT_RESPONSE) == []  # not past its expiry yet
        self.age(store, key.scope, key.key, RETENTION + 1)
        assert store.time_out(10, TIMEOUT_RESPONSE) == [(key.scope, key.key)]
        row = one(stored(store))
        assert (row.state, row.response, row.owner) == (State.FAILED, TIMEOUT_RESPONSE, key.owner)
        assert row.finished_at is not None
        assert row.expires_at == pytest.approx(row.finished_at + RETENTION)
        assert one_job(store, job_id).state is JobState.CANCELLED
        assert claim(store) == []
        assert store.time_out(10, TIMEOUT_RESPONSE) == []

    def test_a_key_whose_job_is_running_is_left_to_it(self, store: Store) -> None:
        """Hazard 11. Once that worker's lease is over nobody is running it, but it may have happened: unknown, on the
        reconciler's list, without a response; and the late end is refused."""
        key = self.drive(store, State.PENDING)
        job_id = self.running(store, of=key)
        self.age(store, key.scope, key.key, RETENTION + 1)
        store.renew_jobs(WORKER, [job_id], LEASE)
        assert store.time_out(10, TIMEOUT_RESPONSE) == []
        assert one(stored(store)).state is State.PENDING
        self.age_job(store, job_id, LEASE + 1)
        assert store.time_out(10, TIMEOUT_RESPONSE) == [(key.scope, key.key)]
        assert one_job(store, job_id).state is JobState.CANCELLED
        late = Conclusion(job_id, WORKER, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)
        assert store.conclude([late]) == [False]
        row = one(stored(store))
        assert (row.state, row.response, row.finished_at, row.owner) == (State.UNKNOWN, None, None, key.owner)
        assert row.last_error is not None
        assert "tried" in row.last_error
        assert [each.key for each in store.due(Duty.UNKNOWNS, 10)] == [key.key]

    @pytest.mark.parametrize("how", ["to be tried again", "cut off", "sent back by an operator"])
    def test_a_key_whose_job_was_tried_is_unknown(self, store: Store, how: str) -> None:
        """An attempt that failed may have had its effect all the same; also where an operator let it start over."""
        key = self.drive(store, State.PENDING)
        if how != "sent back by an operator":
            job_id = self.running(store, of=key)
            end = JobEnd.RELEASE if how == "cut off" else JobEnd.RETRY
            assert store.conclude([Conclusion(job_id, WORKER, end, retry_in=3600.0, error=how)]) == [True]
        else:
            job_id = self.dead(store, of=key)
            assert store.redirect(job_id, JobState.READY, Audit("bob", "once more")) is not None
            assert one_job(store, job_id).attempt == 0
        assert one(stored(store)).state is State.PENDING
        self.age(store, key.scope, key.key, RETENTION + 1)
        assert store.time_out(10, TIMEOUT_RESPONSE) == [(key.scope, key.key)]
        row = one(stored(store))
        assert (row.state, row.response, row.finished_at) == (State.UNKNOWN, None, None)
        assert one_job(store, job_id).state is JobState.CANCELLED
        assert store.time_out(10, TIMEOUT_RESPONSE) == []

    def test_a_key_whose_job_was_given_back_fails(self, store: Store) -> None:
        """A worker that did not begin has tried nothing."""
        key = self.drive(store, State.PENDING)
        job_id = self.running(store, of=key)
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.RELEASE)]) == [True]
        self.age(store, key.scope, key.key, RETENTION + 1)
        assert store.time_out(10, TIMEOUT_RESPONSE) == [(key.scope, key.key)]
        assert one(stored(store)).response == TIMEOUT_RESPONSE

    def test_a_pending_key_without_a_job_does_not_stay_stuck(self, store: Store) -> None:
        """I4. Other jobs of the key, that settle nothing, are not touched by a time-out."""
        key = self.drive(store, State.PENDING)
        other = self.added(store, 1, of=key, settles=False)
        self.age(store, key.scope, key.key, RETENTION + 1)
        assert store.time_out(10, TIMEOUT_RESPONSE) == [(key.scope, key.key)]
        assert one_job(store, other).state is JobState.READY

    def test_running_jobs_are_not_in_the_way_of_others(self, store: Store) -> None:
        """The oldest is left to its worker, and does not use up what was asked for."""
        live, free = (self.drive(store, State.PENDING, f"key-{number}") for number in (1, 2))
        job_id = self.running(store, 1, of=live)
        self.added(store, 2, of=free)
        self.age(store, live.scope, live.key, RETENTION + 100)
        if free.expires_at > self.now():  # where a clock was not moved for all
            self.age(store, free.scope, free.key, RETENTION + 1)
        store.renew_jobs(WORKER, [job_id], LEASE)
        assert store.time_out(1, TIMEOUT_RESPONSE) == [(free.scope, free.key)]

    def test_no_more_are_timed_out_than_asked(self, store: Store) -> None:
        keys = [self.drive(store, State.PENDING, f"key-{number}") for number in range(3)]
        for number, key in enumerate(keys):
            self.added(store, number, of=key)
            self.age(store, key.scope, key.key, RETENTION + 1)
        assert len(store.time_out(2, TIMEOUT_RESPONSE)) == 2
        assert len(store.time_out(2, TIMEOUT_RESPONSE)) == 1


def claim(store: Store, owner: str = WORKER, *, limit: int = 10) -> list[Job]:
    return store.claim(owner, [TASK], limit, LEASE)


def one_job(store: Store, job_id: str) -> Job:
    job = store.job(job_id)
    assert job is not None
    return job


def history(job: Job) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = orjson.loads(job.history)
    return entries
