"""What a client is told of an attempt without a result: no more than is so, since it acts on it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, OutcomeUnknown, Policy, Refused
from oncekey.core.problems import Answer
from oncekey.core.record import Record
from oncekey.core.states import Effects, Event, State
from oncekey.engine.flows import Finished
from oncekey.engine.known_steps import Steps
from oncekey.engine.operation import Operation
from oncekey.errors import LeaseLost, StoreUnavailable
from oncekey.web.endings import answer_instead, raised
from oncekey.web.responses import marks, refusal
from tests.engine.doubles import RESPONSE, record_of, reservation

ONCE = OnceKey("memory://", scope=SINGLE_TENANT)


def operation(effects: str = "external", *, attempt: int = 1, steps: bool = False, in_doubt: bool = False) -> Operation:
    policy = Policy(effects=effects)  # type: ignore[arg-type]
    kind = Effects.EXTERNAL if in_doubt else policy.effects_kind
    made = Operation(record_of(reservation(effects=kind), attempt=attempt), policy, "tenant-1")
    if steps:
        made.steps = Steps()
        made.begun = True
    return made


def named(answer: Answer | None) -> str:
    """Which problem it is."""
    assert answer is not None
    return str(json.loads(answer.body)["type"]).rpartition(":")[2]


@pytest.mark.parametrize(
    ("error", "of", "event", "told"),
    [
        (NotExecuted(), operation(), "release", "not-executed"),
        (
            NotExecuted(),
            operation(attempt=2),
            "release",
            "not-finished",
        ),  # the first may have charged
        (NotExecuted(), operation("repeatable", attempt=2), "release", "not-finished"),  # or have died
        (NotExecuted(), operation("phased"), "release", "not-executed"),
        (NotExecuted(), operation("phased", steps=True), "release", "not-finished"),  # an earlier step is done
        (NotExecuted(), operation("phased", steps=True, in_doubt=True), "release", "not-finished"),  # its own word
        (LeaseLost(), operation("repeatable"), "release", "not-finished"),  # a step may have found out
        (LeaseLost(), operation("transactional"), "release", "not-executed"),
        (StoreUnavailable("down"), operation("transactional"), "release", "not-executed"),
        (StoreUnavailable("down"), operation("transactional", attempt=2), "release", "not-finished"),
        (StoreUnavailable("down"), operation("repeatable"), "release", "not-finished"),  # it may call others first
        (StoreUnavailable("down"), operation(), "doubt", "outcome-unknown"),
        (StoreUnavailable("down"), operation("phased", steps=True, in_doubt=True), "doubt", "outcome-unknown"),
        (OutcomeUnknown(), operation("repeatable"), "doubt", "outcome-unknown"),
        (Refused("no"), operation(), "discard", "refused"),
        (Refused("no"), operation(attempt=2), "release", "refused-late"),  # the key is the first request's
        (Refused("no"), operation("phased", steps=True), "fail", "refused-late"),
        (Refused("no"), operation("phased", attempt=2, in_doubt=True), "doubt", "outcome-unknown"),
        (Refused("no", status=403), operation("phased", steps=True, in_doubt=True), "doubt", "outcome-unknown"),
    ],
)
def test_after_an_error_of_ours(error: Exception, of: Operation, event: str, told: str) -> None:
    move, answer = raised(of, error, ONCE)
    assert (move.event, named(answer)) == (event, told)


def test_not_executed_of_one_effect_leaves_another_in_doubt() -> None:
    """One effect is in doubt, another was not executed: whether the first happened is still the question (I1)."""
    error = NotExecuted("the fallback refuses connections")
    of = operation("phased", steps=True, in_doubt=True)
    assert of.steps is not None
    of.steps.not_executed = [error, NotExecuted("and the next one")]
    move, answer = raised(of, error, ONCE)
    assert (move.event, named(answer)) == (Event.DOUBT, "outcome-unknown")


def test_other_errors_are_the_frameworks() -> None:
    assert raised(operation(), RuntimeError("a bug"), ONCE)[1] is None


# ---------------------------------------------------------------- the handler ran, and its response was not stored


WANTED = reservation("k-1")
OTHER = reservation("k-1")
DIFFERENT = reservation("k-1", fingerprint=b"g" * 32)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (None, "not-stored"),  # forgotten
        (record_of(OTHER), "in-flight"),  # taken over
        (record_of(WANTED, State.FAILED_RETRYABLE), "not-stored"),  # swept
        (record_of(DIFFERENT), "not-stored"),  # used anew
        (record_of(WANTED, State.UNKNOWN), "outcome-unknown"),
    ],
)
def test_attempt_that_ran_is_never_answered_not_executed(now: Record | None, told: str) -> None:
    answer = answer_instead(Finished(False, now), operation(), WANTED, ONCE)
    assert named(answer) == told
    assert b"not executed." not in answer.body


def test_attempt_that_lost_its_key_gets_the_stored_response() -> None:
    stored = record_of(OTHER, State.COMPLETED, response=RESPONSE)
    assert answer_instead(Finished(False, stored), operation(), WANTED, ONCE).body == RESPONSE.body


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (operation("transactional"), "not-executed"),
        (operation("transactional", attempt=2), "not-finished"),
        (operation("repeatable"), "not-finished"),
        (operation("phased", steps=True), "not-finished"),
    ],
)
def test_rolled_back_transaction_is_answered_not_executed(of: Operation, told: str) -> None:
    swept = record_of(WANTED, State.FAILED_RETRYABLE)
    assert named(answer_instead(Finished(False, swept, undone=True), of, WANTED, ONCE)) == told


# ---------------------------------------------------------------- on every answer


def test_unknown_key_has_no_expires_header() -> None:
    """A date would be in the past one day, and the key still there."""
    record = record_of(WANTED)
    assert [name for name, _ in marks(b"k-1", record)] == [b"idempotency-key", b"idempotency-expires"]
    assert [name for name, _ in marks(b"k-1", replace(record, state=State.UNKNOWN))] == [b"idempotency-key"]


def test_a_fault_can_be_named() -> None:
    """Governance: each has an id of its own, to be found again."""
    spoken = OnceKey("memory://", scope=SINGLE_TENANT, profile="governance")
    first, second = (json.loads(refusal(spoken, "in-flight").body)["fault"]["faultId"] for _ in range(2))  # type: ignore[arg-type]
    assert first != second
    assert len(first) == 32
