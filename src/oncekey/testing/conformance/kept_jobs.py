"""The part of the outbox suite about the values of a job that encryption covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from oncekey.core.jobs import Conclusion, JobEnd
from oncekey.core.states import State
from oncekey.stores.api import KeptValues, Outbox
from oncekey.stores.kept_api import KeptJob, Rewrite
from oncekey.testing.conformance.jobs_base import WORKER, JobSuiteBase, history, one_job


class KeptJobSuite(JobSuiteBase):
    needs: ClassVar[type] = KeptValues

    def test_walk_hands_out_every_job_once(self, store: Outbox) -> None:
        """In any state, and for any size of page."""
        self.dead(store, 1)
        for number in range(2, 7):
            self.added(store, number)
        for limit in (1, 2, 3, 100):
            assert sorted(job.id for job in _walk(store, limit)) == [f"job-{number:04d}" for number in range(1, 7)]

    def test_values_of_a_job_are_replaced_and_nothing_else(self, store: Outbox) -> None:
        """A worker that runs the job ends it as if nothing had happened."""
        record = self.drive(store, State.PENDING)
        job_id = self.running(store, of=record)
        retry = Conclusion(job_id, WORKER, JobEnd.RETRY, error="timeout", retry_in=0.0)
        assert store.conclude([retry]) == [True]
        assert [job.id for job in store.claim(WORKER, [one_job(store, job_id).task], 1, 60.0)] == [job_id]
        before = one_job(store, job_id)
        (old,) = _walk(store)
        assert old == KeptJob(job_id, record.scope, record.key, before.payload, "timeout", before.history)
        new = replace(
            old, payload=b"oncekey-sealed:abc", last_error="other", history=old.history.replace(b"time", b"TIME")
        )
        assert _rewrite(store, old, new) is True
        values: dict[str, Any] = {"payload": new.payload, "last_error": new.last_error, "history": new.history}
        assert replace(one_job(store, job_id), now=0.0) == replace(before, **values, now=0.0)
        assert store.conclude([Conclusion(job_id, WORKER, JobEnd.DEAD, error="poison")]) == [True]
        assert [entry["error"] for entry in history(one_job(store, job_id))] == ["TIMEout", "poison"]

    def test_job_that_is_not_as_it_was_is_not_replaced(self, store: Outbox) -> None:
        """Payload, error and history are compared, each by itself."""
        job_id = self.dead(store)
        (old,) = _walk(store)
        before = replace(one_job(store, job_id), now=0.0)
        others: tuple[dict[str, Any], ...] = (
            {"payload": b"{}"},
            {"last_error": None},
            {"last_error": "other"},
            {"history": b"[]"},
            {"id": "job-0002"},
        )
        for other in others:
            wrong = replace(old, **other)
            assert _rewrite(store, wrong, replace(wrong, payload=b"new")) is False, other
            assert replace(one_job(store, job_id), now=0.0) == before, other


def _walk(store: Outbox, limit: int = 5) -> Iterator[KeptJob]:
    assert isinstance(store, KeptValues)
    after = ""
    while True:
        page = store.kept(after, limit)
        yield from (row for row in page.rows if isinstance(row, KeptJob))
        if not (after := page.next):
            return


def _rewrite(store: Outbox, old: KeptJob, new: KeptJob) -> bool:
    assert isinstance(store, KeptValues)
    (done,) = store.rewrite([Rewrite(old, new)])
    return done
