"""Functions that resume a request: what they are given, how their end is judged, and operations without one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from oncekey import NotExecuted, OnceKey, OutcomeUnknown, Policy, current
from oncekey.core.record import StoredResponse
from oncekey.core.states import State
from oncekey.core.swaps import LONGEST_RESUME_SECONDS, RESUME_SECONDS
from oncekey.engine.flows import Finished, Flow
from oncekey.engine.resumption import Answer, Resumption
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.outbox import Response
from oncekey.upkeep import Resumer, Upkeep
from oncekey.upkeep.resumer import NO_FUNCTION_SECONDS
from oncekey.upkeep.unreadable import LEFT_SECONDS
from tests.upkeep.half_done import Function, counts, finishes, half_done, phased, raises, resume
from tests.upkeep.key_store import OPERATION, KeyStore

# -- what the function is given, and what it returns -------------------------------------------------------------------


def test_function_is_given_the_operation(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    seen: list[Any] = []

    async def go_on(op: Resumption) -> Answer:
        remembered = await op.effect("charge", lambda: {"id": "a second charge"}, repeatable=False)
        new = await op.effect("mail", lambda: {"sent": True}, repeatable=True)
        seen.extend([current() is op, op.scope, op.key, op.name, op.request, op.result("charge"), op.result("nothing")])
        seen.append(op.downstream_key("charge"))
        return 201, [remembered, new]

    assert resume(phased(rows), go_on) == {"due": 1, "completed": 1}
    assert seen[:-1] == [True, "single-tenant", record.key, OPERATION, None, {"id": "ch_1"}, None]
    response = rows.get(record).response
    assert response is not None
    assert response.body == b'[{"id":"ch_1"},{"sent":true}]'


def test_plain_function_has_the_blocking_verbs(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)

    def go_on(op: Resumption) -> Answer:
        assert current() is op
        return Response(201, op.blocking.effect("charge", lambda: "a second charge", repeatable=False))

    assert resume(phased(rows), go_on) == {"due": 1, "completed": 1}
    response = rows.get(record).response
    assert response is not None
    assert response.body == b'{"id":"ch_1"}'


def test_step_that_was_neither_taken_nor_read_comes_first(rows: KeyStore) -> None:
    """As in a handler: a new step in front of one that is done means that the order has changed. Reading counts."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)

    def go_on(op: Resumption) -> Answer:
        if op.attempt == 3:
            op.result("charge")
        return 201, op.blocking.effect("mail", lambda: "sent", repeatable=True)

    once = phased(rows)
    assert resume(once, go_on) == {"due": 1, "retryable": 1}
    assert "comes before" in (rows.get(record).last_error or "")
    rows.age(LONGEST_RESUME_SECONDS)
    assert resume(once) == {"due": 1, "completed": 1}


def test_scope_is_the_tenant_where_keys_are_per_endpoint(rows: KeyStore) -> None:
    half_done(rows, scope=f"acme\x1f{OPERATION}")
    rows.age(RESUME_SECONDS + 1)
    seen: list[str] = []
    resume(phased(rows, key_per="endpoint"), counts(seen))
    assert seen == ["acme"]


def test_response_is_kept_whole(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    resume(phased(rows), lambda op: Response(201, {"id": 1}, headers={"X-Ride": "7"}))
    response = rows.get(record).response
    assert response == StoredResponse(201, (("x-ride", "7"), ("content-type", "application/json")), b'{"id":1}')


def raises_in_effect(repeatable: bool) -> Function:
    def go_on(op: Resumption) -> Answer:
        assert op.result("charge") == {"id": "ch_1"}
        op.blocking.effect("mail", raises(ConnectionError("cut")), op, repeatable=repeatable)
        return 201, None

    return go_on


async def forgets_to_await(op: Resumption) -> Answer:
    op.effect("mail", lambda: None, repeatable=True)  # type: ignore[unused-coroutine]
    return 201, None


@pytest.mark.parametrize(
    ("function", "state", "ended"),
    [
        (lambda op: (402, {"error": "declined"}), State.FAILED, "failed"),
        (lambda op: (503, None), State.FAILED_RETRYABLE, "retryable"),
        (lambda op: (429, None), State.FAILED_RETRYABLE, "retryable"),
        (raises(ValueError("no")), State.FAILED_RETRYABLE, "retryable"),
        (raises(NotExecuted("closed")), State.FAILED_RETRYABLE, "retryable"),
        (raises(OutcomeUnknown("cut")), State.UNKNOWN, "unknown"),
        (raises_in_effect(True), State.FAILED_RETRYABLE, "retryable"),
        (raises_in_effect(False), State.UNKNOWN, "unknown"),
        (lambda op: {"id": 1}, State.FAILED_RETRYABLE, "retryable"),
        (forgets_to_await, State.FAILED_RETRYABLE, "retryable"),
    ],
)
def test_end_is_judged_as_a_handlers(rows: KeyStore, function: Function, state: State, ended: str) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    assert resume(phased(rows), function) == {"due": 1, ended: 1}
    found = rows.get(record)
    assert (found.state, found.attempt, found.has_steps) == (state, 2, True)
    if state is not State.FAILED:
        assert "ResumeFailed" in rows.names()


def test_raise_is_logged_with_its_traceback(rows: KeyStore, caplog: pytest.LogCaptureFixture) -> None:
    half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    resume(phased(rows), raises(ValueError("the bug")))
    (line,) = [line for line in caplog.records if "ResumeFailed" in line.message]
    assert line.levelno == logging.WARNING
    assert line.exc_text is not None
    assert "\nValueError" in line.exc_text


def test_async_function_that_takes_too_long_is_cancelled(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)

    async def hangs(op: Resumption) -> Answer:
        await asyncio.Event().wait()
        return 201, None

    assert resume(phased(rows), hangs, timeout=0.05) == {"due": 1, "retryable": 1}
    assert "took longer than 0.05 s" in (rows.get(record).last_error or "")


def test_function_that_runs_past_max_run_is_left_to_its_lease(rows: KeyStore) -> None:
    """As a handler: its lease is no longer renewed, and it is cancelled."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    cancelled: list[bool] = []

    async def hangs(op: Resumption) -> Answer:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        return 201, None

    once = phased(rows, max_run=timedelta(seconds=0.1))
    assert resume(once, hangs) == {"due": 1}
    assert (rows.get(record).state, cancelled) == (State.IN_PROGRESS, [True])
    assert "RanTooLong" in rows.names()
    assert once.engine.keeper._live == {}


@pytest.mark.parametrize("status", [201, 503])
def test_end_that_the_store_cannot_take_is_kept_by_the_keeper(
    rows: KeyStore, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is done, and the store is away for a moment: nothing is done again."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = phased(rows)
    move, away = once.engine.move, threading.Event()

    def try_to_move(*how: Any) -> Flow[Finished]:
        if away.is_set():
            raise StoreUnavailable("the store is away")
        return (yield from move(*how))

    def go_on(op: Resumption) -> Answer:
        away.set()
        return status, None

    monkeypatch.setattr(once.engine, "move", try_to_move)
    assert resume(once, go_on) == {"due": 1}
    assert rows.get(record).state is State.IN_PROGRESS
    away.clear()
    once.engine.keeper.look()
    assert rows.get(record).state is (State.COMPLETED if status == 201 else State.FAILED_RETRYABLE)


def test_lease_is_not_renewed_after_an_unexpected_error_at_the_end(
    rows: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the keeper would hold the key for as long as the process lives."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = phased(rows)

    def break_down(*how: Any) -> Flow[Finished]:
        raise AssertionError("a bug in the store")

    def go_on(op: Resumption) -> Answer:
        monkeypatch.setattr(once.engine, "move", break_down)
        return 201, None

    assert resume(once, go_on) == {"due": 1}
    assert rows.get(record).state is State.IN_PROGRESS
    assert once.engine.keeper._live == {}


# -- no function, no phases --------------------------------------------------------------------------------------------


def test_process_without_the_function_leaves_the_key_to_one_that_has_it(rows: KeyStore) -> None:
    """Two apps on one store: what is due stays due, and costs no try."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    other = phased(rows)
    other.resume("POST /other", finishes)
    assert resume(other) == {"due": 1, "left": 1}
    assert resume(phased(rows), finishes) == {"due": 1, "completed": 1}
    assert rows.get(record).state is State.COMPLETED


def test_operation_without_a_function_is_put_off(rows: KeyStore) -> None:
    """Its keys must not stand in front of the others, and a deploy may bring a function."""
    record = half_done(rows, operation="POST /other")
    rows.age(RESUME_SECONDS + LEFT_SECONDS + 1)
    once = phased(rows)
    assert resume(once, finishes) == {"due": 1, "left": 1}
    assert resume(once) == {}
    found = rows.get(record)
    assert (found.state, found.attempt, found.reconcile_tries) == (State.FAILED_RETRYABLE, 1, 0)
    assert (found.owner, found.last_error) == (record.owner, "it fell")
    rows.age(NO_FUNCTION_SECONDS)
    once.resume("POST /{name}", finishes)
    assert resume(once) == {"due": 1, "completed": 1}


def test_without_any_function_nothing_is_looked_for(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    assert resume(phased(rows)) == {}
    assert rows.get(record).reconcile_at == record.reconcile_at or rows.kind == "postgresql"


@pytest.mark.parametrize("effects", ["external", "transactional", "repeatable"])
def test_route_that_is_not_phased_any_more_is_not_resumed(
    rows: KeyStore, effects: Any, caplog: pytest.LogCaptureFixture
) -> None:
    records = [half_done(rows) for _ in range(2)]
    rows.age(RESUME_SECONDS + 1)
    calls: list[str] = []
    assert resume(rows.once(effects=effects), counts(calls)) == {"due": 2, "left": 2}
    assert (calls, rows.states(records)) == ([], [State.FAILED_RETRYABLE] * 2)
    (line,) = [line for line in caplog.records if "not declared so here" in line.message]
    assert line.levelno == logging.WARNING
    assert OPERATION in line.message


def test_exempt_route_is_not_resumed(rows: KeyStore, caplog: pytest.LogCaptureFixture) -> None:
    half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = OnceKey(rows.store, scope=lambda _: "", policy=Policy(effects="phased"), routes={OPERATION: None})
    try:
        assert resume(once, finishes) == {"due": 1, "left": 1}
    finally:
        once.engine.keeper.close(1.0)
        once.engine.router.close(1.0)
    assert "not declared so here" in caplog.text


def test_policy_that_only_the_app_knows_is_given_with_the_function(rows: KeyStore) -> None:
    """@once.policy declares it at the handler, and this process does not start the app."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = rows.once()  # external
    seen: list[float] = []

    @once.resume(OPERATION, policy=Policy(effects="phased", lease=timedelta(seconds=45)))
    def go_on(op: Resumption) -> Answer:
        seen.append(op.policy.lease_seconds)
        return 201, None

    assert resume(once) == {"due": 1, "completed": 1}
    assert (seen, rows.get(record).state) == ([45.0], State.COMPLETED)
    with pytest.raises(ConfigurationError, match="only a phased route can be resumed"):
        once.resume("POST /other", go_on, policy=Policy())


def test_policy_of_the_app_counts_before_the_one_given_with_the_function(rows: KeyStore) -> None:
    """A deploy declares the route otherwise: what was given for another process is not more than that."""
    half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = rows.once()
    once.declarations.policies[OPERATION] = Policy(effects="repeatable")
    once.resume(OPERATION, finishes, policy=Policy(effects="phased"))
    assert resume(once) == {"due": 1, "left": 1}


# -- registering -------------------------------------------------------------------------------------------------------


def test_invalid_resume_function_is_refused() -> None:
    once = OnceKey("memory://", scope=lambda _: "t")

    @once.resume("POST /rides")
    async def go_on(op: Resumption) -> Answer:
        return 201, None

    registered: Callable[[Resumption], Awaitable[Answer]] = once.resume("post /rides/{id}", go_on)
    assert registered is go_on
    assert list(once.resumes) == ["POST /rides", "POST /rides/{id}"]
    with pytest.raises(ConfigurationError, match="has a resume function already"):
        once.resume("POST /rides", go_on)
    with pytest.raises(ConfigurationError, match="neither of the form 'POST /path', nor"):
        once.resume("POST rides", go_on)
    with pytest.raises(ConfigurationError, match="takes a function"):
        once.resume("POST /x", 7)  # type: ignore[call-overload]
    for wrong in ({"concurrency": 0}, {"timeout": 0}, {"max_tries": 0}):
        with pytest.raises(ConfigurationError, match="more than 0"):
            Resumer(once, **wrong)
    with pytest.raises(ConfigurationError, match="resume_every"):
        Upkeep(once, resume_every=0)
