"""Stores without transactions and outbox (Redis, DynamoDB, memory): what needs them is refused, and the words name the
stores that can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.engine.operation import Operation
from oncekey.errors import ConfigurationError, EnlistError
from oncekey.outbox import Worker
from oncekey.stores.registry import DATABASES, STORES, WITH_TRANSACTIONS
from oncekey.telemetry.redaction import describe
from oncekey.web.asgi import IdempotencyMiddleware
from tests.web.apps import Api, World, raising

CAN = ("sqlite://", "postgresql://", "mysql://")


@pytest.fixture(params=["memory", "redis", "dynamodb"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    found: str = request.getfixturevalue(f"ready_{request.param}_url")
    return found


async def refusal(url: str, policy: Policy, verb: Callable[[Operation], Any]) -> str:
    caught: list[str] = []

    async def pay(request: Request) -> JSONResponse:
        try:
            await verb(current())
        except EnlistError as error:
            caught.append(str(error))
        return JSONResponse({}, 201)

    once = OnceKey(url, scope=SINGLE_TENANT, policy=policy)
    app = Starlette(routes=[Route("/payments", pay, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            await client.post("/payments", json={}, headers={"idempotency-key": "key-1"})
    finally:
        await once.aclose()
    (words,) = caught
    return words


def test_stores_that_can_are_those_with_tables() -> None:
    assert all(each in WITH_TRANSACTIONS for each in CAN)
    assert not any(each in WITH_TRANSACTIONS for each in ("redis", "dynamodb", "memory"))
    assert all((entry.scheme in DATABASES.lower()) is entry.transactions for entry in STORES)


@pytest.mark.parametrize(
    ("verb", "ask"),
    [
        ("enqueue('receipt')", lambda op: op.enqueue("receipt", {"to": "ada"})),
        ("defer('charge')", lambda op: op.defer("charge", {})),
        ("to enlist", lambda op: op.enlist(object())),
    ],
)
@pytest.mark.parametrize("effects", ["external", "phased"])
async def test_verb_that_needs_a_transaction_is_refused_and_the_stores_that_can_are_named(
    url: str, effects: Any, verb: str, ask: Callable[[Operation], Any]
) -> None:
    words = await refusal(url, Policy(effects=effects), ask)
    assert verb in words
    assert DATABASES in words
    assert DATABASES in describe(EnlistError(words)), "the log masks values, and this is none"
    assert "there is none open" not in words


async def test_log_does_not_advise_a_declaration_that_the_store_refuses(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    api = Api(World(url), "starlette", raising(lambda: RuntimeError("the provider is gone")))
    try:
        await api.post()
    finally:
        await api.close()
    assert "declare the route 'phased' or 'repeatable'" in caplog.text


async def test_job_of_a_thread_is_refused_too(url: str) -> None:
    async def verb(op: Operation) -> None:
        op.blocking.enqueue("receipt")

    assert DATABASES in await refusal(url, Policy(), verb)


def test_worker_is_refused(url: str) -> None:
    worker = Worker(url)
    worker.task("receipt")(lambda ctx, payload: None)
    with pytest.raises(ConfigurationError, match="this store has no outbox") as refused:
        worker.run(until="drained")
    assert WITH_TRANSACTIONS in str(refused.value)
