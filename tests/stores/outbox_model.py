"""The outbox in a dictionary: what the verbs mean, for the stores that have one to be compared with.

Beside the keys of ``MemoryStore``, which settle with their jobs. A product store has none: an app cannot commit a job
with a business write in a dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oncekey.core.audit import Audit, AuditLine
from oncekey.core.jobs import Conclusion, DeferredTo, Job, JobEnd, JobState, NewJob, OutboxHealth, redirection
from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import FOUND, Duty
from oncekey.stores.memory.store import At, MemoryStore
from oncekey.stores.sql import outbox_rows


class OutboxModel(MemoryStore):
    def __init__(self, clock: object) -> None:
        super().__init__(clock)  # type: ignore[arg-type]
        self.by_id: dict[str, Job] = {}

    def add(self, job: NewJob) -> None:
        now = self._clock()
        assert job.run_at is not None
        self.by_id[job.id] = Job(
            job.id, job.scope, job.key, job.key_owner, job.operation, job.task, job.payload, job.downstream_key,
            job.settles, JobState.READY, 0, None, None, job.run_at, None, None, b"[]", now, None, now,
        )  # fmt: skip

    def _put(self, job: Job) -> Job:
        self.by_id[job.id] = replace(job, now=self._clock())
        return self.by_id[job.id]

    def _remember(self, job: Job, error: str) -> bytes:
        return outbox_rows.remembering(job.history.decode(), job.attempt, self._clock(), error).encode()

    def _in(self, state: JobState) -> list[Job]:
        return [job for job in self.by_id.values() if job.state is state]

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        now, taken = self._clock(), []
        lapsed = [job for job in self._in(JobState.RUNNING) if (job.lease_until or 0) <= now and job.task in tasks]
        due = [job for job in self._in(JobState.READY) if job.run_at <= now and job.task in tasks]
        for job in (lapsed + due)[:limit]:
            if job.state is JobState.RUNNING:
                error = outbox_rows.LEASE_RAN_OUT
                job = replace(job, last_error=error, history=self._remember(job, error))  # noqa: PLW2901
            until = now + lease_seconds
            job = replace(job, state=JobState.RUNNING, owner=owner, attempt=job.attempt + 1, lease_until=until)  # noqa: PLW2901
            taken.append(self._put(job))
        return taken

    def _mine(self, job_id: str, owner: str) -> Job | None:
        job = self.by_id.get(job_id)
        return job if job is not None and job.state is JobState.RUNNING and job.owner == owner else None

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        mine = [job for each in ids if (job := self._mine(each, owner))]
        return [self._put(replace(job, lease_until=self._clock() + lease_seconds)).id for job in mine]

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        return [self._conclude(each) for each in batch]

    def _conclude(self, ended: Conclusion) -> bool:
        job = self._mine(ended.id, ended.owner)
        if job is None:
            return False
        error, released = outbox_rows.kept_error(ended), ended.end is JobEnd.RELEASE
        after = ended.end.target
        self._put(
            replace(
                job,
                state=after,
                attempt=job.attempt - released,
                lease_until=None,
                run_at=self._clock() + ended.retry_in if ended.end is JobEnd.RETRY else job.run_at,
                last_error=job.last_error if released else error,
                history=job.history if error is None else self._remember(job, error),
                finished_at=None if after is JobState.READY else self._clock(),
            )
        )
        if job.settles and ended.settle is not None:
            self._settle((job.scope, job.key), job.key_owner, ended.settle, error, ended.response)
        return True

    def _settle(self, at: At, owner: str, to_state: State, error: str | None, response: StoredResponse | None) -> None:
        (row,) = self.read([at])
        if row is not None and (row.state, row.owner) == (State.PENDING, owner):
            words = error if to_state is State.UNKNOWN else None
            self.swap([swap(row, Event.SETTLE, Actor.WORKER, to_state=to_state, response=response, last_error=words)])

    def note_provider(self, job_id: str, owner: str, provider_id: str) -> bool:
        job = self._mine(job_id, owner)
        return job is not None and bool(self._put(replace(job, provider_id=provider_id)))

    def jobs(self, state: JobState, limit: int) -> list[Job]:
        return self._in(state)[:limit]

    def jobs_of(self, scope: str, key: str, limit: int) -> list[Job]:
        return [job for job in self.by_id.values() if (job.scope, job.key) == (scope, key)][:limit]

    def job(self, job_id: str) -> Job | None:
        return self.by_id.get(job_id)

    def deferred_to(self, asked: DeferredTo) -> Job | None:
        mine = self.jobs_of(asked.scope, asked.key, 10**6)
        return next((job for job in mine if job.settles and job.key_owner == asked.owner), None)

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        job, now = self.by_id.get(job_id), self._clock()
        if job is None or job.state is not JobState.DEAD:
            return None
        ready = to_state is JobState.READY
        moved = replace(job, state=to_state, owner=None, finished_at=None if ready else now)
        if ready:
            moved = replace(moved, attempt=0, run_at=now)
            row = self._rows.get((job.scope, job.key))
            if job.settles and row is not None and (row.state, row.owner) == (State.UNKNOWN, job.key_owner):
                until = max(row.expires_at, now + row.retention_seconds)
                change = swap(row, Event.REOPEN, Actor.OPERATOR)
                self._rows[job.scope, job.key] = replace(change.moved(row, now), expires_at=until, reconcile_tries=0)
        event = redirection(to_state)
        line = (now, audit.who, event, job.scope, job.key, job_id, JobState.DEAD.value, to_state.value, audit.why)
        self._audit[next(self._lines)] = AuditLine(*line)
        return self._put(moved)

    def outbox_health(self) -> OutboxHealth:
        due = [job.run_at for job in self._in(JobState.READY) if job.run_at <= self._clock()]
        return OutboxHealth(len(due), self._clock() - min(due, default=self._clock()), len(self._in(JobState.DEAD)))

    def purge_jobs(self, limit: int, keep_seconds: float) -> int:
        over = [
            job
            for state in (JobState.DONE, JobState.CANCELLED)
            for job in self._in(state)
            if not (job.settles and self._leaves_unknown(job))
        ]
        gone = [job.id for job in over if (job.finished_at or 0) <= self._clock() - keep_seconds][:limit]
        for job_id in gone:
            del self.by_id[job_id]
        return len(gone)

    def _leaves_unknown(self, job: Job) -> bool:
        row = self._rows.get((job.scope, job.key))
        return row is not None and (row.state, row.owner) == (State.UNKNOWN, job.key_owner)

    def time_out(self, limit: int, response: StoredResponse) -> list[At]:
        now = self._clock()
        late: list[At] = []
        for row in self.due(Duty.ABANDONED, 10**6):
            theirs = [
                job for job in self.jobs_of(row.scope, row.key, 10**6) if job.key_owner == row.owner and job.settles
            ]
            running = [job for job in theirs if job.state is JobState.RUNNING and (job.lease_until or 0) > now]
            if running or len(late) == limit:
                continue
            late.append((row.scope, row.key))
            tried = any(job.attempt > 0 or job.history != b"[]" for job in theirs)
            for job in theirs:
                if job.state in (JobState.READY, JobState.RUNNING):
                    words = outbox_rows.TIMED_OUT
                    cancelled = replace(job, state=JobState.CANCELLED, lease_until=None, last_error=words)
                    self._put(replace(cancelled, finished_at=now))
            doubt = outbox_rows.TIMED_OUT_IN_DOUBT if tried else None
            to_state = State.UNKNOWN if tried else State.FAILED
            self._settle((row.scope, row.key), row.owner, to_state, doubt, None if tried else response)
        return late

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[At]:
        steps = super().find(downstream_key=downstream_key, provider_id=provider_id)
        jobs = [
            (job.scope, job.key)
            for job in self.by_id.values()
            if (downstream_key is not None and job.downstream_key == downstream_key)
            or (provider_id is not None and job.provider_id == provider_id)
        ]
        return sorted({*steps, *jobs})[:FOUND]
