"""The exception that a caller gets in place of a run: one for each decision of ``core/decision.py``."""

from __future__ import annotations

from oncekey.core.decision import NEWER_VERSION, Busy, Decision, Deferred, Mismatch, TurnedAway, Unknown, Unreadable
from oncekey.core.record import StoredResponse
from oncekey.core.routes import Route
from oncekey.engine.flows import Flow
from oncekey.errors import (
    CallFailed,
    InProgress,
    KeyReused,
    NotExecuted,
    OnceKeyError,
    OperatorError,
    OutcomeUnknown,
    PersonalKey,
    StoreUnavailable,
)
from oncekey.telemetry.redaction import redact
from oncekey.web.responses import busy_seconds


class NotLookedUp(StoreUnavailable):
    """The store did not say whose the key is: it is down, has no tables, or is overloaded. Nothing ran."""

    reason = ""
    """What the store said."""


class NotStored(StoreUnavailable):
    """The work was done, and its end is not stored: call again with the same key."""


class NotComparable(StoreUnavailable):
    """What the row holds cannot be compared or read: a newer version wrote it, or its encryption key is not here.
    Nothing ran."""


class AnswerLost(OutcomeUnknown):
    """The key has ended, and its encryption key is declared lost: whether it stands for this call, and what came of it,
    cannot be known any more. Nothing ran."""


def asked(begin: Flow[Decision], name: str) -> Flow[Decision]:
    """Ask the store by ``begin``. A caller has one thing to do if that fails, whatever the cause: call again later. So
    every failure is a StoreUnavailable."""
    try:
        decision = yield from begin
    except OperatorError as error:
        raised = NotLookedUp(f"{name}: its key cannot be looked up, and nothing ran: {error}")
        raised.reason = str(error)
        raise raised from error
    return decision


def refused(decision: Decision, route: Route, key: str) -> OnceKeyError:
    """Why an attempt does not run. Messages show the key masked."""
    name, policy, masked = route.operation, route.policy, redact(key)
    match decision:
        case Mismatch():
            return KeyReused(
                f"{name}: key {masked} was used for another call, with other arguments. Nothing ran: take a new key "
                "for other work, and the first arguments for a retry. An argument that differs from one try to the "
                "next, such as a time, belongs into @once.function(…, ignore=[…]), which counts for new keys. If a "
                "deploy has renamed a parameter or changed a default, see docs/deploys.md"
            )
        case TurnedAway(personal=found) if found is not None:
            return PersonalKey(
                f"{name}: the key looks like {found.words}, and keys are kept in plain text. Nothing ran: take the id "
                "of a row, or a random UUID that is kept for every retry",
                kind=found,
            )
        case Unknown():
            return OutcomeUnknown(
                f"{name}: an earlier attempt with key {masked} may have happened, so it does not run again until a "
                "resolver or `oncekey keys resolve` settles it. Keep the key"
            )
        case Deferred():
            wait = policy.retry_after.total_seconds()
            return InProgress(f"{name}: a job in the outbox will settle key {masked}", retry_after=wait)
        case Busy(_, lease_left):
            wait = busy_seconds(policy, lease_left)
            return InProgress(
                f"{name}: another attempt with key {masked} is running: call again in {wait:g} s with the same key",
                retry_after=wait,
            )
    if isinstance(decision, Unreadable) and decision.is_lost:
        return AnswerLost(
            f"{name}: a call with key {masked} has ended, and what is kept of it can never be read again, so nothing "
            f"ran: {decision.reason}. Look whether the work was done before you call it with a new key"
        )
    reason = decision.reason if isinstance(decision, Unreadable) else NEWER_VERSION
    return NotComparable(f"{name}: key {masked} cannot be answered, and nothing ran: {reason}")


def rolled_back(name: str) -> NotExecuted:
    return NotExecuted(
        f"{name}: its transaction was rolled back, so nothing happened, and it may be called again. If the function "
        "closes its session or connection itself, let its caller open and close it (docs/functions.md)"
    )


def failed(name: str, answer: StoredResponse) -> CallFailed:
    """The exception for an answer whose status is 400 or more."""
    return CallFailed(
        f"{name}: this key has failed for good, with status {answer.status}. It does not run again with this key",
        status=answer.status,
        body=answer.body or b"",
    )
