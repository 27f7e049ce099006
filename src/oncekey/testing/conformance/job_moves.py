"""The part of the outbox suite about the table of a job's moves: every event in every state, against ``jobs.TABLE``.

The tests make a job in each state, with each combination of the conditions that the event asks for, and call the verb
of the event. A job moves if and only if the table has a row for it whose conditions hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from oncekey.core.audit import Audit
from oncekey.core.jobs import TABLE, Conclusion, JobCondition, JobEnd, JobEvent, JobState, redirection
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.stores.api import Outbox
from oncekey.testing.conformance.base import AGES, LEASE, RETENTION
from oncekey.testing.conformance.jobs_base import RIVAL, TIMEOUT_RESPONSE, WORKER, JobSuiteBase, one_job

Facts = frozenset[JobCondition]

KEEP_SECONDS = 50.0
_C = JobCondition
_POSSIBLE: dict[JobState, Facts] = {
    JobState.READY: frozenset({_C.DUE, _C.SETTLES, _C.KEY_PAST_EXPIRY}),
    JobState.RUNNING: frozenset({_C.OWNER_TOKEN, _C.LEASE_OVER, _C.SETTLES, _C.KEY_PAST_EXPIRY}),
    JobState.DONE: frozenset({_C.KEPT_LONG, _C.SETTLES, _C.KEY_PAST_EXPIRY}),
    JobState.DEAD: frozenset({_C.KEPT_LONG, _C.SETTLES, _C.KEY_PAST_EXPIRY}),
    JobState.CANCELLED: frozenset({_C.KEPT_LONG, _C.SETTLES, _C.KEY_PAST_EXPIRY}),
}
"""Which conditions a job in this state can meet or fail."""


def situations(event: JobEvent) -> Iterator[tuple[JobState, Facts]]:
    """Each state, with each combination of the conditions that a row of this event asks for."""
    asked = frozenset[JobCondition]().union(*(row.when for row in TABLE if row.event is event))
    for state in JobState:
        varied = sorted(asked & _POSSIBLE[state])
        for holds in product((True, False), repeat=len(varied)):
            yield state, frozenset(fact for fact, true in zip(varied, holds, strict=True) if true)


class JobMoveSuite(JobSuiteBase):
    """See the module's docstring."""

    @pytest.mark.parametrize("event", [event for event in JobEvent if event is not JobEvent.ENQUEUE])
    def test_job_moves_exactly_as_the_table_says(self, store: Outbox, event: JobEvent) -> None:
        for number, (state, facts) in enumerate(situations(event), start=1):
            rows = [row for row in TABLE if (row.source, row.event) == (state, event) and row.when <= facts]
            job_id = self._job(store, number, state, facts)
            moved = self._ask(store, event, number, RIVAL if _C.OWNER_TOKEN not in facts else WORKER)
            after = store.job(job_id)
            expected = rows[0].target if rows else state
            assert (after and after.state, moved) == (expected, bool(rows)), (state, event, sorted(facts))

    def _job(self, store: Outbox, number: int, state: JobState, facts: Facts) -> str:
        """A job in this state, which has a task and a pending key of its own."""
        key = self.drive(store, State.PENDING, f"key-{number}")
        run_at = self.now() if state is not JobState.READY or _C.DUE in facts else self.now() + AGES * 100
        job_id = self.added(store, number, of=key, settles=_C.SETTLES in facts, task=_task(number), run_at=run_at)
        if state is not JobState.READY:
            assert [job.id for job in store.claim(WORKER, [_task(number)], 10, LEASE)] == [job_id]
        self._end(store, job_id, state)
        self._age(store, key, job_id, state, facts)
        assert one_job(store, job_id).state is state
        return job_id

    def _end(self, store: Outbox, job_id: str, state: JobState) -> None:
        if state is JobState.DONE:
            assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DONE)]) == [True]
        if state in (JobState.DEAD, JobState.CANCELLED):
            assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DEAD, error="poison")]) == [True]
        if state is JobState.CANCELLED:
            assert store.redirect(job_id, JobState.CANCELLED, Audit("bob", "obsolete")) is not None

    def _age(self, store: Outbox, key: Record, job_id: str, state: JobState, facts: Facts) -> None:
        if _C.KEY_PAST_EXPIRY in facts:
            self.age(store, key.scope, key.key, RETENTION + 1)
        if state is JobState.RUNNING:
            assert store.renew_jobs(WORKER, [job_id], LEASE) == [job_id]  # time may have passed for all rows
        if _C.LEASE_OVER in facts:
            self.age_job(store, job_id, LEASE + 1)
        if _C.KEPT_LONG in facts:
            self.age_job(store, job_id, KEEP_SECONDS + 1)

    def _ask(self, store: Outbox, event: JobEvent, number: int, owner: str) -> bool:
        """Call the verb of this event. Whether the store says that this job moved."""
        job_id = f"job-{number:04d}"
        match event:
            case JobEvent.CLAIM:
                return [job.id for job in store.claim(owner, [_task(number)], 10, LEASE)] == [job_id]
            case JobEvent.RENEW:
                return store.renew_jobs(owner, [job_id], LEASE) == [job_id]
            case JobEvent.RECORD:
                return store.note_provider(job_id, owner, "ch_1")
            case JobEvent.RETRY_JOB | JobEvent.DISCARD_JOB:
                (to_state,) = (row.target for row in TABLE if row.event is event and row.target is not None)
                assert redirection(to_state) is event
                return store.redirect(job_id, to_state, Audit("alice", "again")) is not None
            case JobEvent.TIME_OUT | JobEvent.PURGE:
                before = store.job(job_id)
                if event is JobEvent.PURGE:
                    store.purge_jobs(1000, KEEP_SECONDS)
                else:
                    store.time_out(1000, TIMEOUT_RESPONSE)
                after = store.job(job_id)
                return (before and before.state) is not (after and after.state)
            case _:
                return store.conclude([Conclusion(job_id, owner, JobEnd(event), error="no")]) == [True]


def _task(number: int) -> str:
    return f"task-{number}"
