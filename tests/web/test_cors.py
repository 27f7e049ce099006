"""A browser reads no answer without CORS headers: they are on first answers, replays and refusals alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import OnceKey, Refused
from oncekey.web import starlette as once_starlette
from oncekey.web.fastapi import protect
from tests.web.retrying_client import KEY

SHOP = "https://shop.test"


async def pay(request: Request) -> Response:
    if (await request.json()).get("amount") == 0:
        raise Refused("nothing to pay")
    return JSONResponse({"paid": True}, 201)


def starlette(once: OnceKey, when: str) -> Any:
    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    if when == "before":
        app.add_middleware(CORSMiddleware, allow_origins=[SHOP], allow_methods=["*"])
    once_starlette.protect(app, once)
    if when == "after":
        app.add_middleware(CORSMiddleware, allow_origins=[SHOP], allow_methods=["*"])
    return app


def fastapi(once: OnceKey, when: str) -> Any:
    app = FastAPI()
    app.router.routes.append(Route("/pay", pay, methods=["POST"]))
    if when == "before":
        app.add_middleware(CORSMiddleware, allow_origins=[SHOP], allow_methods=["*"])
    protect(app, once)
    if when == "after":
        app.add_middleware(CORSMiddleware, allow_origins=[SHOP], allow_methods=["*"])
    return app


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [starlette, fastapi])
async def test_cors_headers_are_on_every_answer(once: OnceKey, make: Callable[..., Any], when: str) -> None:
    transport = httpx.ASGITransport(app=make(once, when))
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers={"origin": SHOP}) as client:
        said = {
            "no key": await client.post("/pay", json={"amount": 1}),
            "refused": await client.post("/pay", json={"amount": 0}, headers=KEY),
            "first": await client.post("/pay", json={"amount": 1}, headers=KEY),
            "replay": await client.post("/pay", json={"amount": 1}, headers=KEY),
            "mismatch": await client.post("/pay", json={"amount": 2}, headers=KEY),
            "preflight": await client.options("/pay", headers={"access-control-request-method": "POST"}),
        }
    assert {name: answer.status_code for name, answer in said.items()} == {
        "no key": 400, "refused": 422, "first": 201, "replay": 201, "mismatch": 422, "preflight": 200,
    }  # fmt: skip
    for name, answer in said.items():
        assert answer.headers.get_list("access-control-allow-origin") == [SHOP], name


async def test_other_middleware_keeps_its_order_around_cors(once: OnceKey) -> None:
    """Only CORSMiddleware is moved."""
    order: list[str] = []

    def noting(name: str) -> Any:
        class Noting:
            def __init__(self, app: Any) -> None:
                self.app = app

            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                order.append(name)
                await self.app(scope, receive, send)

        return Noting

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app.add_middleware(noting("inner"))
    app.add_middleware(CORSMiddleware, allow_origins=[SHOP])
    app.add_middleware(noting("middle"))
    once_starlette.protect(app, once)
    app.add_middleware(noting("outer"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api.test") as client:
        await client.post("/pay", json={"amount": 1}, headers=KEY)
        assert order == ["outer", "middle", "inner"]
        await client.post("/pay", json={"amount": 1}, headers=KEY)
        assert order == ["outer", "middle", "inner", "outer"]
