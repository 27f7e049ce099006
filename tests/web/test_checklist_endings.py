"""The checklists' lines about how handlers end, over HTTP: every store, both frameworks (tests/web/conftest.py)."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import NotExecuted, OutcomeUnknown, Policy, Refused, current
from oncekey.core.states import State
from tests.web.apps import MakeApi, World, raising, same
from tests.web.checks import assert_state

# ---------------------------------------------------------------- a handler returns


RUNS_AGAIN = [
    Policy(effects="transactional"),
    Policy(effects="phased"),
    Policy(effects="repeatable"),
    Policy(effects="external", on_server_error="retry"),
]


@pytest.mark.parametrize("policy", RUNS_AGAIN, ids=["transactional", "phased", "repeatable", "external-retry"])
async def test_500_then_retry_runs_again(make_api: MakeApi, world: World, policy: Policy) -> None:
    """A returned 500 is not stored: the retry runs, as attempt 2, and its answer is the one that stays."""

    def respond(request: Request, run: int) -> Response:
        return JSONResponse({"attempt": current().attempt}, 500 if run == 1 else 201)

    api = make_api(respond, policy=policy)
    first = await api.post()
    assert (first.status_code, first.json()) == (500, {"attempt": 1})
    assert_state(world, State.FAILED_RETRYABLE)
    second = await api.post()
    assert (second.status_code, second.json()) == (201, {"attempt": 2})
    assert same(second, await api.post())
    assert api.runs == 2


@pytest.mark.parametrize("status", [408, 500, 504])
async def test_5xx_of_an_external_handler_makes_the_key_unknown(make_api: MakeApi, world: World, status: int) -> None:
    """``except TimeoutError: return JSONResponse(…, 504)`` says nothing about the charge before it."""
    api = make_api(lambda request, run: JSONResponse({"run": run}, status))
    assert [(await api.post()).status_code for _ in range(3)] == [status, 409, 409]
    assert_state(world, State.UNKNOWN)
    assert api.runs == 1


async def test_not_executed_before_a_returned_5xx_makes_the_key_retryable(make_api: MakeApi, world: World) -> None:
    """``op.not_executed()``: the handler knows that nothing happened, and has an answer of its own."""

    def respond(request: Request, run: int) -> Response:
        if run == 1:
            current().not_executed()
            return JSONResponse({"error": "the bank is closed"}, 503)
        return JSONResponse({"attempt": current().attempt}, 201)

    api = make_api(respond)
    first = await api.post()
    assert (first.status_code, first.json()) == (503, {"error": "the bank is closed"})
    assert_state(world, State.FAILED_RETRYABLE)
    assert (await api.post()).json() == {"attempt": 2}


async def test_4xx_is_stored_and_replayed(make_api: MakeApi, world: World) -> None:
    """A client's error is final: the request has to change, and a changed one takes a new key."""
    api = make_api(lambda request, run: JSONResponse({"run": run}, int(request.query_params["status"])))
    for run, status in enumerate([400, 401, 402, 403, 404, 409, 418, 422, 451], start=1):
        key, path = f"k-{status}", f"/payments?status={status}"
        first = await api.post(key, path)
        assert first.status_code == status
        assert same(first, await api.post(key, path))
        assert api.runs == run
        assert_state(world, State.FAILED, key)


@pytest.mark.parametrize("named", [None, {401, 408, 503}])
async def test_retryable_status_is_not_stored(make_api: MakeApi, world: World, named: set[int] | None) -> None:
    """425 and 429 mean "not processed", and so does what a route names: the same request may run later."""

    def respond(request: Request, run: int) -> Response:
        first = current().attempt == 1
        return JSONResponse({"run": run}, int(request.query_params["status"]) if first else 201)

    statuses = frozenset(named or {425, 429})
    api = make_api(respond, policy=Policy(retryable_statuses=statuses))
    assert named is not None or Policy().retryable_statuses == statuses
    for status in sorted(statuses):
        key, path, before = f"k-{status}", f"/payments?status={status}", api.runs
        assert (await api.post(key, path)).status_code == status
        assert_state(world, State.FAILED_RETRYABLE, key)
        second = await api.post(key, path)
        assert (second.status_code, second.json()) == (201, {"run": before + 2})
        assert same(second, await api.post(key, path))
        assert api.runs == before + 2


async def test_final_client_errors_can_be_switched_off(make_api: MakeApi) -> None:
    """``final_client_errors=False``: a 404 may become something else under the same key."""
    api = make_api(
        lambda request, run: JSONResponse({"run": run}, 404 if run == 1 else 201),
        policy=Policy(final_client_errors=False),
    )
    assert [(await api.post()).status_code for _ in range(3)] == [404, 201, 201]
    assert api.runs == 2


@pytest.mark.parametrize(
    ("on_server_error", "state", "second", "runs"),
    [
        ("auto", State.UNKNOWN, 409, 1),
        ("retry", State.FAILED_RETRYABLE, 201, 2),
        ("replay", State.FAILED, 500, 1),
        ("unknown", State.UNKNOWN, 409, 1),
    ],
)
async def test_on_server_error_decides_a_returned_500(
    make_api: MakeApi, world: World, on_server_error: Any, state: State, second: int, runs: int
) -> None:
    api = make_api(
        lambda request, run: JSONResponse({"run": run}, 500 if run == 1 else 201),
        policy=Policy(on_server_error=on_server_error),
    )
    first = await api.post()
    assert first.status_code == 500
    assert_state(world, state)
    answer = await api.post()
    assert answer.status_code == second
    assert api.runs == runs
    if on_server_error == "replay":
        assert same(first, answer)


# ---------------------------------------------------------------- a handler raises


class Declined(Exception):
    """An error of an app's own, for which it has a handler."""


def with_handler(app: Any) -> None:
    app.add_exception_handler(Declined, lambda request, error: JSONResponse({"error": "declined"}, 502))


RAISED = [RuntimeError, lambda: HTTPException(503), Declined]


@pytest.mark.parametrize("error", RAISED, ids=["unhandled", "http-exception", "own-handler"])
async def test_exception_makes_the_key_of_external_effects_unknown(make_api: MakeApi, world: World, error: Any) -> None:
    """The handler may have charged the card: no second run, whatever the framework made of the error."""
    api = make_api(raising(error), prepare=with_handler)
    assert (await api.post()).status_code >= 500
    assert_state(world, State.UNKNOWN)
    retry = await api.post()
    assert retry.status_code == 409
    assert retry.json()["type"] == "urn:oncekey:problem:outcome-unknown"
    assert int(retry.headers["retry-after"]) >= 1
    assert "Keep the key" in retry.json()["detail"]
    assert api.runs == 1


@pytest.mark.parametrize("error", RAISED, ids=["unhandled", "http-exception", "own-handler"])
@pytest.mark.parametrize("effects", ["repeatable", "transactional"])
async def test_exception_is_retryable_where_a_second_run_is_harmless(
    make_api: MakeApi, world: World, effects: Any, error: Any
) -> None:
    """Repeatable and transactional work is simply done again."""
    api = make_api(raising(error), policy=Policy(effects=effects), prepare=with_handler)
    assert (await api.post()).status_code >= 500
    assert_state(world, State.FAILED_RETRYABLE)
    assert (await api.post()).json() == {"attempt": 2}
    assert same(await api.post(), await api.post())
    assert api.runs == 2


async def test_a_raised_4xx_is_stored_and_replayed(make_api: MakeApi, world: World) -> None:
    """A framework's exception for a client's error is final like a returned one."""
    api = make_api(raising(lambda: HTTPException(404, "no such account")))
    first = await api.post()
    assert first.status_code == 404
    assert same(first, await api.post())
    assert api.runs == 1
    assert_state(world, State.FAILED)


@pytest.mark.parametrize("effects", ["external", "repeatable"])
async def test_not_executed_is_always_retryable(make_api: MakeApi, world: World, effects: Any) -> None:
    """``raise NotExecuted``: 503 that says so, and the retry runs."""
    api = make_api(raising(lambda: NotExecuted("the bank is closed")), policy=Policy(effects=effects))
    first = await api.post()
    assert first.status_code == 503
    assert first.json()["type"] == "urn:oncekey:problem:not-executed"
    assert "retry-after" in first.headers
    assert_state(world, State.FAILED_RETRYABLE)
    assert (await api.post()).json() == {"attempt": 2}


@pytest.mark.parametrize("effects", ["external", "repeatable"])
async def test_outcome_unknown_is_always_unknown(make_api: MakeApi, world: World, effects: Any) -> None:
    """``raise OutcomeUnknown``: 409 now and for every retry, whatever the effects."""
    api = make_api(raising(lambda: OutcomeUnknown("no answer")), policy=Policy(effects=effects))
    for _ in range(2):
        answer = await api.post()
        assert answer.status_code == 409
        assert answer.json()["type"] == "urn:oncekey:problem:outcome-unknown"
    assert api.runs == 1
    record = assert_state(world, State.UNKNOWN)
    assert record.reconcile_at is not None


@pytest.mark.parametrize("status", [400, 422])
async def test_refused_leaves_the_key_unused(make_api: MakeApi, world: World, status: int) -> None:
    """``raise Refused``: the request is turned away, and its corrected form may use the same key."""
    api = make_api(raising(lambda: Refused("amount is missing", status=status)))
    first = await api.post(body={"currency": "EUR"})
    assert first.status_code == status
    assert "amount is missing" in first.json()["detail"]
    assert world.rows() == 0
    assert (await api.post()).json() == {"attempt": 1}


async def test_refused_after_the_operation_began_keeps_the_row(make_api: MakeApi, world: World) -> None:
    """A handler that has used a verb has begun: the trace of it is not thrown away with the key."""

    def respond(request: Request, run: int) -> Response:
        current().downstream_key("charge")
        raise Refused("too late")

    api = make_api(respond)
    first = await api.post()
    assert (first.status_code, first.json()["type"]) == (422, "urn:oncekey:problem:refused-late")
    assert_state(world, State.FAILED)
    assert same(first, await api.post())
    assert api.runs == 1


async def test_refused_at_a_later_attempt_does_not_call_the_key_unused(make_api: MakeApi, world: World) -> None:
    """The key stands for the first request: what is corrected needs another one, and the answer says so."""

    def respond(request: Request, run: int) -> Response:
        raise NotExecuted if run == 1 else Refused("Sold out", status=409)

    api = make_api(respond)
    assert (await api.post()).status_code == 503
    second = await api.post()
    assert (second.status_code, second.json()["type"]) == (409, "urn:oncekey:problem:refused-late")
    assert second.json()["detail"].startswith("Sold out. The key stands for this request")
    assert_state(world, State.FAILED_RETRYABLE)
    assert (await api.post(body={"corrected": True})).status_code == 422
