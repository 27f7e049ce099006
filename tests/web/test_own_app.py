"""A handler that calls its own app in process: that request is not the handler's operation."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from litestar import Litestar, get, post
from litestar.response import Response as LitestarResponse
from starlette.responses import JSONResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.errors import NoOperation
from oncekey.web import flask
from oncekey.web.fastapi import OptionalOperation, protect
from oncekey.web.litestar import OnceKeyPlugin
from tests.web.retrying_client import answers, replies, state


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://self.test")


@pytest.mark.parametrize("inner", [200, 402, 503])
@pytest.mark.parametrize("status", [201, 402])
async def test_answer_of_a_call_of_its_own_app_is_not_the_handlers(once: OnceKey, inner: int, status: int) -> None:
    app = FastAPI()
    runs: list[int] = []

    @app.get("/rates")
    async def rates(op: OptionalOperation) -> Any:
        with pytest.raises(NoOperation):
            current()
        return JSONResponse({"operation": op and op.key}, inner)

    @app.post("/pay")
    async def pay() -> Any:
        runs.append(1)
        async with client_of(app) as client:
            answer = await client.get("/rates")
        assert current().key == "k-1"
        return JSONResponse([answer.status_code, answer.json()], status)

    protect(app, once)
    first, second, third = await replies(app)
    assert (first.status_code, first.json()) == (status, [inner, {"operation": None}])
    assert first.content == second.content == third.content
    assert (runs, state(once)) == ([1], State.COMPLETED if status == 201 else State.FAILED)


async def test_keyless_call_of_a_route_whose_key_is_optional_is_not_the_handlers() -> None:
    app = FastAPI()

    @app.post("/notes")
    async def notes(op: OptionalOperation) -> Any:
        return JSONResponse({"operation": op and op.key}, 503)

    @app.post("/pay")
    async def pay() -> Any:
        async with client_of(app) as client:
            answer = await client.post("/notes")
        return JSONResponse(answer.json(), 402)

    routes = {"POST /notes": Policy(required=False)}
    with OnceKey("memory://", scope=SINGLE_TENANT, routes=routes) as once:
        protect(app, once)
        first, second = await replies(app, 2)
        assert (first.status_code, first.json(), state(once)) == (402, {"operation": None}, State.FAILED)
        assert second.headers["idempotency-replayed"] == "true"


def test_keyless_call_of_an_optional_route_is_not_the_views_under_flask() -> None:
    app = Flask("self")

    @app.post("/notes")
    def notes() -> Any:
        with pytest.raises(NoOperation):
            current()
        return {}, 503

    @app.post("/pay")
    def pay() -> Any:
        return {"notes": app.test_client().post("/notes").status_code}, 402

    routes = {"POST /notes": Policy(required=False)}
    with OnceKey("memory://", scope=SINGLE_TENANT, routes=routes) as once:
        flask.protect(app, once)
        first, second = (app.test_client().post("/pay", headers={"Idempotency-Key": "k-1"}) for _ in range(2))
        assert (first.status_code, first.json, state(once)) == (402, {"notes": 503}, State.FAILED)
        assert second.headers["idempotency-replayed"] == "true"


async def test_call_of_a_protected_route_of_its_own_app_has_a_key_of_its_own(once: OnceKey) -> None:
    app = FastAPI()
    refunds: list[str] = []

    @app.post("/refunds")
    async def refund() -> Any:
        refunds.append(current().key)
        return JSONResponse({}, 201)

    @app.post("/pay")
    async def pay() -> Any:
        async with client_of(app) as client:
            headers = {"Idempotency-Key": current().downstream_key("refund")}
            inner = [(await client.post("/refunds", headers=headers)).status_code for _ in range(2)]
        assert current().key == "k-1"
        return JSONResponse(inner, 402)

    protect(app, once)
    assert await answers(app) == [402, 402, 402]
    assert len(refunds) == 1
    assert refunds != ["k-1"]
    assert state(once) is State.FAILED


async def test_call_of_its_own_litestar_app_is_not_the_handlers(once: OnceKey) -> None:
    made: list[Any] = []

    @get("/rates")
    async def rates() -> LitestarResponse[None]:
        return LitestarResponse(None, status_code=503)

    @post("/pay")
    async def pay() -> LitestarResponse[int]:
        async with client_of(made[0]) as client:
            answer = await client.get("/rates")
        return LitestarResponse(answer.status_code, status_code=402)

    made.append(Litestar([rates, pay], plugins=[OnceKeyPlugin(once)], logging_config=None))
    assert (await answers(made[0]), state(once)) == ([402, 402, 402], State.FAILED)
