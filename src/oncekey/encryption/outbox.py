"""The outbox of a sealed store: payloads, errors and the histories of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oncekey.core.audit import Audit
from oncekey.core.jobs import Conclusion, DeferredTo, Job, JobState, OutboxHealth
from oncekey.core.record import StoredResponse
from oncekey.encryption.envelope import Row
from oncekey.stores.sql.outbox_rows import shortened

if TYPE_CHECKING:
    from oncekey.encryption.values import Values


class SealedOutbox:
    """The verbs of a worker, of upkeep and of operators."""

    if TYPE_CHECKING:
        inner: Any
        values: Values

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        return self._jobs(self.inner.claim(owner, tasks, limit, lease_seconds))

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        kept: list[str] = self.inner.renew_jobs(owner, ids, lease_seconds)
        return kept

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        answers: list[bool] = self.inner.conclude(self._conclusions(batch))
        return answers

    def note_provider(self, job_id: str, owner: str, provider_id: str) -> bool:
        stored: bool = self.inner.note_provider(job_id, owner, provider_id)
        return stored

    def jobs(self, state: JobState, limit: int) -> list[Job]:
        return self._jobs(self.inner.jobs(state, limit))

    def jobs_of(self, scope: str, key: str, limit: int) -> list[Job]:
        return self._jobs(self.inner.jobs_of(scope, key, limit))

    def job(self, job_id: str) -> Job | None:
        return self._job(self.inner.job(job_id))

    def deferred_to(self, asked: DeferredTo) -> Job | None:
        return self._job(self.inner.deferred_to(asked))

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        return self._job(self.inner.redirect(job_id, to_state, self.values.sealed_audit(audit, self._row(job_id))))

    def outbox_health(self) -> OutboxHealth:
        found: OutboxHealth = self.inner.outbox_health()
        return found

    def purge_jobs(self, limit: int, keep_seconds: float) -> int:
        deleted: int = self.inner.purge_jobs(limit, keep_seconds)
        return deleted

    def time_out(self, limit: int, response: StoredResponse) -> list[tuple[str, str]]:
        """The response is a sentence of ours, the same for many keys: it stays readable."""
        ended: list[tuple[str, str]] = self.inner.time_out(limit, response)
        return ended

    # -- contents --------------------------------------------------------------------------------------------------

    def _jobs(self, jobs: Sequence[Job]) -> list[Job]:
        return [self.values.opened_job(job) for job in jobs]

    def _job(self, job: Job | None) -> Job | None:
        return None if job is None else self.values.opened_job(job)

    def _conclusions(self, batch: Sequence[Conclusion]) -> list[Conclusion]:
        return [each if each.error is None and each.response is None else self._conclusion(each) for each in batch]

    def _conclusion(self, ended: Conclusion) -> Conclusion:
        if ended.error is not None:
            ended = replace(ended, error=shortened(ended.error))  # the store cannot cut what is sealed
        return self.values.sealed_conclusion(ended, ended.of or self._row(ended.id))

    def _row(self, job_id: str) -> Row:
        """The key of a job. A job that is not there is not written either."""
        job = self.inner.job(job_id)
        return (job_id,) if job is None else (job.scope, job.key)


class SealedTurn(SealedOutbox):
    def turn(
        self, ended: Sequence[Conclusion], owner: str, tasks: Sequence[str], limit: int, lease_seconds: float
    ) -> tuple[list[bool], list[Job]]:
        answers, jobs = self.inner.turn(self._conclusions(ended), owner, tasks, limit, lease_seconds)
        return answers, self._jobs(jobs)
