"""The client and an API that oncekey protects, in all three profiles."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, OutcomeUnknown, Policy, current
from oncekey.client import AsyncClient, Budget, KeyJar, OutcomeUnsettled
from oncekey.client.httpx import AsyncIdempotentTransport
from oncekey.core.problems import PROFILES, ProfileName
from oncekey.outbox import Response as WorkerResponse
from oncekey.outbox import Worker
from oncekey.web.asgi import IdempotencyMiddleware

BUDGET = Budget(tries=4, seconds=20.0, first_wait=0.02)


class Api:
    """``POST /pay`` runs ``handler``; ``runs`` counts."""

    def __init__(self, profile: ProfileName, policy: Policy) -> None:
        self.runs = 0
        self.handler: Callable[[], Any] = lambda: None
        self.once = OnceKey("memory://", scope=SINGLE_TENANT, profile=profile, policy=policy)

        async def pay(request: Request) -> JSONResponse:
            self.runs += 1
            outcome = self.handler()
            if asyncio.iscoroutine(outcome):
                await outcome
            return JSONResponse({"run": self.runs}, 201)

        self.app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        self.app.add_middleware(IdempotencyMiddleware, once=self.once)
        self.transport: httpx.AsyncBaseTransport = httpx.ASGITransport(self.app, raise_app_exceptions=False)


class TellsRefusals(httpx.AsyncBaseTransport):
    """``refused``: the API has answered a request with 409."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport
        self.refused = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(request)
        if response.status_code == 409:
            self.refused.set()
        return response


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> ProfileName:
    found: ProfileName = request.param
    return found


def client_to(api: Api) -> httpx.AsyncClient:
    transport = AsyncIdempotentTransport(api.transport, budget=BUDGET)
    return httpx.AsyncClient(transport=transport, base_url="http://api.test")


async def test_unknown_outcome_is_raised_with_the_key_of_the_request(profile: ProfileName) -> None:
    api = Api(profile, Policy(effects="external"))

    def fail() -> None:
        raise OutcomeUnknown("the provider did not answer")

    api.handler = fail
    async with client_to(api) as client:
        with pytest.raises(OutcomeUnsettled) as raised:
            await client.post("/pay", json={"amount": 5})
    key = raised.value.key
    assert key is not None
    (record,) = api.once.store.read([("single-tenant", key)])
    assert record is not None
    assert (record.state, api.runs) == ("unknown", 1)
    assert raised.value.reference is not None
    assert key not in raised.value.reference
    await api.once.aclose()


async def test_server_error_that_may_be_retried_is_run_again_under_the_key(profile: ProfileName) -> None:
    api = Api(profile, Policy(effects="repeatable"))

    def fail_once() -> None:
        if api.runs == 1:
            raise RuntimeError

    api.handler = fail_once
    async with client_to(api) as client:
        response = await client.post("/pay", json={"amount": 5})
    assert (response.status_code, response.json(), api.runs) == (201, {"run": 2}, 2)
    await api.once.aclose()


async def test_duplicate_in_flight_gets_the_result_of_the_first(profile: ProfileName) -> None:
    api = Api(profile, Policy(effects="external"))
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        began.set()
        await go_on.wait()

    api.handler = slow
    api.transport = told = TellsRefusals(api.transport)
    headers = {"Idempotency-Key": "k-1"}
    async with client_to(api) as client:
        first = asyncio.create_task(client.post("/pay", json={}, headers=headers))
        await began.wait()
        second = asyncio.create_task(client.post("/pay", json={}, headers=headers))
        await told.refused.wait()
        assert not second.done()
        go_on.set()
        answers = [await first, await second]
    assert [(each.status_code, each.json()) for each in answers] == [(201, {"run": 1})] * 2
    assert api.runs == 1
    await api.once.aclose()


async def test_api_that_takes_quoted_keys_only_gets_them(profile: ProfileName) -> None:
    api = Api(profile, Policy(key_syntax="strict"))
    async with client_to(api) as client:
        assert (await client.post("/pay", json={})).status_code == 201
    assert api.runs == 1
    await api.once.aclose()


async def test_intent_learns_from_the_server_until_when_its_key_is_kept(profile: ProfileName, tmp_path: Path) -> None:
    api = Api(profile, Policy(effects="repeatable"))

    def fail() -> None:
        raise NotExecuted

    api.handler = fail
    jar = KeyJar(f"sqlite:///{tmp_path}/jar.db")
    async with AsyncClient("http://api.test", jar=jar, transport=api.transport, budget=Budget(tries=1)) as client:
        async with client.intent("order-1") as intent:
            assert (await intent.post("/pay", json={})).status_code == 503
        row = jar.read("order-1")
        assert row is not None
        assert row.expires_at is not None
        assert 0 < row.expires_at - (row.first_sent_at or 0) <= 86_400 + 5
        api.handler = lambda: None
        (outcome,) = await client.resume()
        assert outcome.status == 201
    jar.close()
    await api.once.aclose()


async def test_intent_of_a_deferred_request_ends_with_what_the_worker_answers(
    profile: ProfileName, tmp_path: Path
) -> None:
    """The handler's own 202 is not the result: the worker declines the payment afterwards."""
    file = tmp_path / "shop.db"
    once = OnceKey(f"sqlite:///{file}", scope=SINGLE_TENANT, profile=profile, policy=Policy(effects="transactional"))

    async def pay(request: Request) -> JSONResponse:
        db = sqlite3.connect(file, check_same_thread=False)
        await current().enlist(db)
        await current().defer("settle", {})
        return JSONResponse({"status": "pending"}, 202)

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    worker = Worker(f"sqlite:///{file}")

    @worker.task("settle")
    async def settle(ctx: object, payload: object) -> WorkerResponse:
        return WorkerResponse(402, {"status": "declined"})

    transport = Settles(httpx.ASGITransport(app), worker)
    jar = KeyJar(f"sqlite:///{tmp_path / 'jar.db'}")
    async with AsyncClient("http://api.test", jar=jar, transport=transport, budget=BUDGET) as client:
        async with client.intent("order-1") as intent:
            answer = await intent.post("/pay", json={"amount": 5})
        assert (answer.status_code, answer.json()) == (402, {"status": "declined"})
        assert [seen.status_code for seen in transport.seen] == [202, 402]
        assert await client.resume() == []
    await once.aclose()


class Settles(httpx.AsyncBaseTransport):
    """The worker runs after the first answer."""

    def __init__(self, transport: httpx.AsyncBaseTransport, worker: Worker) -> None:
        self._transport, self._worker = transport, worker
        self.seen: list[httpx.Response] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(request)
        self.seen.append(response)
        if len(self.seen) == 1:
            await self._worker.serve(until="drained")
        return response
