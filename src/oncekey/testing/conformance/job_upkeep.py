"""The part of the outbox suite about operators with dead letters, and about the reaper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.core.audit import Audit
from oncekey.core.jobs import Conclusion, DeferredTo, JobEnd, JobState
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import IllegalTransition
from oncekey.stores.api import Duty, Outbox
from oncekey.testing.conformance.base import LEASE, RESPONSE, RETENTION, one, stored
from oncekey.testing.conformance.jobs_base import RIVAL, TIMEOUT_RESPONSE, WORKER, JobSuiteBase, claim, history, one_job


class JobUpkeepSuite(JobSuiteBase):
    """See the module's docstring."""

    # operators

    def test_an_operator_takes_a_dead_letter_up_again(self, store: Outbox) -> None:
        """Attempts start over, the history stays, the key is pending with a new expiry, and the audit has a line."""
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

    def test_a_key_that_was_resolved_meanwhile_stays_so(self, store: Outbox) -> None:
        """The job may run again, but the verdict of an operator or the reconciler about the key stays."""
        key = self.drive(store, State.PENDING)
        job_id = self.dead(store, of=key)
        unknown = one(store.read([(key.scope, key.key)])[0])
        assert store.swap([swap(unknown, Event.CONFIRM, Actor.RECONCILER, response=RESPONSE)])[0]
        before = stored(store)
        assert store.redirect(job_id, JobState.READY, Audit("alice", "again"))
        assert stored(store) == before

    def test_a_job_that_settles_nothing_reopens_nothing(self, store: Outbox) -> None:
        """A job that does not settle its key does not change a key that is unknown for another reason."""
        key = self.drive(store, State.UNKNOWN)
        before = stored(store)
        job_id = self.added(store, of=key, settles=False)
        claim(store)
        store.conclude([Conclusion(job_id, WORKER, JobEnd.DEAD, error="poison")])
        assert store.redirect(job_id, JobState.READY, Audit("alice", "again"))
        assert stored(store) == before

    def test_an_operator_puts_a_dead_letter_away(self, store: Outbox) -> None:
        """Its key stays unknown, because a discarded job does not prove that nothing happened."""
        key = self.drive(store, State.PENDING)
        job_id = self.dead(store, of=key)
        job = store.redirect(job_id, JobState.CANCELLED, Audit("bob", "obsolete"))
        assert job is not None
        assert (job.state, job.attempt) == (JobState.CANCELLED, 1)
        assert one(stored(store)).state is State.UNKNOWN
        assert [line.event for line in store.audit(key.scope, key.key, 10)] == ["discard_job"]

    def test_only_dead_letters_are_moved_by_hand(self, store: Outbox) -> None:
        job_id = self.running(store)
        assert store.redirect(job_id, JobState.READY, Audit("bob", "impatient")) is None
        assert store.redirect("never", JobState.READY, Audit("bob", "typo")) is None
        assert one_job(store, job_id).state is JobState.RUNNING
        assert store.audit("tenant-1", "key-1", 10) == []
        with pytest.raises(IllegalTransition, match="ready or cancelled"):
            store.redirect(job_id, JobState.DONE, Audit("bob", "wishful"))

    # the reaper

    def test_jobs_that_are_over_are_purged(self, store: Outbox) -> None:
        """Done and cancelled jobs that are old enough are purged, up to the limit. Dead letters are never purged."""
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

    def test_job_that_an_unknown_key_was_deferred_to_is_found_and_kept(self, store: Outbox) -> None:
        """It proves that the request is done. After the key is settled, the job is purged like any other."""
        record = self.drive(store, State.PENDING)
        asked = DeferredTo(record.scope, record.key, record.owner)
        self.added(store, 8, key=record.key, key_owner=record.owner, task="other")
        assert store.deferred_to(asked) is None
        job_id = self.dead(store, 1, of=record)
        found = store.deferred_to(asked)
        assert found is not None
        assert (found.id, found.state) == (job_id, JobState.DEAD)
        assert store.deferred_to(replace(asked, owner="another owner")) is None
        store.redirect(job_id, JobState.CANCELLED, Audit("bob", "obsolete"))
        self.age_job(store, job_id, 100)
        assert store.purge_jobs(10, 50.0) == 0
        unknown = one(store.read([(record.scope, record.key)])[0])
        assert store.swap([swap(unknown, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE)]) != [None]
        assert store.purge_jobs(10, 50.0) == 1

    def running_of(self, store: Outbox, number: int) -> str:
        """A job that RIVAL runs, of a task of its own, so that other due jobs are not claimed."""
        job_id = self.added(store, number, task="mine")
        assert [job.id for job in store.claim(RIVAL, ["mine"], 1, LEASE)] == [job_id]
        return job_id

    def test_key_that_is_not_settled_in_time_fails(self, store: Outbox) -> None:
        """The key gets the reaper's response and the job is cancelled, in one step. No worker runs the job later."""
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

    def test_a_key_whose_job_is_running_is_left_to_it(self, store: Outbox) -> None:
        """Hazard 11. When the lease of that worker is over, the job may have had its effect. The key becomes unknown
        without a response, the reconciler gets it, and the late end of the worker is refused."""
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
    def test_a_key_whose_job_was_tried_is_unknown(self, store: Outbox, how: str) -> None:
        """An attempt that failed may still have had its effect, also after an operator sent the job back."""
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

    def test_a_key_whose_job_was_given_back_fails(self, store: Outbox) -> None:
        """A worker that released the job without an error had not started its task."""
        key = self.drive(store, State.PENDING)
        job_id = self.running(store, of=key)
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.RELEASE)]) == [True]
        self.age(store, key.scope, key.key, RETENTION + 1)
        assert store.time_out(10, TIMEOUT_RESPONSE) == [(key.scope, key.key)]
        assert one(stored(store)).response == TIMEOUT_RESPONSE

    def test_a_pending_key_without_a_job_does_not_stay_stuck(self, store: Outbox) -> None:
        """I4. A time-out does not change other jobs of the key, which do not settle it."""
        key = self.drive(store, State.PENDING)
        other = self.added(store, 1, of=key, settles=False)
        self.age(store, key.scope, key.key, RETENTION + 1)
        assert store.time_out(10, TIMEOUT_RESPONSE) == [(key.scope, key.key)]
        assert one_job(store, other).state is JobState.READY

    def test_running_jobs_are_not_in_the_way_of_others(self, store: Outbox) -> None:
        """The oldest job is left to its worker, and does not count towards the limit."""
        live, free = (self.drive(store, State.PENDING, f"key-{number}") for number in (1, 2))
        job_id = self.running(store, 1, of=live)
        self.added(store, 2, of=free)
        self.age(store, live.scope, live.key, RETENTION + 100)
        if free.expires_at > self.now():  # if ``age`` moved only the other row
            self.age(store, free.scope, free.key, RETENTION + 1)
        store.renew_jobs(WORKER, [job_id], LEASE)
        assert store.time_out(1, TIMEOUT_RESPONSE) == [(free.scope, free.key)]

    def test_no_more_are_timed_out_than_asked(self, store: Outbox) -> None:
        keys = [self.drive(store, State.PENDING, f"key-{number}") for number in range(3)]
        for number, key in enumerate(keys):
            self.added(store, number, of=key)
            self.age(store, key.scope, key.key, RETENTION + 1)
        assert len(store.time_out(2, TIMEOUT_RESPONSE)) == 2
        assert len(store.time_out(2, TIMEOUT_RESPONSE)) == 1
