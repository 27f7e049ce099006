"""The outbox in PostgreSQL: every verb is one statement and one commit, on the database's clock.

``sql/outbox.sql`` says what the statements do; :class:`PostgresStore` has the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, LiteralString

from oncekey.core.audit import Audit
from oncekey.core.health import COUNTED
from oncekey.core.jobs import Conclusion, DeferredTo, Job, JobState, OutboxHealth, redirection
from oncekey.core.record import StoredResponse
from oncekey.stores.duties import VISITED, JobTurns
from oncekey.stores.postgres.arrays import Bytea, Float8, Int4, Text
from oncekey.stores.sql import outbox_rows, queries
from oncekey.stores.sql.outbox_rows import HISTORY_KEPT, LEASE_RAN_OUT, TIMED_OUT, TIMED_OUT_IN_DOUBT

if TYPE_CHECKING:
    import psycopg

_PACKAGE = "oncekey.stores.postgres"
_SINCE = {
    JobState.READY: "run_at",
    JobState.RUNNING: "lease_until",
    JobState.DONE: "finished_at",
    JobState.DEAD: "finished_at",
    JobState.CANCELLED: "finished_at",
}


def _quoted(text: str) -> str:
    """A constant of ours as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def _text(name: str) -> str:
    return queries.statement(_PACKAGE, f"outbox_{name}").rstrip("\n")


def _statement(name: str, *, error: str = "", not_ended: str = "") -> LiteralString:
    text = _text(name)
    for mark, part in (
        ("{ended}", _text("ended")),
        ("{taken}", _text("taken")),
        ("{next_turn}", _text("next_turn")),
        ("{not_ended}", not_ended),
        ("{columns}", _text("columns")),
        ("{lapsed_history}", _text("history").replace("{error}", _quoted(LEASE_RAN_OUT))),
        ("{lease_ran_out}", _quoted(LEASE_RAN_OUT)),
        ("{history}", _text("history")),
        ("{error}", error),
        ("{kept}", str(HISTORY_KEPT)),
        ("{counted}", str(COUNTED)),
        ("{visited}", str(VISITED)),
    ):
        text = text.replace(mark, part)
    return text


_CLAIM = _statement("claim")
_TURN = _statement("turn", error="w.error", not_ended=" AND i.id <> ALL(%(id)s)")
_RENEW = _statement("renew")
_CONCLUDE = _statement("conclude", error="w.error")
_PROVIDER = _statement("provider")
_JOB = _statement("job")
_JOBS_OF = _statement("jobs_of")
_DEFERRED_TO = _statement("deferred_to")
_JOBS = {
    state: _statement("jobs").replace("{state}", state.value).replace("{since}", since)
    for state, since in _SINCE.items()
}
_REDIRECT = _statement("redirect")
_HEALTH = _statement("health")
_PURGE = _statement("purge")
_TIME_OUT = _statement("time_out", error=_quoted(TIMED_OUT)).replace("{doubt}", _quoted(TIMED_OUT_IN_DOUBT))


class PostgresOutbox:
    """The outbox verbs of :class:`oncekey.stores.postgres.store.PostgresStore`."""

    if TYPE_CHECKING:
        _job_turns: JobTurns

        def _start_clock(self) -> None: ...
        def _execute(self, statement: LiteralString, parameters: Any) -> psycopg.Cursor[tuple[Any, ...]]: ...

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        asked = self._claim(owner, tasks, limit, lease_seconds)
        return self._claimed(self._run(_CLAIM, **asked).fetchall(), limit, asked["shared"])

    def turn(
        self, ended: Sequence[Conclusion], owner: str, tasks: Sequence[str], limit: int, lease_seconds: float
    ) -> tuple[list[bool], list[Job]]:
        asked = self._claim(owner, tasks, limit, lease_seconds)
        rows = self._run(_TURN, **_columns(ended), **asked).fetchall()
        over = {(row[0], row[11]) for row in rows if row[9] is None}
        jobs = self._claimed([row for row in rows if row[9] is not None], limit, asked["shared"])
        return [(conclusion.id, conclusion.owner) in over for conclusion in ended], jobs

    def _claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> dict[str, Any]:
        shared, after = self._job_turns.share(limit)
        return {
            "owner": owner,
            "tasks": Text(tasks),
            "limit": limit,
            "lease_seconds": float(lease_seconds),
            "shared": shared,
            "after": after,
        }

    def _claimed(self, rows: Sequence[Sequence[Any]], limit: int, shared: int) -> list[Job]:
        self._job_turns.claimed(len(rows) >= limit, shared, rows[0][20] if rows else None)
        return sorted(map(outbox_rows.job, rows), key=lambda job: job.run_at)

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        rows = self._run(_RENEW, owner=owner, ids=Text(ids), lease_seconds=float(lease_seconds)).fetchall()
        return [row[0] for row in rows]

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        rows = self._run(_CONCLUDE, **_columns(batch)).fetchall()
        ended = {(row[0], row[1]) for row in rows}
        return [(conclusion.id, conclusion.owner) in ended for conclusion in batch]

    def note_provider(self, job_id: str, owner: str, provider_id: str) -> bool:
        return self._run(_PROVIDER, id=job_id, owner=owner, provider_id=provider_id).rowcount == 1

    def jobs(self, state: JobState, limit: int) -> list[Job]:
        return self._jobs(_JOBS[state], limit=limit)

    def jobs_of(self, scope: str, key: str, limit: int) -> list[Job]:
        return self._jobs(_JOBS_OF, scope=scope, key=key, limit=limit)

    def job(self, job_id: str) -> Job | None:
        return next(iter(self._jobs(_JOB, id=job_id)), None)

    def deferred_to(self, asked: DeferredTo) -> Job | None:
        found = self._jobs(_DEFERRED_TO, scope=asked.scope, key=asked.key, owner=asked.owner)
        return next(iter(found), None)

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        event = redirection(to_state)
        moved = self._jobs(_REDIRECT, id=job_id, to_state=to_state.value, event=event, who=audit.who, why=audit.why)
        return next(iter(moved), None)

    def outbox_health(self) -> OutboxHealth:
        ((ready, lag, dead),) = self._run(_HEALTH).fetchall()
        return OutboxHealth(ready=ready, lag_seconds=float(lag), dead=dead)

    def purge_jobs(self, limit: int, keep_seconds: float) -> int:
        return self._run(_PURGE, limit=limit, keep_seconds=float(keep_seconds)).rowcount

    def time_out(self, limit: int, response: StoredResponse) -> list[tuple[str, str]]:
        rows = self._run(
            _TIME_OUT,
            limit=limit,
            status=response.status,
            headers=outbox_rows.headers_of(response),
            body=response.body,
            schema_version=response.schema_version,
        ).fetchall()
        return [(row[0], row[1]) for row in rows]

    def _jobs(self, statement: LiteralString, **parameters: Any) -> list[Job]:
        return [outbox_rows.job(row) for row in self._run(statement, **parameters).fetchall()]

    def _run(self, statement: LiteralString, **parameters: Any) -> psycopg.Cursor[tuple[Any, ...]]:
        self._start_clock()
        return self._execute(statement, parameters)


def _columns(batch: Sequence[Conclusion]) -> dict[str, Any]:
    """The parameters of outbox_ended."""
    answers = [conclusion.response for conclusion in batch]
    return {
        "id": Text([conclusion.id for conclusion in batch]),
        "ended_by": Text([conclusion.owner for conclusion in batch]),
        "ending": Text([conclusion.end for conclusion in batch]),
        "retry_in": Float8([conclusion.retry_in for conclusion in batch]),
        "error": Text([outbox_rows.kept_error(conclusion) for conclusion in batch]),
        "settle": Text([conclusion.settle for conclusion in batch]),
        "status": Int4([answer and answer.status for answer in answers]),
        "headers": Text([outbox_rows.headers_of(answer) for answer in answers]),
        "body": Bytea([answer and answer.body for answer in answers]),
        "schema_version": Int4([answer and answer.schema_version for answer in answers]),
    }
