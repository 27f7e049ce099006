"""Prints keys, steps, jobs and their history as text and as JSON, for ``keys`` and ``dead-letters``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from oncekey.admin.doctor import span
from oncekey.admin.key_view import Sight
from oncekey.cli.output import (
    HIDDEN,
    error_shown,
    header_shown,
    key_shown,
    masked,
    moment,
    plain,
    scope_and_endpoint,
    table,
)
from oncekey.core.audit import AuditLine
from oncekey.core.doubts import in_doubt
from oncekey.core.jobs import Job, JobState
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import FINAL, Effects, State
from oncekey.core.steps import Step
from oncekey.web.unknown_outcomes import resolve_command

KEY_COLUMNS = ("SCOPE", "KEY", "OPERATION", "STATE", "ATTEMPT", "AGE", "NOTE")
JOB_COLUMNS = ("JOB", "TASK", "SCOPE", "KEY", "ATTEMPTS", "DEAD FOR", "ERROR")


# -- lines of a listing --------------------------------------------------------------------------------------------


def key_row(record: Record, reveal: bool) -> Sequence[str]:
    scope, _ = scope_and_endpoint(record.scope)
    age = span(record.now - record.created_at)
    key = key_shown(record.key, reveal)
    return scope, key, record.operation, record.state, str(record.attempt), age, note(record, reveal)


def job_row(job: Job, reveal: bool) -> Sequence[str]:
    scope, _ = scope_and_endpoint(job.scope)
    since = span(job.now - (job.finished_at or job.now))
    return (
        job.id,
        job.task,
        scope,
        key_shown(job.key, reveal),
        str(job.attempt),
        since,
        error_shown(job.last_error, reveal) or "",
    )


def note(record: Record, reveal: bool) -> str:
    """The most important fact about a key in its state."""
    error = error_shown(record.last_error, reveal)
    match record.state:
        case State.IN_PROGRESS if record.lease_over:
            return f"its lease is over for {span(record.now - record.lease_until)}"
        case State.IN_PROGRESS:
            return f"leased for another {span(record.lease_until - record.now)}"
        case State.UNKNOWN:
            return "; ".join(filter(None, [_reconciling(record), error]))
        case State.FAILED_RETRYABLE if record.has_steps:
            return "; ".join(filter(None, [_resuming(record), error]))
    expiry = "past its expiry" if record.past_expiry else f"expires in {span(record.expires_at - record.now)}"
    return f"{expiry}; {error}" if error else expiry


def _reconciling(record: Record) -> str:
    tries = f"asked {_times(record.reconcile_tries)}, " if record.reconcile_tries else ""
    if record.reconcile_at is None:
        return f"{tries}asked no more: a dead letter"
    wait = record.reconcile_at - record.now
    return f"{tries}to be asked {'now' if wait <= 0 else f'in {span(wait)}'}"


def _resuming(record: Record) -> str:
    tries = f", resumed {_times(record.reconcile_tries)}" if record.reconcile_tries else ""
    if record.dead:
        return f"half done{tries}, and no more: a dead letter"
    if record.reconcile_at is None:
        return f"half done{tries}"
    wait = record.reconcile_at - record.now
    when = "now" if wait <= 0 else f"in {span(wait)}"
    if record.reconcile_tries:
        return f"half done{tries}; upkeep goes on with it {when}"
    return f"half done; its client's retry goes on with it, or upkeep {when}, if once.resume has a function for it"


# -- one key -------------------------------------------------------------------------------------------------------


def print_sight(sight: Sight, reveal: bool) -> None:
    if sight.record is not None:
        table([], [*_facts(sight.record, sight, reveal), *_way_out(sight.record, sight)])
    elif sight.outlook.runs:
        print("there is no such key any more; this is left of it")
    _section("steps", ("NAME", "KIND", "STATE", "REPEATABLE", "RESULT", "DOWNSTREAM KEY", "PROVIDER ID"), [
        (s.name, *_kind_and_state(s), _yes(s.repeatable), masked(s.result, reveal) or "", s.downstream_key or "",
         s.provider_id or "")
        for s in sight.steps
    ])  # fmt: skip
    _section("jobs", ("JOB", "TASK", "STATE", "ATTEMPTS", "SETTLES", "NOTE"), [
        (job.id, job.task, job.state, str(job.attempt), _yes(job.settles), error_shown(job.last_error, reveal) or "")
        for job in sight.jobs
    ])  # fmt: skip
    _section("changed by", ("WHEN", "WHO", "WHAT", "FROM", "TO", "WHY"), _changes(sight.history))
    outlook = sight.outlook
    answer = "" if outlook.status is None else f"{outlook.status}: "
    kind = f" ({outlook.problem})" if outlook.problem else ""
    print(f"\nthe same request gets now: {answer}{plain(outlook.words)}{kind}")


def _kind_and_state(step: Step) -> tuple[str, str]:
    return ("request", "kept") if step.is_request else (step.kind, step.state)


def _effects(record: Record, steps: Sequence[Step]) -> str:
    """What the route declares. The row of a phased request is external while an effect is in doubt."""
    doubted = in_doubt(record, steps) if record.has_steps and record.effects is Effects.EXTERNAL else []
    names = ", ".join(f"'{step.name}'" for step in doubted)
    return f"phased; external as long as effect {names} is in doubt" if doubted else record.effects


def _facts(record: Record, sight: Sight, reveal: bool) -> list[tuple[str, str]]:
    scope, endpoint = scope_and_endpoint(record.scope)
    facts = [
        ("key", key_shown(record.key, reveal)),
        ("scope", scope if endpoint is None else f"{scope}, of the endpoint {endpoint}"),
        ("operation", record.operation),
        ("state", f"{record.state}, attempt {record.attempt}; {note(record, reveal)}"),
        ("effects", _effects(record, sight.steps)),
        ("created", f"{moment(record.created_at)}, {span(record.now - record.created_at)} ago"),
    ]
    if record.finished_at is not None:
        took = span(record.finished_at - record.created_at)
        facts.append(("finished", f"{moment(record.finished_at)}, after {took}"))
    if record.state in FINAL or record.state in (State.PENDING, State.FAILED_RETRYABLE):
        facts.append(("expires", str(moment(record.expires_at))))
    if record.recovery_point is not None:
        facts.append(("done up to", record.recovery_point))
    if record.response is not None:
        facts += _response(record.response, sight.not_opened, reveal)
    return facts


def _quarantine(record: Record) -> str:
    left = record.lease_until + record.quarantine - record.now
    if left <= 0:
        return f"{span(record.quarantine)}, and over: it can be refuted"
    return f"{span(record.quarantine)}: it can be refuted in {span(left)}"


def _way_out(record: Record, sight: Sight) -> list[tuple[str, str]]:
    """How an unknown key is settled: by its job, or by a verdict about each effect in doubt."""
    if record.state is not State.UNKNOWN:
        return []
    if (job := sight.deferred_to) is not None:
        again = f": `oncekey dead-letters retry {job.id} --why TEXT`, or" if job.state is JobState.DEAD else ":"
        confirm = resolve_command(record.scope, record.key, "--confirm", "--status", "201", "--body", "JSON")
        how = f"`{confirm}` (or --fail with an error); the request is done, and is not run again"
        return [("deferred to", f"job {job.id}, {job.state}{again} {how}")]
    facts = [("quarantine", _quarantine(record))]
    doubted = in_doubt(record, sight.steps)
    if record.has_steps and not doubted:
        refute = resolve_command(record.scope, record.key, "--refute")
        facts.append(("goes on", f"after step '{record.recovery_point}', by `{refute}`"))
    for step in doubted:
        did = resolve_command(record.scope, record.key, "--happened", step.name, "--result", "JSON")
        did_not = resolve_command(record.scope, record.key, "--not-happened", step.name)
        facts.append(("in doubt", f"{step.name}: `{did}`, or `{did_not}`"))
    return facts


def _response(response: StoredResponse, not_opened: str | None, reveal: bool) -> list[tuple[str, str]]:
    body = masked(response.body, reveal) if response.replayable else not_opened or "not kept"
    facts = [("response", str(response.status))]
    facts += [("", f"{name}: {header_shown(name, text, reveal) or HIDDEN}") for name, text in response.headers]
    return [*facts, ("", body or "an empty body")]


def print_job(job: Job, reveal: bool) -> None:
    scope, endpoint = scope_and_endpoint(job.scope)
    facts = [
        ("job", job.id),
        ("task", job.task),
        ("key", key_shown(job.key, reveal)),
        ("scope", scope if endpoint is None else f"{scope}, of the endpoint {endpoint}"),
        ("operation", job.operation),
        ("state", f"{job.state}; tried {_times(job.attempt)}"),
        ("settles", "its key: a dead letter leaves it unknown" if job.settles else "nothing"),
        ("created", f"{moment(job.created_at)}, {span(job.now - job.created_at)} ago"),
        ("downstream", job.downstream_key),
        ("provider id", job.provider_id or "none was recorded"),
        ("payload", masked(job.payload, reveal) or ""),
    ]
    table([], facts)
    attempts = [
        (str(each["attempt"]), str(moment(each["at"])), error_shown(each["error"], reveal) or "")
        for each in _attempts(job)
    ]
    _section("attempts", ("ATTEMPT", "WHEN", "ERROR"), attempts)


def print_changes(history: Sequence[AuditLine]) -> None:
    _section("changed by", ("WHEN", "WHO", "WHAT", "FROM", "TO", "WHY"), _changes(history))


def _changes(history: Sequence[AuditLine]) -> list[tuple[str, ...]]:
    return [
        (str(moment(line.at)), line.who, line.event, line.before, line.after or "deleted", line.why) for line in history
    ]


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        print(f"\n{title}")
        table(head, rows, indent=2)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _attempts(job: Job) -> list[dict[str, Any]]:
    attempts: list[dict[str, Any]] = orjson.loads(job.history)
    return attempts


# -- JSON ----------------------------------------------------------------------------------------------------------


def record_json(record: Record, reveal: bool) -> dict[str, Any]:
    scope, endpoint = scope_and_endpoint(record.scope)
    return {
        "scope": scope,
        "endpoint": endpoint,
        "key": key_shown(record.key, reveal),
        "masked": not reveal,
        "operation": record.operation,
        "state": record.state,
        "effects": record.effects,
        "attempt": record.attempt,
        "age_seconds": round(record.now - record.created_at, 3),
        "created_at": moment(record.created_at),
        "finished_at": moment(record.finished_at),
        "lease_until": moment(record.lease_until),
        "quarantine_seconds": record.quarantine,
        "expires_at": moment(record.expires_at),
        "recovery_point": record.recovery_point,
        "reconcile_at": moment(record.reconcile_at),
        "reconcile_tries": record.reconcile_tries,
        "dead_letter": record.state is State.UNKNOWN and record.reconcile_at is None,
        "last_error": error_shown(record.last_error, reveal),
    }


def response_json(response: StoredResponse | None, reveal: bool) -> dict[str, Any] | None:
    if response is None:
        return None
    kept = response.replayable
    return {
        "status": response.status,
        "headers": [[name, header_shown(name, text, reveal)] for name, text in response.headers],
        "replayable": response.replayable,
        "bytes": len(response.body) if kept and response.body is not None else None,
        "body": masked(response.body, True) if reveal and kept else None,
    }


def step_json(step: Step, reveal: bool) -> dict[str, Any]:
    return {
        "name": step.name,
        "kind": _kind_and_state(step)[0],
        "state": _kind_and_state(step)[1],
        "repeatable": step.repeatable,
        "downstream_key": step.downstream_key,
        "provider_id": step.provider_id,
        "result": masked(step.result, True) if reveal else None,
    }


def job_json(job: Job, reveal: bool) -> dict[str, Any]:
    scope, endpoint = scope_and_endpoint(job.scope)
    return {
        "id": job.id,
        "task": job.task,
        "scope": scope,
        "endpoint": endpoint,
        "key": key_shown(job.key, reveal),
        "masked": not reveal,
        "operation": job.operation,
        "state": job.state,
        "attempt": job.attempt,
        "settles": job.settles,
        "dead_letter": job.state is JobState.DEAD,
        "downstream_key": job.downstream_key,
        "provider_id": job.provider_id,
        "created_at": moment(job.created_at),
        "run_at": moment(job.run_at),
        "finished_at": moment(job.finished_at),
        "last_error": error_shown(job.last_error, reveal),
        "attempts": [
            {**each, "at": moment(each["at"]), "error": error_shown(each["error"], reveal)} for each in _attempts(job)
        ],
        "payload": masked(job.payload, True) if reveal else None,
    }


def change_json(line: AuditLine) -> dict[str, Any]:
    return {
        "at": moment(line.at),
        "who": line.who,
        "event": line.event,
        "job": line.job_id,
        "before": line.before,
        "after": line.after,
        "why": line.why,
    }


def sight_json(sight: Sight, reveal: bool) -> dict[str, Any]:
    record = sight.record
    return {
        "record": None if record is None else record_json(record, reveal),
        "response": None if record is None else response_json(record.response, reveal),
        "response_not_opened": sight.not_opened,
        "in_doubt": [] if record is None else [step.name for step in in_doubt(record, sight.steps)],
        "steps": [step_json(step, reveal) for step in sight.steps],
        "jobs": [job_json(job, reveal) for job in sight.jobs],
        "deferred_to": None if sight.deferred_to is None else sight.deferred_to.id,
        "history": [change_json(line) for line in sight.history],
        "now": {
            "runs": sight.outlook.runs,
            "status": sight.outlook.status,
            "problem": sight.outlook.problem,
            "words": sight.outlook.words,
        },
    }
