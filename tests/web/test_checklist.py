"""The checklists of the seeds, line by line, over HTTP: every store, both frameworks (tests/web/conftest.py)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import NotExecuted, OutcomeUnknown, Policy, Refused, current
from oncekey.core.states import State
from tests.web.apps import ONE, PAYMENT, Api, Gate, World, paid, same, soon, until

MakeApi = Callable[..., Api]


def held(gate: Gate, answer: Callable[[Request, int], Response] = paid) -> Callable[[Request, int], Any]:
    """A handler that waits in a gate before it answers."""

    async def respond(request: Request, run: int) -> Response:
        await gate.wait()
        return answer(request, run)

    return respond


# ---------------------------------------------------------------- the same request twice


async def test_identical_twice_gives_identical_bytes_and_one_effect(make_api: MakeApi) -> None:
    """The second answer is the first one again, and the handler ran once."""
    api = make_api()
    first = await api.post()
    second = await api.post()
    assert first.status_code == 201
    assert same(first, second)
    assert api.runs == 1
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"


async def test_two_replays_in_a_row_are_equal(make_api: MakeApi) -> None:
    """A replay changes nothing that the next one would show."""
    api = make_api()
    await api.post()
    second, third = await api.post(), await api.post()
    assert second.content == third.content
    assert second.headers.multi_items() == third.headers.multi_items()
    assert api.runs == 1


@pytest.mark.parametrize(
    "other",
    [
        b'{"currency":"EUR","amount":1000}',
        b'{\n  "amount" : 1000,\n  "currency" : "EUR"\n}',
        b'{"amount":1e3,"curr\\u0065ncy":"EUR"}',
    ],
    ids=["order", "white-space", "spelling"],
)
async def test_key_order_and_white_space_replay(make_api: MakeApi, other: bytes) -> None:
    """The same JSON, written differently, is the same request."""
    api = make_api()
    first = await api.post()
    second = await api.post(content=other, headers={"content-type": "application/json"})
    assert same(first, second)
    assert api.runs == 1


async def test_the_same_key_quoted_and_bare_is_one_key(make_api: MakeApi, world: World) -> None:
    """The spelling of RFC 8941 and the one of Stripe name the same key."""
    api = make_api()
    first = await api.post("k-1")
    second = await api.post('"k-1"')
    assert first.content == second.content
    assert second.headers["idempotency-replayed"] == "true"
    assert (api.runs, world.rows()) == (1, 1)


# ---------------------------------------------------------------- another request under the same key


@pytest.mark.parametrize(
    "other",
    [
        {"body": PAYMENT | {"amount": 2000}},
        {"path": "/refunds"},
        {"path": "/payments?dry=1"},
        {"method": "PATCH"},
        {"content": json.dumps(PAYMENT).encode(), "headers": {"content-type": "text/plain"}},
    ],
    ids=["body", "path", "query", "method", "media-type"],
)
async def test_another_request_under_the_same_key_is_422(make_api: MakeApi, other: dict[str, Any]) -> None:
    """A key that comes back with a different request is refused, and the first answer stays."""
    api = make_api()
    first = await api.post()
    refused = await api.post(**other)
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["type"] == "urn:oncekey:problem:mismatch"
    assert first.content not in refused.content
    assert api.runs == 1
    assert same(first, await api.post())


@pytest.mark.parametrize("in_flight", ["conflict", "wait"])
async def test_another_body_is_422_also_while_the_first_is_in_flight(make_api: MakeApi, in_flight: Any) -> None:
    """422 wins over 409: whoever misuses a key learns that, and not that it should come again."""
    gate = Gate()
    api = make_api(held(gate), policy=Policy(in_flight=in_flight))
    first = api.start()
    await soon(gate.entered.wait())
    refused = await api.post(body=PAYMENT | {"amount": 2000})
    assert refused.status_code == 422
    assert "retry-after" not in refused.headers
    gate.go.set()
    assert (await first).status_code == 201
    assert api.runs == 1


# ---------------------------------------------------------------- at once


async def test_50_at_once_one_effect_and_the_others_409_with_retry_after(make_api: MakeApi) -> None:
    """Of 50 duplicates one runs; the others are told at once to come again, and then get its answer."""
    gate = Gate()
    api = make_api(held(gate), policy=Policy(retry_after=timedelta(seconds=3)))
    tasks = [api.start() for _ in range(50)]
    await until(lambda: sum(task.done() for task in tasks) == 49, "49 answers while the first still runs")
    gate.go.set()
    answers = [await task for task in tasks]
    assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 49}
    refused = [answer for answer in answers if answer.status_code == 409]
    assert {answer.headers["retry-after"] for answer in refused} == {"3"}
    assert {answer.json()["type"] for answer in refused} == {"urn:oncekey:problem:in-flight"}
    assert "Keep the key" in refused[0].json()["detail"]
    assert api.runs == 1
    winner = next(answer for answer in answers if answer.status_code == 201)
    assert same(winner, await api.post())


async def test_50_at_once_in_wait_mode_all_get_the_same_answer(make_api: MakeApi) -> None:
    """With ``in_flight="wait"`` 50 duplicates get one answer, of one run."""
    gate = Gate()
    api = make_api(held(gate), policy=Policy(in_flight="wait"))
    tasks = [api.start() for _ in range(50)]
    await soon(gate.entered.wait())
    gate.go.set()
    answers = [await task for task in tasks]
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id":"pay_1"}')}
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 49
    assert api.runs == 1


async def test_waiting_ends_with_a_409(make_api: MakeApi) -> None:
    """Who waits gives up after the policy's time, and the first request is not disturbed."""
    gate = Gate()
    api = make_api(held(gate), policy=Policy(in_flight="wait", wait=timedelta(seconds=0.1)))
    first = api.start()
    await soon(gate.entered.wait())
    late = await api.post()
    assert late.status_code == 409
    assert "retry-after" in late.headers
    gate.go.set()
    assert (await first).status_code == 201
    assert api.runs == 1


async def test_a_waiter_runs_when_the_first_gave_the_key_back(make_api: MakeApi) -> None:
    """Waiters are woken by a key that was given back too: one of them is the next attempt."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        if run == 1:
            await gate.wait()
            return JSONResponse({"error": "try again"}, 500)
        return JSONResponse({"attempt": current().attempt}, 201)

    api = make_api(respond, policy=Policy(in_flight="wait"))
    first = api.start()
    await soon(gate.entered.wait())
    waiters = [api.start() for _ in range(5)]
    gate.go.set()
    assert (await first).status_code == 500
    assert {(answer.status_code, answer.content) for answer in [await waiter for waiter in waiters]} == {
        (201, b'{"attempt":2}')
    }
    assert api.runs == 2


async def test_a_waiter_begins_anew_when_the_first_was_refused(make_api: MakeApi, world: World) -> None:
    """A discarded key is free: the waiter is its first attempt."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        if run == 1:
            await gate.wait()
            raise Refused("not today")
        return JSONResponse({"attempt": current().attempt}, 201)

    api = make_api(respond, policy=Policy(in_flight="wait"))
    first = api.start()
    await soon(gate.entered.wait())
    waiter = api.start()
    gate.go.set()
    assert (await first).status_code == 422
    assert (await waiter).json() == {"attempt": 1}
    assert (api.runs, world.rows()) == (2, 1)


# ---------------------------------------------------------------- whose key, and of what


def by_user(request: Any) -> str:
    tenant: str = request.headers["x-user"]
    return tenant


async def test_two_tenants_one_key_two_results(make_api: MakeApi) -> None:
    """The same key of two tenants is two keys: neither sees, blocks or changes the other."""
    api = make_api(scope=by_user)
    ann = await api.post(headers={"x-user": "ann"})
    bob = await api.post(headers={"x-user": "bob"}, body=PAYMENT | {"amount": 5})
    assert (ann.status_code, bob.status_code, api.runs) == (201, 201, 2)
    assert ann.content != bob.content
    assert same(ann, await api.post(headers={"x-user": "ann"}))
    assert same(bob, await api.post(headers={"x-user": "bob"}, body=PAYMENT | {"amount": 5}))


async def test_a_tenant_is_not_blocked_by_anothers_request_in_flight(make_api: MakeApi) -> None:
    """A key in flight for one tenant is free for the other."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        if request.headers["x-user"] == "ann":
            await gate.wait()
        return paid(request, run)

    api = make_api(respond, scope=by_user)
    ann = api.start(headers={"x-user": "ann"})
    await soon(gate.entered.wait())
    assert (await api.post(headers={"x-user": "bob"})).status_code == 201
    gate.go.set()
    assert (await ann).status_code == 201


async def test_one_key_on_two_endpoints_is_a_mismatch_per_tenant(make_api: MakeApi) -> None:
    """``key_per="tenant"``, the default: a key is one operation of a tenant, as with Stripe."""
    api = make_api(policy=Policy(key_per="tenant"))
    assert (await api.post(path="/payments")).status_code == 201
    assert (await api.post(path="/refunds")).status_code == 422
    assert api.runs == 1


async def test_one_key_on_two_endpoints_is_two_keys_per_endpoint(make_api: MakeApi, world: World) -> None:
    """``key_per="endpoint"``: endpoints are independent, and each replays its own."""
    api = make_api(policy=Policy(key_per="endpoint"))
    payment, refund = await api.post(path="/payments"), await api.post(path="/refunds")
    assert (payment.status_code, refund.status_code, api.runs) == (201, 201, 2)
    assert same(payment, await api.post(path="/payments"))
    assert same(refund, await api.post(path="/refunds"))
    assert (api.runs, world.rows()) == (2, 2)


# ---------------------------------------------------------------- which requests need a key


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_no_key_is_400(make_api: MakeApi, world: World, method: str) -> None:
    """A state-changing request without a key is refused, and says what to send."""
    api = make_api()
    answer = await api.post(None, method=method)
    assert answer.status_code == 400
    assert answer.json()["type"] == "urn:oncekey:problem:key-missing"
    assert 'rel="describedby"' in answer.headers["link"]
    assert (api.runs, world.rows()) == (0, 0)


@pytest.mark.parametrize("key", [None, "k-1"])
async def test_idempotent_methods_need_no_key_and_are_left_alone(
    make_api: MakeApi, world: World, key: str | None
) -> None:
    """GET, HEAD, OPTIONS, PUT and DELETE work without a key, and with one they run every time."""
    api = make_api()
    for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE"):
        for _ in range(2):
            before = api.runs
            answer = await api.post(key, method=method)
            assert (answer.status_code, api.runs) == (201, before + 1)
            assert "idempotency-key" not in answer.headers
            assert "idempotency-expires" not in answer.headers
    assert world.rows() == 0


async def test_a_route_that_asks_is_protected_and_an_exempt_one_is_not(make_api: MakeApi, world: World) -> None:
    """Routes say it for themselves: PUT with a key runs once, an exempt POST every time."""
    api = make_api(routes={"PUT /payments": Policy(), "POST /refunds": None})
    assert same(await api.post(method="PUT"), await api.post(method="PUT"))
    assert api.runs == 1
    assert (await api.post(None, method="PUT")).status_code == 400
    assert (await api.post(None, "/refunds")).content != (await api.post(None, "/refunds")).content
    assert (api.runs, world.rows()) == (3, 1)


async def test_where_a_key_is_not_required_it_still_protects(make_api: MakeApi, world: World) -> None:
    """``required=False``: without a key it runs unprotected, with one it runs once."""
    api = make_api(policy=Policy(required=False))
    assert (await api.post(None)).status_code == 201
    assert (world.rows(), api.runs) == (0, 1)
    assert same(await api.post(), await api.post())
    assert api.runs == 2


# ---------------------------------------------------------------- how handlers end


async def test_500_then_retry_runs_again(make_api: MakeApi, world: World) -> None:
    """A returned 500 is not stored: the retry runs, as attempt 2, and its answer is the one that stays."""

    def respond(request: Request, run: int) -> Response:
        return JSONResponse({"attempt": current().attempt}, 500 if run == 1 else 201)

    api = make_api(respond)
    first = await api.post()
    assert (first.status_code, first.json()) == (500, {"attempt": 1})
    assert_state(world, State.FAILED_RETRYABLE)
    second = await api.post()
    assert (second.status_code, second.json()) == (201, {"attempt": 2})
    assert same(second, await api.post())
    assert api.runs == 2


async def test_4xx_is_stored_and_replayed(make_api: MakeApi, world: World) -> None:
    """A client's error is final: the request has to change, and a changed one takes a new key."""
    api = make_api(lambda request, run: JSONResponse({"run": run}, int(request.query_params["status"])))
    for run, status in enumerate([400, 402, 404, 409, 418, 422, 451], start=1):
        key, path = f"k-{status}", f"/payments?status={status}"
        first = await api.post(key, path)
        assert first.status_code == status
        assert same(first, await api.post(key, path))
        assert api.runs == run
        assert_state(world, State.FAILED, key)


async def test_what_says_nothing_about_the_operation_is_not_stored(make_api: MakeApi, world: World) -> None:
    """401, 403, 408, 425 and 429 are about who, when and how often: the same request may run later."""

    def respond(request: Request, run: int) -> Response:
        first = current().attempt == 1
        return JSONResponse({"run": run}, int(request.query_params["status"]) if first else 201)

    api = make_api(respond)
    for status in (401, 403, 408, 425, 429):
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


class Declined(Exception):
    """An error of an app's own, for which it has a handler."""


def with_handler(app: Any) -> None:
    app.add_exception_handler(Declined, lambda request, error: JSONResponse({"error": "declined"}, 502))


def raising(error: Callable[[], Exception]) -> Callable[[Request, int], Response]:
    def respond(request: Request, run: int) -> Response:
        if run == 1:
            raise error()
        return JSONResponse({"attempt": current().attempt}, 201)

    return respond


RAISED = [RuntimeError, lambda: HTTPException(503), Declined]


@pytest.mark.parametrize("error", RAISED, ids=["unhandled", "http-exception", "own-handler"])
async def test_raised_is_unknown_where_effects_are_external(make_api: MakeApi, world: World, error: Any) -> None:
    """Whoever raised may have charged the card: no second run, whatever the framework made of the error."""
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
async def test_raised_is_retryable_where_a_second_run_is_harmless(
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
    assert (await api.post()).status_code >= 400
    assert world.record("k-1") is not None


@pytest.mark.parametrize(
    ("on_server_error", "state", "second", "runs"),
    [
        ("auto", State.FAILED_RETRYABLE, 201, 2),
        ("retry", State.FAILED_RETRYABLE, 201, 2),
        ("replay", State.FAILED, 500, 1),
        ("unknown", State.UNKNOWN, 409, 1),
    ],
)
async def test_on_server_error(
    make_api: MakeApi, world: World, on_server_error: Any, state: State, second: int, runs: int
) -> None:
    """What a returned 500 means is the route's to say."""
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


# ---------------------------------------------------------------- leases


async def test_a_handler_longer_than_its_lease_runs_once(make_api: MakeApi, world: World) -> None:
    """The lease is renewed while the handler lives: nobody takes over, although a second run would be allowed."""
    gate = Gate()
    lease = 0.3
    api = make_api(held(gate), policy=Policy(lease=timedelta(seconds=lease), effects="repeatable"))
    first = api.start()
    await soon(gate.entered.wait())

    def renewed() -> bool:
        record = world.record("k-1")
        return record is not None and record.lease_until - record.created_at > 3 * lease

    await until(renewed, "the lease is renewed past its first end")
    assert (await api.post()).status_code == 409
    gate.go.set()
    answer = await first
    assert answer.status_code == 201
    assert same(answer, await api.post())
    assert api.runs == 1


async def test_a_handler_that_blocks_its_loop_keeps_its_lease(make_api: MakeApi, world: World) -> None:
    """Leases are renewed by a thread: a handler that never awaits does not lose its key by that."""
    lease = 0.3
    seen: list[float] = []

    def respond(request: Request, run: int) -> Response:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # on purpose: the loop stands still
            record = world.record("k-1")
            assert record is not None
            if record.lease_until - record.created_at > 3 * lease:
                seen.append(record.lease_until)
                break
            time.sleep(0.01)
        return paid(request, run)

    api = make_api(respond, policy=Policy(lease=timedelta(seconds=lease)))
    assert (await api.post()).status_code == 201
    assert seen, "the lease was not renewed while the loop stood still"


async def test_a_lapsed_lease_of_external_work_is_unknown(make_api: MakeApi, world: World) -> None:
    """Hazard 2: the end of a lease proves nothing, so a payment is not made a second time."""
    gate = Gate()
    dead, alive = make_api(held(gate)), make_api()
    first = dead.start()
    await soon(gate.entered.wait())
    world.age("k-1", 61)
    answer = await alive.post()
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:oncekey:problem:outcome-unknown"
    assert_state(world, State.UNKNOWN)
    assert alive.runs == 0
    gate.go.set()
    late = await first
    assert (late.status_code, late.content) == (201, b'{"id":"pay_1"}')  # it was only late, and it alone knows
    assert same(late, await alive.post())
    assert (dead.runs, alive.runs) == (1, 0)


@pytest.mark.parametrize("effects", ["transactional", "repeatable"])
async def test_a_lapsed_lease_of_harmless_work_is_taken_over(make_api: MakeApi, world: World, effects: Any) -> None:
    """Hazard 1: the new owner is attempt 2; the late one writes nothing, and its client gets what is recorded."""
    gate = Gate()

    def attempts(request: Request, run: int) -> Response:
        return JSONResponse({"attempt": current().attempt}, 201)

    late = make_api(held(gate, attempts), policy=Policy(effects=effects))
    rival = make_api(attempts, policy=Policy(effects=effects))
    first = late.start()
    await soon(gate.entered.wait())
    assert (await rival.post()).status_code == 409  # the lease is not over yet
    world.age("k-1", 61)
    second = await rival.post()
    assert second.json() == {"attempt": 2}
    gate.go.set()
    answer = await first
    assert same(answer, second)
    assert answer.headers["idempotency-replayed"] == "true"
    record = assert_state(world, State.COMPLETED)
    assert record.attempt == 2
    assert record.response is not None
    assert record.response.body == second.content
    assert same(second, await late.post())


async def test_a_late_owner_does_not_disturb_a_rival_that_still_runs(make_api: MakeApi, world: World) -> None:
    """Fencing before the rival is done: the late one gets a 409, and the rival's answer is stored."""
    early, later = Gate(), Gate()
    late = make_api(held(early), policy=Policy(effects="repeatable"))
    rival = make_api(
        held(later, lambda request, run: JSONResponse({"by": "rival"}, 201)), policy=Policy(effects="repeatable")
    )
    first = late.start()
    await soon(early.entered.wait())
    world.age("k-1", 61)
    second = rival.start()
    await soon(later.entered.wait())
    early.go.set()
    assert (await first).status_code == 409
    later.go.set()
    assert (await second).json() == {"by": "rival"}
    assert (await late.post()).json() == {"by": "rival"}


@pytest.mark.parametrize("ending", ["raises", "500", "refused"])
async def test_a_late_owner_that_fails_gives_nothing_back(make_api: MakeApi, world: World, ending: str) -> None:
    """Fencing of release and discard: who has lost the key cannot free it under its new owner."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        await gate.wait()
        if ending == "raises":
            raise RuntimeError("late, and broken")
        if ending == "refused":
            raise Refused("late")
        return JSONResponse({}, 500)

    late, rival = make_api(respond, policy=Policy(effects="repeatable")), make_api(policy=Policy(effects="repeatable"))
    first = late.start()
    await soon(gate.entered.wait())
    world.age("k-1", 61)
    second = await rival.post()
    gate.go.set()
    await first
    assert_state(world, State.COMPLETED)
    assert same(second, await rival.post())
    assert rival.runs == 1


# ---------------------------------------------------------------- expiry


async def test_reused_after_expiry_is_new(make_api: MakeApi, world: World) -> None:
    """When its time is over a key is free, for another request too; a moment before it is not."""
    api = make_api()
    first = await api.post()
    world.age("k-1", 24 * 3600 - 30)
    assert same_but_for_time(first, await api.post())
    assert (await api.post(body=PAYMENT | {"amount": 5})).status_code == 422
    world.age("k-1", 31)
    second = await api.post(body=PAYMENT | {"amount": 5})
    assert (second.status_code, second.content) == (201, b'{"id":"pay_2"}')
    assert "idempotency-replayed" not in second.headers
    record = assert_state(world, State.COMPLETED)
    assert record.attempt == 1
    assert same(second, await api.post(body=PAYMENT | {"amount": 5}))
    assert (await api.post()).status_code == 422
    assert api.runs == 2


async def test_50_at_once_after_expiry_are_one_effect(make_api: MakeApi, world: World) -> None:
    """Starting over is a race like the first reservation, and has one winner."""
    api = make_api()
    await api.post()
    world.age("k-1", 24 * 3600 + 1)
    answers = await asyncio.gather(*(api.post() for _ in range(50)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert {answer.content for answer in answers if answer.status_code == 201} == {b'{"id":"pay_2"}'}
    assert api.runs == 2


async def test_unknown_does_not_expire(make_api: MakeApi, world: World) -> None:
    """What may have happened does not become what never happened by waiting."""
    api = make_api(raising(RuntimeError))
    await api.post()
    world.age("k-1", 10 * 24 * 3600)
    assert (await api.post()).status_code == 409
    assert api.runs == 1


def same_but_for_time(first: Any, second: Any) -> bool:
    """The test has moved the expiry, which the answer names."""
    return first.content == second.content and second.headers["idempotency-replayed"] == "true"


def assert_state(world: World, state: State, key: str = "k-1", scope: str = ONE) -> Any:
    record = world.record(key, scope)
    assert record is not None
    assert record.state is state
    return record
