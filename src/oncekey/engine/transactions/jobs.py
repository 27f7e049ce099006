"""Adds a job to the outbox: one row in the transaction that the handler has enlisted. Both commit, or neither."""

from __future__ import annotations

import math
import time
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core.by_operation import worded
from oncekey.core.jobs import NewJob
from oncekey.engine.flows import Call, Flow
from oncekey.errors import ApplicationError, EnlistError
from oncekey.stores.registry import DATABASES
from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters

if TYPE_CHECKING:
    from oncekey.engine.operation import Operation

RunAt = datetime | timedelta | None
MAX_PAYLOAD_BYTES = 256 * 1024
"""A payload holds ids. The task reads everything else from the app's tables."""
MAX_TASK_LENGTH = 100
TIME_TO_SETTLE = 0.1
"""The part of the key's ttl that is left for the job: a worker may be late, or need more than one try."""


def enqueue(operation: Operation, task: str, payload: Any, run_at: RunAt, *, settles: bool) -> Flow[str]:
    """Add a job, and return its id. ``settles``: its task settles the key, and the request is answered 202."""
    enlisted = operation.enlisted
    if enlisted is None or not enlisted.is_open:
        verb, other = ("defer", "") if settles else ("enqueue", ", or call it inside a phase")
        if operation.engine is not None and operation.engine.transactions is None:
            raise EnlistError(
                f"{verb}('{task}') adds a job to the transaction of the app's own rows, and the keys are kept in a "
                f"store without transactions and outbox: keep them in the app's own database ({DATABASES})"
            )
        engine = operation.engine
        how = "enlist one" if engine is None else f"call {worded(engine.how_to_enlist, operation.name)}"
        raise EnlistError(
            f"{verb}('{task}') adds a row to the request's own transaction, and there is none open: {how} first{other}"
        )
    phase = (operation.steps.phase if operation.steps is not None else None) or ""
    if settles and phase:
        raise ApplicationError(
            "a phase commits before the request is over, and its job could be done before the key is pending: enlist a "
            "transaction and defer in that"
        )
    if settles and operation.deferred:
        raise ApplicationError("this request is deferred already: one job settles its key")
    if not task or len(task) > MAX_TASK_LENGTH or not task.isprintable():
        raise ApplicationError(f"enqueue(task): a task's name has 1 to {MAX_TASK_LENGTH} printable characters")
    at = _seconds(run_at)
    if settles and at is not None:
        _lives_until(operation, task, at)
    # Jobs are counted by phase, because a later attempt does not run a phase that is done.
    number = operation.enqueued.get((phase, task), 0) + 1
    job = NewJob(
        id=uuid.uuid4().hex,
        scope=operation.record.scope,
        key=operation.key,
        key_owner=operation.owner,
        operation=operation.name,
        task=task,
        payload=_payload(task, payload),
        # The same at every attempt: a job that was rolled back and added again is the same job downstream.
        downstream_key=operation.downstream_key(orjson.dumps(["outbox", phase, task, number]).decode()),
        run_at=at,
        settles=settles,
    )
    link, engine = enlisted.link, operation.engine
    written = job if engine is None else engine.sealing.sealed_job(job)
    yield Call(partial(link.execute, (enqueue_statement(link.dialect),), job_parameters(written)))
    operation.enqueued[phase, task] = number
    operation.deferred = operation.deferred or settles
    return job.id


def _lives_until(operation: Operation, task: str, at: float) -> None:
    """Refuse a job that is due after its key expires: the reaper would cancel the job and answer 408.

    The expiry of the key is not moved, because the route promises how long an answer is kept, and a job must not change
    that. The error shows at the developer's first try, and not at a client a day later.
    """
    record, ttl = operation.record, operation.policy.retention_seconds
    delay = at - time.time()
    used = ttl - (record.expires_at - record.now)  # by earlier attempts
    if used + delay > ttl * (1 - TIME_TO_SETTLE):
        wanted = timedelta(hours=math.ceil((used + delay) / (1 - TIME_TO_SETTLE) / 3600))
        raise ApplicationError(
            f"defer('{task}', run_at=…) is due in {timedelta(seconds=round(delay))}, and its key is kept for "
            f"{timedelta(seconds=round(ttl))}: the key would be over before its job could settle it, and the job "
            f"cancelled. Give the route a longer Policy(ttl=…), at least {wanted}, or take enqueue(), whose jobs "
            "outlive their key"
        )


def _payload(task: str, payload: Any) -> bytes:
    try:
        kept = orjson.dumps(payload)
    except TypeError as error:
        raise ApplicationError(f"the payload of '{task}' is not JSON: {error}") from error
    if len(kept) > MAX_PAYLOAD_BYTES:
        raise ApplicationError(
            f"the payload of '{task}' has {len(kept)} bytes, more than {MAX_PAYLOAD_BYTES}: put an id into it, and the "
            "rest into a table of your own"
        )
    return kept


def _seconds(run_at: RunAt) -> float | None:
    if run_at is None:
        return None
    if isinstance(run_at, timedelta):
        return (datetime.now(UTC) + run_at).timestamp()
    if run_at.tzinfo is None:
        raise ApplicationError(
            "run_at is a datetime without a time zone, so its meaning depends on the machine: give it a time zone"
        )
    return run_at.timestamp()
