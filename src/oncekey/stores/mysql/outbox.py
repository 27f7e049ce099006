"""The outbox in MySQL: every verb is one packet and one commit, on the database's clock.

``outbox.sql`` says what the statements do; :class:`MysqlStore` has the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oncekey.core.audit import Audit
from oncekey.core.health import COUNTED
from oncekey.core.jobs import Conclusion, DeferredTo, Job, JobState, OutboxHealth, redirection
from oncekey.core.record import StoredResponse
from oncekey.stores.duties import VISITED, JobTurns
from oncekey.stores.mysql import rows
from oncekey.stores.mysql.packets import NOW, Text, filled, literal, micros, part, statement, table
from oncekey.stores.sql import outbox_rows
from oncekey.stores.sql.outbox_rows import HISTORY_KEPT, LEASE_RAN_OUT, TIMED_OUT, TIMED_OUT_IN_DOUBT

_THEN = part("now")


def _statement(name: str, now: str = NOW) -> str:
    """The query of this name. ``now``: the time that its jobs carry."""
    text = statement(f"outbox_{name}", "{columns}")
    history = part("outbox_history").replace("{kept}", str(HISTORY_KEPT))
    for mark, shared in (
        ("{conclude_rows}", part("conclude_rows")),
        ("{claim_rows}", part("claim_rows")),
        ("{at_jobs}", part("at_jobs")),
        ("{is_held}", part("is_held")),
        ("{lapsed_history}", history.replace("{error}", ":lapsed")),
        ("{history}", history.replace("{error}", "w.error")),
        ("{taken}", part("taken")),
        ("{columns}", part("outbox_columns").replace("{now}", now)),
        ("{counted}", str(COUNTED)),
        ("{now}", _THEN),
    ):
        text = text.replace(mark, shared)
    return text


_CLAIM, _TURN, _CONCLUDE, _SETTLE, _REDIRECT, _TIME_OUT = (
    _statement(name, _THEN) for name in ("claim", "turn", "conclude", "settle", "redirect", "time_out")
)
_RENEW, _PROVIDER, _JOB, _JOBS, _JOBS_OF, _DEFERRED_TO, _HEALTH, _PURGE, _LATE, _SCOPES = (
    _statement(name)
    for name in (*("renew", "provider", "job", "jobs", "jobs_of", "deferred_to", "health", "purge", "late", "scopes"),)
)
_TURN_OF_SCOPE = part("claim_turn").replace("{now}", _THEN)


class MysqlOutbox:
    """The outbox verbs of :class:`oncekey.stores.mysql.store.MysqlStore`."""

    if TYPE_CHECKING:
        _job_turns: JobTurns

        def _start_clock(self) -> None: ...
        def _send(self, text: str, **values: Any) -> list[Any]: ...

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        return self.turn((), owner, tasks, limit, lease_seconds)[1]

    def turn(
        self, ended: Sequence[Conclusion], owner: str, tasks: Sequence[str], limit: int, lease_seconds: float
    ) -> tuple[list[bool], list[Job]]:
        if not tasks or limit < 1:
            return self.conclude(ended), []
        shared, after = self._job_turns.share(limit)
        scopes, last = self._visit(shared, after) if shared else ([], None)
        of_tasks = Text(f"({', '.join(map(literal, tasks))})")
        ids = ", ".join(literal(conclusion.id) for conclusion in ended)
        asked = {"tasks": of_tasks, "not_ended": Text(f"i.id NOT IN ({ids})" if ids else "true")}
        turns = (filled(_TURN_OF_SCOPE, asked | {"scope": scope, "most": shared // len(scopes)}) for scope in scopes)
        text, values, places = _concluding(_TURN, ended) if ended else (_CLAIM, {}, [])
        answer = self._run(
            text,
            turns=Text("\n".join(turns)),
            owner=owner,
            limit=limit,
            lease=micros(lease_seconds),
            lapsed=LEASE_RAN_OUT,
            **asked,
            **values,
        )
        *held, claimed = (each for each in answer if not isinstance(each, int))
        self._job_turns.claimed(len(claimed) >= limit, shared, last)
        jobs = sorted(map(_job, claimed), key=lambda job: job.run_at)
        return _answers(places, held[0]) if ended else [], jobs

    def _visit(self, shared: int, after: str) -> tuple[list[str], str | None]:
        (found,) = self._run(_SCOPES, after=after, limit=VISITED)
        scopes = iter(found)

        def following(_: str) -> tuple[str, bool] | None:
            row = next(scopes, None)
            return None if row is None else (row[0].decode(), bool(row[1]))

        return self._job_turns.visit(shared, after, following)

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        if not ids:
            return []
        wanted = table({"id": sorted(ids)})
        *_, held, _whole, _committed = self._run(_RENEW, owner=owner, wanted=wanted, lease=micros(lease_seconds))
        return [job_id.decode() for (job_id,) in held]

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        if not batch:
            return []
        text, values, places = _concluding(_CONCLUDE, batch)
        *_, held, _whole, _committed = self._run(text, **values)
        return _answers(places, held)

    def note_provider(self, job_id: str, owner: str, provider_id: str) -> bool:
        return self._run(_PROVIDER, id=job_id, owner=owner, provider_id=provider_id) == [1]

    def jobs(self, state: JobState, limit: int) -> list[Job]:
        return self._jobs(_JOBS, state=_word(state), limit=limit)

    def jobs_of(self, scope: str, key: str, limit: int) -> list[Job]:
        return self._jobs(_JOBS_OF, scope=scope, key=key, limit=limit)

    def job(self, job_id: str) -> Job | None:
        return next(iter(self._jobs(_JOB, id=job_id)), None)

    def deferred_to(self, asked: DeferredTo) -> Job | None:
        found = self._jobs(_DEFERRED_TO, scope=asked.scope, key=asked.key, owner=asked.owner)
        return next(iter(found), None)

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        event = redirection(to_state)
        *_, moved, _whole, _committed = self._run(
            _REDIRECT, id=job_id, to_state=_word(to_state), event=event.value, who=audit.who, why=audit.why
        )
        return next(map(_job, moved), None)

    def outbox_health(self) -> OutboxHealth:
        (((ready, lag, dead),),) = self._run(_HEALTH)
        return OutboxHealth(ready=ready, lag_seconds=lag / 1e6, dead=dead)

    def purge_jobs(self, limit: int, keep_seconds: float) -> int:
        """Jobs that are done first, then cancelled ones: each state is one range of the index, and one commit."""
        deleted = 0
        for state in (JobState.DONE, JobState.CANCELLED):
            if deleted < limit:
                asked = {"limit": limit - deleted, "keep": micros(keep_seconds)}
                deleted += self._run(_PURGE, state=_word(state), **asked)[-3]
        return deleted

    def time_out(self, limit: int, response: StoredResponse) -> list[tuple[str, str]]:
        (late,) = self._run(_LATE, limit=limit)
        if not late:
            return []
        scopes, keys, owners = zip(*sorted(late), strict=True)
        *_, moved, _whole, _committed = self._run(
            _TIME_OUT,
            size=len(late),
            placed=table({"scope": scopes, "key": keys, "owner": owners}),
            error=TIMED_OUT,
            doubt=TIMED_OUT_IN_DOUBT,
            status=response.status,
            headers=rows.headers(response),
            body=response.body,
            schema_version=response.schema_version,
        )
        return [(scope.decode(), key.decode()) for scope, key in moved]

    def _jobs(self, text: str, **values: Any) -> list[Job]:
        return [_job(row) for row in self._run(text, **values)[0]]

    def _run(self, text: str, **values: Any) -> list[Any]:
        self._start_clock()
        return self._send(text, **values)


def _concluding(text: str, batch: Sequence[Conclusion]) -> tuple[str, dict[str, Any], list[int]]:
    """The statement and its values, and the place in ``batch`` of each of its rows: jobs are locked by their ids."""
    places = sorted(range(len(batch)), key=lambda place: batch[place].id)
    ordered = [batch[place] for place in places]
    settle = any(conclusion.settle is not None for conclusion in batch)
    values = {"size": len(ordered), "compared": _compared(ordered), "wanted": _wanted(ordered)}
    return text.replace("{settle}", _SETTLE if settle else ""), values, places


def _answers(places: Sequence[int], held: rows.Rows) -> list[bool]:
    ended = {places[number - 1] for (number,) in held}
    return [place in ended for place in range(len(places))]


def _compared(batch: Sequence[Conclusion]) -> Text:
    return table({"id": [conclusion.id for conclusion in batch], "owner": [conclusion.owner for conclusion in batch]})


def _wanted(batch: Sequence[Conclusion]) -> Text:
    answers = [conclusion.response for conclusion in batch]
    return table(
        {
            "id": [conclusion.id for conclusion in batch],
            "owner": [conclusion.owner for conclusion in batch],
            "ending": [conclusion.end.value for conclusion in batch],
            "retry_in": [micros(conclusion.retry_in) for conclusion in batch],
            "error": [outbox_rows.kept_error(conclusion) for conclusion in batch],
            "settle": [None if conclusion.settle is None else conclusion.settle.value for conclusion in batch],
            "status": [answer and answer.status for answer in answers],
            "headers": [answer and rows.headers(answer) for answer in answers],
            "body": [answer and answer.body for answer in answers],
            "schema_version": [answer and answer.schema_version for answer in answers],
        }
    )


def _job(row: Sequence[Any]) -> Job:
    """A row of ``outbox_columns``: bytes become text, and microseconds seconds."""
    job_id, scope, key, key_owner, operation, task, payload, downstream_key, settles, state, attempt, owner = row[:12]
    lease_until, run_at, provider_id, last_error, history, created_at, finished_at, now = row[12:]
    return outbox_rows.job((
        job_id.decode(), scope.decode(), key.decode(), key_owner.decode(), operation, task.decode(), payload,
        downstream_key.decode(), settles, state, attempt, rows.text(owner), rows.seconds(lease_until), run_at / 1e6,
        rows.text(provider_id), last_error, history, created_at / 1e6, rows.seconds(finished_at), now / 1e6,
    ))  # fmt: skip


def _word(state: JobState) -> Text:
    return Text(f"'{state.value}'")
