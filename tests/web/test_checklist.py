"""The checklists of the seeds, line by line, over HTTP: every store, both frameworks (tests/web/conftest.py).

How handlers end is in test_checklist_endings.py, leases and expiry are in test_checklist_time.py.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy, Refused, current
from tests.web.apps import PAYMENT, Gate, MakeApi, World, held, paid, same, soon, until

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
    """422 wins over 409: a client that misuses a key learns that, and not that it should come again."""
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

    api = make_api(respond, policy=Policy(in_flight="wait", effects="repeatable"))
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
