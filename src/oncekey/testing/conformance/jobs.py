"""The part of the outbox suite about a worker: claims, leases, ends, and the key that a job settles."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from oncekey.core.audit import Audit
from oncekey.core.jobs import Conclusion, JobEnd, JobState
from oncekey.core.states import State
from oncekey.stores.api import Outbox
from oncekey.testing.company import in_threads
from oncekey.testing.conformance.base import LEASE, RESPONSE, RETENTION, one, stored
from oncekey.testing.conformance.jobs_base import (
    RIVAL,
    TASK,
    TIMEOUT_RESPONSE,
    WORKER,
    JobSuiteBase,
    claim,
    history,
    one_job,
)

_THREADS = 8
_RACED = 200


class JobSuite(JobSuiteBase):
    """See the module's docstring."""

    # claims

    def test_a_job_is_claimed_as_it_was_added(self, store: Outbox) -> None:
        """Every field is kept. The job runs under the claim's owner, with attempt 1 and a lease from now."""
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

    def test_claimed_job_is_not_claimed_again(self, store: Outbox) -> None:
        self.running(store)
        assert claim(store, RIVAL) == []

    def test_a_claim_takes_the_oldest_and_no_more_than_asked(self, store: Outbox) -> None:
        """It takes three of five jobs, in the order in which they were due."""
        for number, ago in enumerate((10, 50, 30, 40, 20), start=1):
            self.added(store, number, run_at=self.now() - ago)
        assert [job.id for job in claim(store, limit=3)] == ["job-0002", "job-0004", "job-0003"]
        assert [job.id for job in claim(store, RIVAL)] == ["job-0005", "job-0001"]

    def test_only_tasks_that_are_asked_for_are_claimed(self, store: Outbox) -> None:
        self.added(store, 1, task="other")
        job_id = self.added(store, 2)
        assert [job.id for job in store.claim(WORKER, [TASK, "third"], 10, LEASE)] == [job_id]

    def test_a_job_waits_for_its_time(self, store: Outbox) -> None:
        job_id = self.added(store, run_at=self.now() + 100)
        assert claim(store) == []
        self.age_job(store, job_id, 101)
        assert [job.id for job in claim(store)] == [job_id]

    def test_of_many_threads_one_has_a_job(self, store: Outbox) -> None:
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

    def test_a_job_whose_lease_is_over_is_claimed_again(self, store: Outbox) -> None:
        """The new owner has attempt 2. The lost attempt is in the history, and its owner cannot write."""
        job_id = self.running(store)
        self.age_job(store, job_id, LEASE + 1)
        (job,) = claim(store, RIVAL)
        assert (job.id, job.attempt, job.owner, job.last_error) == (job_id, 2, RIVAL, "the worker's lease ran out")
        assert [(line["attempt"], line["error"]) for line in history(job)] == [(1, "the worker's lease ran out")]
        assert store.renew_jobs(WORKER, [job_id], LEASE) == []
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE)]) == [False]
        assert store.note_provider(job_id, WORKER, "ch_1") is False
        assert replace(one_job(store, job_id), now=job.now) == job

    def test_lost_jobs_come_before_new_ones(self, store: Outbox) -> None:
        """A lost job is claimed first, also if a new job is due."""
        lost = self.running(store, 1)
        self.age_job(store, lost, LEASE + 1)
        new = self.added(store, 2)
        assert [job.id for job in claim(store, RIVAL, limit=1)] == [lost]
        assert [job.id for job in claim(store, RIVAL, limit=1)] == [new]

    def test_lost_and_new_jobs_share_one_limit(self, store: Outbox) -> None:
        lost = [self.running(store, number) for number in (1, 2)]
        for job_id in lost:
            self.age_job(store, job_id, LEASE + 1)
        for number in (3, 4, 5):
            self.added(store, number)
        assert {job.id for job in claim(store, RIVAL, limit=3)} > set(lost)
        assert len(claim(store, RIVAL)) == 2

    def test_a_renewed_lease_holds_from_now(self, store: Outbox) -> None:
        """Of three ids, one job is done and one does not exist: only the running job's lease is renewed."""
        mine, done = self.running(store, 1), self.running(store, 2)
        store.conclude([Conclusion(done, WORKER, JobEnd.DONE)])
        self.age_job(store, mine, LEASE - 1)
        assert store.renew_jobs(WORKER, [mine, done, "never"], LEASE) == [mine]
        self.age_job(store, mine, LEASE - 1)
        assert claim(store, RIVAL) == []
        self.age_job(store, mine, 2)
        assert [job.id for job in claim(store, RIVAL)] == [mine]

    # ends

    def test_done_is_done_once(self, store: Outbox) -> None:
        job_id = self.running(store)
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE)]) == [True]
        job = one_job(store, job_id)
        assert (job.state, job.lease_until, job.last_error, job.attempt) == (JobState.DONE, None, None, 1)
        assert job.finished_at is not None
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DEAD, error="late")]) == [False]
        assert claim(store, RIVAL) == []
        assert one_job(store, job_id).state is JobState.DONE

    def test_a_failed_attempt_is_tried_again_later(self, store: Outbox) -> None:
        """It is not claimed before its time. The error stays in the history, also after a later success."""
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
    def test_a_released_job_has_its_attempt_back(self, store: Outbox, error: str | None) -> None:
        """It is ready at once, and the attempt does not count. The history has a line if the task had begun."""
        job_id = self.running(store)
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.RELEASE, error=error)]) == [True]
        job = one_job(store, job_id)
        assert (job.state, job.attempt, job.last_error) == (JobState.READY, 0, None)
        assert [line["error"] for line in history(job)] == ([error] if error else [])
        (again,) = claim(store, RIVAL)
        assert again.attempt == 1

    def test_a_dead_letter_stays_with_its_error(self, store: Outbox) -> None:
        job_id = self.dead(store)
        job = one_job(store, job_id)
        assert (job.state, job.last_error, len(history(job))) == (JobState.DEAD, "poison", 1)
        assert job.finished_at is not None
        assert claim(store, RIVAL) == []

    def test_a_history_is_cut_and_so_are_errors(self, store: Outbox) -> None:
        """It keeps the last 20 attempts, at most 500 characters of each error, and only text that every store takes."""
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

    def test_a_batch_ends_each_as_it_says(self, store: Outbox) -> None:
        """One batch has four kinds of end, and one end by a wrong owner. The answers are in the order of the batch."""
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
    def test_a_job_settles_its_key_with_its_own_end(self, store: Outbox, state: State) -> None:
        """The response is stored, and the key is final. Its whole retention counts from now on."""
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

    def test_a_dead_letter_makes_its_key_unknown(self, store: Outbox) -> None:
        """The key is due for the reconciler at once (I4)."""
        key = self.drive(store, State.PENDING)
        self.dead(store, of=key)
        (row,) = store.read([(key.scope, key.key)])
        row = one(row)
        assert (row.state, row.last_error, row.response, row.finished_at) == (State.UNKNOWN, "poison", None, None)
        assert row.reconcile_at is not None
        assert row.reconcile_at <= row.now

    def test_only_the_keys_own_generation_is_settled(self, store: Outbox) -> None:
        """A key that is pending for the job of another attempt does not change. The job itself is done."""
        key = self.drive(store, State.PENDING)
        before = stored(store)
        job_id = self.running(store, of=replace(key, owner="an earlier owner"))
        settled = Conclusion(job_id, WORKER, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)
        assert store.conclude([settled]) == [True]
        assert stored(store) == before
        assert one_job(store, job_id).state is JobState.DONE

    def test_a_key_that_is_not_pending_is_not_settled(self, store: Outbox) -> None:
        key = self.drive(store, State.IN_PROGRESS)
        before = stored(store)
        job_id = self.running(store, of=key)
        store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)])
        assert stored(store) == before

    def test_worker_that_lost_its_job_settles_nothing(self, store: Outbox) -> None:
        """I3: only the job's new owner settles the key."""
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

    def test_a_job_that_settles_nothing_leaves_its_key(self, store: Outbox) -> None:
        key = self.drive(store, State.PENDING)
        job_id = self.added(store, of=key, settles=False)
        claim(store)
        store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)])
        assert one(stored(store)).state is State.PENDING

    # the provider's id, lists, health

    def test_the_providers_id_is_kept(self, store: Outbox) -> None:
        """It is stored before the job is done, and a later attempt sees it."""
        job_id = self.running(store)
        assert store.note_provider(job_id, WORKER, "ch_123") is True
        self.age_job(store, job_id, LEASE + 1)
        (job,) = claim(store, RIVAL)
        assert job.provider_id == "ch_123"

    def test_jobs_are_listed_by_state(self, store: Outbox) -> None:
        """The oldest comes first, up to the limit. One job can be read by its id."""
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

    def test_health_counts_due_and_dead_jobs(self, store: Outbox) -> None:
        assert (store.outbox_health().ready, store.outbox_health().lag_seconds, store.outbox_health().dead) == (0, 0, 0)
        self.dead(store, 1)
        self.running(store, 2)
        self.added(store, 3, run_at=self.now() - 50)
        self.added(store, 4, run_at=self.now() + 50)
        health = store.outbox_health()
        assert (health.ready, health.dead) == (1, 1)
        assert health.lag_seconds == pytest.approx(50, abs=5)
