"""Where the middleware stands: behind a prefix, inside itself, and in front of a router that turns requests away."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.errors import ConfigurationError
from oncekey.web import asgi, fastapi, flask, litestar
from oncekey.web.asgi import IdempotencyMiddleware

HEADERS = {"Idempotency-Key": "places-0001"}


async def pay(request: Any) -> JSONResponse:
    return JSONResponse({"paid": True}, 201)


def make(**more: Any) -> tuple[Starlette, OnceKey]:
    app = Starlette(routes=[Route("/payments", pay, methods=["POST"]), Route("/login", pay, methods=["POST"])])
    once = OnceKey("memory://", scope=SINGLE_TENANT, **more)
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app, once


async def test_a_prefix_that_the_server_adds_does_not_hide_the_routes() -> None:
    """``--root-path /api`` stands in the path: exemptions and policies go by the app's own paths all the same."""
    app, once = make(routes={"POST /login": None})
    transport = httpx.ASGITransport(app, root_path="/api")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post("/api/login")).status_code == 201
        assert (await http.post("/api/payments")).status_code == 400
    await once.aclose()


@pytest.mark.parametrize("path", ["/api//stock", "/api/stock", "/stock"])
async def test_a_prefix_that_ends_in_a_slash_does_not_hide_them_either(path: str) -> None:
    """Frameworks do not agree on where the app's own path begins: what one of them routes to it is protected."""
    runs: list[int] = []

    async def count(request: Any) -> JSONResponse:
        runs.append(1)
        return JSONResponse({}, 201)

    app = Starlette(routes=[Route("/stock", count, methods=["PUT"]), Route("/api/stock", count, methods=["PUT"])])
    once = OnceKey("memory://", scope=SINGLE_TENANT, routes={"PUT /stock": Policy()})
    app.add_middleware(IdempotencyMiddleware, once=once)
    transport = httpx.ASGITransport(app, root_path="/api/")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for _ in range(2):
            assert (await http.put(path, headers=HEADERS)).status_code == 201
    assert runs == [1]
    await once.aclose()


async def test_a_prefix_is_one_at_the_beginning_only() -> None:
    """Another route that has the prefix in its middle does not fall under the policy of what follows it there."""
    app = Starlette(routes=[Route("/v2/api/payments", pay, methods=["POST"])])
    once = OnceKey("memory://", scope=SINGLE_TENANT, routes={"POST /payments": Policy(required=False)})
    app.add_middleware(IdempotencyMiddleware, once=once)
    transport = httpx.ASGITransport(app, root_path="/api")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post("/v2/api/payments")).status_code == 400
    await once.aclose()


async def test_two_of_us_are_one() -> None:
    """A protected app inside a protected app: the inner one does not take the outer one's reservation for a rival's."""
    app, once = make()
    outer = IdempotencyMiddleware(app, once)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://test") as http:
        first, second = [await http.post("/payments", headers=HEADERS) for _ in range(2)]
    assert (first.status_code, second.headers["idempotency-replayed"]) == (201, "true")
    await once.aclose()


async def test_a_redirect_to_the_path_without_its_slash_leaves_the_key() -> None:
    """The client follows with the same key: it must not find it taken. And an unused key does not expire."""
    app, once = make()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        redirected = await http.post("/payments/", headers=HEADERS)
        assert redirected.status_code == 307
        assert "idempotency-expires" not in redirected.headers
        assert (await http.post("/payments", headers=HEADERS)).status_code == 201
    await once.aclose()


def test_protecting_with_something_else_is_refused_at_once() -> None:
    ways: list[Any] = [
        lambda once: fastapi.protect(FastAPI(), once),
        lambda once: flask.protect(Flask("x"), once),
        lambda once: asgi.IdempotencyMiddleware(FastAPI(), once),
        litestar.OnceKeyPlugin,
    ]
    for protect in ways:
        with pytest.raises(ConfigurationError, match="it takes a OnceKey"):
            protect(None)
