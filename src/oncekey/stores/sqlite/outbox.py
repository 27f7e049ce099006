"""The outbox in one SQLite file: one writer, the same contract as PostgreSQL's.

A batch is one ``BEGIN IMMEDIATE`` transaction, row by row; under the write lock no other writer changes what was read.
A claim looks first without the lock, so that idle workers that poll do not delay other writers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from oncekey.core.audit import Audit
from oncekey.core.health import COUNTED
from oncekey.core.jobs import Conclusion, DeferredTo, Job, JobEnd, JobState, OutboxHealth, redirection
from oncekey.core.record import StoredResponse
from oncekey.core.states import State
from oncekey.stores.duties import JobTurns
from oncekey.stores.sql import outbox_rows, queries
from oncekey.stores.sql.outbox_rows import LEASE_RAN_OUT, TIMED_OUT, TIMED_OUT_IN_DOUBT
from oncekey.stores.sqlite import schema

if TYPE_CHECKING:
    from oncekey.stores.sqlite.connections import Connections

_OVER = "state IN ('done', 'cancelled') AND state = '{}'"  # SQLite needs the index's condition word for word
_LISTED = {
    JobState.READY: ("state = 'ready'", "run_at"),
    JobState.RUNNING: ("state = 'running'", "lease_until"),
    JobState.DEAD: ("state = 'dead'", "finished_at"),
    JobState.DONE: (_OVER.format("done"), "finished_at"),
    JobState.CANCELLED: (_OVER.format("cancelled"), "finished_at"),
}


def _statement(name: str) -> str:
    text = queries.statement(schema.PACKAGE, f"outbox_{name}")
    return text.replace("{columns}", queries.statement(schema.PACKAGE, "outbox_columns"))


_TAKE, _RENEW, _HELD, _END, _SETTLE, _PROVIDER, _JOB, _REDIRECT, _REOPEN, _HEALTH, _PURGE, _LATE, _CANCEL = (
    _statement(name)
    for name in (
        *("take", "renew", "held", "end", "settle", "provider", "job", "redirect", "reopen", "health"),
        *("purge", "late", "cancel"),
    )
)
_NOTE = queries.statement(schema.PACKAGE, "note")
_NEXT_SCOPE = _statement("next_scope")
_JOBS_OF = _statement("jobs_of")
_DEFERRED_TO = _statement("deferred_to")
_JOBS = {
    state: _statement("jobs").replace("{state}", condition).replace("{since}", since)
    for state, (condition, since) in _LISTED.items()
}


@lru_cache
def _of_tasks(name: str, count: int, first: int = 3) -> str:
    return _statement(name).replace("{tasks}", ", ".join(f"?{number}" for number in range(first, first + count)))


class SqliteOutbox:
    """The outbox verbs of :class:`oncekey.stores.sqlite.store.SqliteStore`."""

    if TYPE_CHECKING:
        connections: Connections
        clock: Callable[[], float]
        _job_turns: JobTurns

        def _writing(self) -> AbstractContextManager[sqlite3.Connection]: ...

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        with self.connections.use() as connection:
            if not _any_free(connection, tasks, self.clock()):
                return []
        with self._writing() as connection:
            now = self.clock()
            return _take(connection, self._free(connection, tasks, limit, now), owner, lease_seconds, now)

    def turn(
        self, ended: Sequence[Conclusion], owner: str, tasks: Sequence[str], limit: int, lease_seconds: float
    ) -> tuple[list[bool], list[Job]]:
        with self._writing() as connection:
            now = self.clock()
            free = self._free(connection, tasks, limit, now, {conclusion.id for conclusion in ended})
            answers = [_conclude(connection, conclusion, now) for conclusion in ended]
            return answers, _take(connection, free, owner, lease_seconds, now)

    def _free(
        self, connection: sqlite3.Connection, tasks: Sequence[str], limit: int, now: float, ended: Collection[str] = ()
    ) -> list[str]:
        """Jobs that a worker may take: first those whose worker's lease is over, then those that are due, a part of
        them in turns by scope. ``ended``: jobs whose attempts end in the same commit are not among them."""
        shared, after = self._job_turns.share(limit)
        found = _lapsed(connection, tasks, limit + len(ended), now)
        found = [each for each in found if each not in ended][:limit]
        last = None
        if shared:
            scopes, last = self._job_turns.visit(shared, after, partial(_next_scope, connection, now))
            for scope in scopes:
                most = min(shared // len(scopes), limit - len(found))
                due = connection.execute(_of_tasks("due_of", len(tasks), 4), (now, most, scope, *tasks))
                found += [row[0] for row in due]
        if len(found) < limit:
            oldest = connection.execute(_of_tasks("due", len(tasks)), (now, limit, *tasks))
            found = list(dict.fromkeys([*found, *(row[0] for row in oldest)]))[:limit]
        self._job_turns.claimed(len(found) >= limit, shared, last)
        return found

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        with self._writing() as connection:
            until = self.clock() + lease_seconds
            return [each for each in ids if connection.execute(_RENEW, (each, owner, until)).rowcount == 1]

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        with self._writing() as connection:
            now = self.clock()
            return [_conclude(connection, conclusion, now) for conclusion in batch]

    def note_provider(self, job_id: str, owner: str, provider_id: str) -> bool:
        with self._writing() as connection:
            return connection.execute(_PROVIDER, (job_id, owner, provider_id)).rowcount == 1

    def jobs(self, state: JobState, limit: int) -> list[Job]:
        with self.connections.use() as connection:
            now = self.clock()
            rows = connection.execute(_JOBS[state], (limit,)).fetchall()
            return [outbox_rows.job((*row, now)) for row in rows]

    def jobs_of(self, scope: str, key: str, limit: int) -> list[Job]:
        with self.connections.use() as connection:
            now = self.clock()
            rows = connection.execute(_JOBS_OF, (scope, key, limit)).fetchall()
            return [outbox_rows.job((*row, now)) for row in rows]

    def job(self, job_id: str) -> Job | None:
        with self.connections.use() as connection:
            row = connection.execute(_JOB, (job_id,)).fetchone()
            return None if row is None else outbox_rows.job((*row, self.clock()))

    def deferred_to(self, asked: DeferredTo) -> Job | None:
        with self.connections.use() as connection:
            row = connection.execute(_DEFERRED_TO, (asked.scope, asked.key, asked.owner)).fetchone()
            return None if row is None else outbox_rows.job((*row, self.clock()))

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        event = redirection(to_state)
        with self._writing() as connection:
            now = self.clock()
            if connection.execute(_REDIRECT, (job_id, to_state.value, now)).rowcount != 1:
                return None
            job = _read(connection, job_id, now)
            if job.settles and to_state is JobState.READY:
                connection.execute(_REOPEN, (job.scope, job.key, job.key_owner, now))
            before, after = JobState.DEAD.value, to_state.value
            connection.execute(_NOTE, (now, audit.who, event, job.scope, job.key, job_id, before, after, audit.why))
            return job

    def outbox_health(self) -> OutboxHealth:
        with self.connections.use() as connection:
            ready, lag, dead = connection.execute(_HEALTH, (self.clock(), COUNTED)).fetchone()
            return OutboxHealth(ready=ready, lag_seconds=lag or 0.0, dead=dead)

    def purge_jobs(self, limit: int, keep_seconds: float) -> int:
        with self._writing() as connection:
            return connection.execute(_PURGE, (self.clock() - keep_seconds, limit)).rowcount

    def time_out(self, limit: int, response: StoredResponse) -> list[tuple[str, str]]:
        with self._writing() as connection:
            now = self.clock()
            late = connection.execute(_LATE, (now, limit)).fetchall()
            for scope, key, owner, tried in late:
                at = (scope, key, owner)
                connection.execute(_CANCEL, (*at, now, TIMED_OUT))
                if tried:
                    _settle(connection, at, now, State.UNKNOWN, TIMED_OUT_IN_DOUBT, None)
                else:
                    _settle(connection, at, now, State.FAILED, None, response)
            return [(scope, key) for scope, key, *_ in late]


def _lapsed(connection: sqlite3.Connection, tasks: Sequence[str], limit: int, now: float) -> list[str]:
    """Jobs whose worker's lease is over."""
    return [row[0] for row in connection.execute(_of_tasks("lapsed", len(tasks)), (now, limit, *tasks))]


def _any_free(connection: sqlite3.Connection, tasks: Sequence[str], now: float) -> bool:
    """Whether a worker may take a job."""
    one = (now, 1, *tasks)
    return any(connection.execute(_of_tasks(name, len(tasks)), one).fetchone() for name in ("lapsed", "due"))


def _next_scope(connection: sqlite3.Connection, now: float, after: str) -> tuple[str, bool] | None:
    row = connection.execute(_NEXT_SCOPE, (after,)).fetchone()
    return row and (row[0], row[1] <= now)


def _take(
    connection: sqlite3.Connection, free: Sequence[str], owner: str, lease_seconds: float, now: float
) -> list[Job]:
    taken = []
    for job_id in free:
        job = _read(connection, job_id, now)
        error, history = job.last_error, job.history.decode()
        if job.state is JobState.RUNNING:
            error = LEASE_RAN_OUT
            history = outbox_rows.remembering(history, job.attempt, now, error)
        connection.execute(_TAKE, (job_id, owner, now + lease_seconds, error, history))
        taken.append(_read(connection, job_id, now))
    return sorted(taken, key=lambda job: job.run_at)


def _read(connection: sqlite3.Connection, job_id: str, now: float) -> Job:
    return outbox_rows.job((*connection.execute(_JOB, (job_id,)).fetchone(), now))


def _conclude(connection: sqlite3.Connection, conclusion: Conclusion, now: float) -> bool:
    held = connection.execute(_HELD, (conclusion.id, conclusion.owner)).fetchone()
    if held is None:
        return False
    attempt, history, last_error, run_at, scope, key, key_owner, settles = held
    after = conclusion.end.target
    error = outbox_rows.kept_error(conclusion)
    if error is not None:
        history = outbox_rows.remembering(history, attempt, now, error)
    if conclusion.end is JobEnd.RETRY:
        run_at = now + conclusion.retry_in
    released = conclusion.end is JobEnd.RELEASE
    finished_at = None if after is JobState.READY else now
    connection.execute(
        _END,
        (
            conclusion.id,
            after.value,
            attempt - released,
            run_at,
            last_error if released else error,
            history,
            finished_at,
        ),
    )
    if settles and conclusion.settle is not None:
        _settle(connection, (scope, key, key_owner), now, conclusion.settle, error, conclusion.response)
    return True


def _settle(
    connection: sqlite3.Connection,
    at: tuple[str, str, str],
    now: float,
    to_state: State,
    error: str | None,
    answer: StoredResponse | None,
) -> None:
    response = (answer and answer.status, outbox_rows.headers_of(answer), answer and answer.schema_version)
    connection.execute(_SETTLE, (*at, now, to_state.value, error, *response, answer and answer.body))
