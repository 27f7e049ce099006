"""The part of the outbox suite about turns: claims are fair by scope, and a worker's turn is one commit.

A store that claims by age alone fails the first tests here: one tenant's thousands of jobs delay every other tenant's.
``stores/duties.py`` has :class:`~oncekey.stores.duties.JobTurns`, which counts the turns for any store. It needs an
index over (scope, run_at) of ready jobs. :class:`~oncekey.stores.api.SharedTurn` is optional.
"""

from __future__ import annotations

from collections import Counter

import pytest

from oncekey.core.jobs import Conclusion, JobEnd, JobState
from oncekey.core.states import State
from oncekey.stores.api import Outbox, SharedTurn
from oncekey.stores.duties import VISITED
from oncekey.testing.conformance.base import LEASE, RESPONSE, one, stored
from oncekey.testing.conformance.jobs_base import RIVAL, TASK, WORKER, JobSuiteBase, claim, one_job


class JobTurnSuite(JobSuiteBase):
    """See the module's docstring."""

    _made = 0

    def _flood(self, store: Outbox, scope: str, number: int, *, ago: float = 1000.0, task: str = TASK) -> list[str]:
        """Add jobs of one scope, one second apart. Return their ids, the oldest first."""
        self._made += number
        began = self.now() - ago
        return [
            self.added(store, self._made - number + at + 1, scope=scope, run_at=began + at, task=task)
            for at in range(number)
        ]

    def _claimed(self, store: Outbox, limit: int) -> Counter[str]:
        """How many jobs of each scope one claim takes."""
        return Counter(job.scope for job in claim(store, limit=limit))

    # fair by scope

    def test_jobs_of_one_scope_do_not_delay_anothers(self, store: Outbox) -> None:
        """The only job of another scope is the newest of all. The second claim takes it, beside the oldest."""
        flood = self._flood(store, "tenant-1", 30)
        (single,) = self._flood(store, "tenant-2", 1, ago=10.0)
        assert [job.id for job in claim(store, limit=6)] == flood[:6]
        assert [job.id for job in claim(store, limit=6)] == [*flood[6:11], single]

    def test_claims_of_one_job_alternate_between_a_turn_and_the_oldest(self, store: Outbox) -> None:
        flood = self._flood(store, "tenant-1", 10)
        singles = [self._flood(store, scope, 1, ago=10.0)[0] for scope in ("tenant-2", "tenant-3")]
        taken = [claim(store, limit=1)[0].id for _ in range(7)]
        assert set(singles) < set(taken)
        assert taken[0] == flood[0]
        assert [job_id for job_id in taken if job_id in flood] == flood[:5]

    def test_scopes_share_one_half_of_a_claim(self, store: Outbox) -> None:
        """All scopes get an equal part of one half. The other half goes to the jobs that have waited longest."""
        self._flood(store, "tenant-1", 60)
        self._flood(store, "tenant-2", 9, ago=10.0)
        assert self._claimed(store, 8) == {"tenant-1": 8}
        assert self._claimed(store, 8) == {"tenant-1": 6, "tenant-2": 2}

    def test_every_scope_has_its_turn_however_many_there_are(self, store: Outbox) -> None:
        """There are more scopes than one claim takes. The next claim goes on where the last one ended."""
        self._flood(store, "a-flood", 100)
        scopes = {f"tenant-{number:02}" for number in range(20)}
        for scope in scopes:
            self._flood(store, scope, 1, ago=10.0)
        claims = [self._claimed(store, 10) for _ in range(6)]
        assert [sum(each.values()) for each in claims] == [10] * 6
        assert scopes < {scope for each in claims for scope in each}

    def test_scopes_with_nothing_due_are_passed_over(self, store: Outbox) -> None:
        """There are more such scopes than one claim reads. The next claim goes on after them."""
        self._flood(store, "a-flood", 40)
        for number in range(VISITED + 10):
            self._flood(store, f"later-{number:03}", 1, ago=-1000.0)
        self._flood(store, "tenant-2", 1, ago=10.0)
        claims = [self._claimed(store, 4) for _ in range(4)]
        assert "tenant-2" in {scope for each in claims for scope in each}
        assert sum(sum(each.values()) for each in claims) == 16

    def test_turns_take_only_tasks_that_are_asked_for(self, store: Outbox) -> None:
        """A scope whose due jobs are of another task has a turn without a job. The oldest take its place."""
        self._flood(store, "tenant-1", 30)
        self._flood(store, "tenant-2", 5, task="other")
        assert [self._claimed(store, 6) for _ in range(3)] == [{"tenant-1": 6}] * 3

    def test_lost_jobs_come_before_turns(self, store: Outbox) -> None:
        """Lost jobs fill the claim, so no scope has a turn in it, and the limit holds."""
        lost = self._flood(store, "tenant-1", 6)
        assert len(claim(store, limit=6)) == 6
        for job_id in lost:
            self.age_job(store, job_id, LEASE + 1)
        self._flood(store, "tenant-1", 10)
        self._flood(store, "tenant-2", 1)
        assert [job.id for job in claim(store, RIVAL, limit=6)] == lost

    # one commit

    def _turn(self, store: Outbox, ended: list[Conclusion], limit: int = 10) -> tuple[list[bool], list[str]]:
        if not isinstance(store, SharedTurn):
            pytest.skip("this store ends and claims in two commits")
        answers, jobs = store.turn(ended, RIVAL, [TASK], limit, LEASE)
        return answers, [job.id for job in jobs]

    def test_turn_ends_jobs_settles_keys_and_claims_the_next(self, store: Outbox) -> None:
        """It answers as ``conclude`` and then ``claim`` would. An owner that lost its job ends nothing."""
        key = self.drive(store, State.PENDING)
        settling, plain = self.running(store, 1, of=key), self.running(store, 2)
        new = self.added(store, 3)
        ended = [
            Conclusion(plain, "another-owner", JobEnd.DONE),
            Conclusion(settling, WORKER, JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE),
        ]
        assert self._turn(store, ended) == ([False, True], [new])
        assert [one_job(store, job_id).state for job_id in (settling, plain, new)] == [
            JobState.DONE, JobState.RUNNING, JobState.RUNNING
        ]  # fmt: skip
        assert one(stored(store)).response == RESPONSE
        assert (one_job(store, new).owner, one_job(store, new).attempt) == (RIVAL, 1)

    def test_turn_takes_no_job_that_it_ends(self, store: Outbox) -> None:
        """Not one whose lease is over, and not one that is ready again by its end."""
        late, released, failed = (self.running(store, number) for number in (1, 2, 3))
        for job_id in (late, released):
            self.age_job(store, job_id, LEASE + 1)
        ended = [
            Conclusion(late, WORKER, JobEnd.DONE),
            Conclusion(released, WORKER, JobEnd.RELEASE),
            Conclusion(failed, WORKER, JobEnd.RETRY, error="not yet"),
        ]
        assert self._turn(store, ended) == ([True, True, True], [])
        assert one_job(store, late).state is JobState.DONE
        assert sorted(job.id for job in claim(store, RIVAL)) == [released, failed]

    def test_turn_is_committed_whole_or_not_at_all(self, store: Outbox) -> None:
        first, second, new = self.running(store, 1), self.running(store, 2), self.added(store, 3)
        unfit = Conclusion(second, WORKER, JobEnd.DEAD, error=b"not text")  # type: ignore[arg-type]  # no store takes it
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the driver says
            self._turn(store, [Conclusion(first, WORKER, JobEnd.DONE), unfit])
        states = [one_job(store, job_id).state for job_id in (first, second, new)]
        assert states == [JobState.RUNNING, JobState.RUNNING, JobState.READY]
