"""Middleware outside of ours sees what it would see without us: the route, and the context that the handler left."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from oncekey import OnceKey
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect
from tests.web.retrying_client import CopiesScope, Layer, PassesOn, answers
from tests.web.versions import ROUTE_IN_SCOPE

user: ContextVar[str] = ContextVar("user", default="anonymous")


class Metrics(Layer):
    """Reads the scope and the context when the response starts, and when the app has returned."""

    def __init__(self, app: Any, seen: list[tuple[Any, ...]]) -> None:
        super().__init__(app)
        self.seen = seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        def look() -> None:
            route, params = scope.get("route"), scope.get("path_params")
            self.seen.append((getattr(route, "path", None), scope.get("endpoint"), params, user.get()))

        async def send_and_look(message: Any) -> None:
            if message["type"] == "http.response.start":
                look()
            await send(message)

        await self.app(scope, receive, send_and_look)
        look()


async def pay(request: Request) -> Response:
    user.set("ann")
    return JSONResponse({}, 201)


async def pay_with_id(id: str) -> Response:
    user.set("ann")
    return JSONResponse({}, 201)


def starlette(once: OnceKey, seen: list[Any]) -> Any:
    app = Starlette(routes=[Route("/pay/{id}", pay, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    app.add_middleware(Metrics, seen=seen)
    return app


def with_middleware_inside(once: OnceKey, seen: list[Any]) -> Any:
    app = Starlette(routes=[Route("/pay/{id}", pay, methods=["POST"])])
    app.add_middleware(PassesOn)
    app.add_middleware(IdempotencyMiddleware, once=once)
    app.add_middleware(Metrics, seen=seen)
    return app


def fastapi(once: OnceKey, seen: list[Any]) -> Any:
    app = FastAPI()
    app.post("/pay/{id}")(pay_with_id)
    protect(app, once)
    app.add_middleware(Metrics, seen=seen)
    return app


@pytest.mark.parametrize("make", [starlette, fastapi, with_middleware_inside])
async def test_route_is_visible_outside(once: OnceKey, make: Callable[..., Any]) -> None:
    """Metrics are counted by the path of the route; without it, exporters drop the request."""
    seen: list[tuple[Any, ...]] = []
    assert await answers(make(once, seen), 1, path="/pay/7") == [201]
    endpoint = pay_with_id if make is fastapi else pay
    path = "/pay/{id}" if make is fastapi or ROUTE_IN_SCOPE else None
    assert [each[:3] for each in seen] == [(path, endpoint, {"id": "7"})] * 2


@pytest.mark.parametrize("make", [starlette, fastapi])
async def test_context_variable_of_the_handler_is_visible_outside(once: OnceKey, make: Callable[..., Any]) -> None:
    seen: list[tuple[Any, ...]] = []
    assert await answers(make(once, seen), 1, path="/pay/7") == [201]
    assert [each[3] for each in seen] == ["ann", "ann"]


async def test_context_variable_is_visible_outside_when_the_handler_raised(once: OnceKey) -> None:
    seen: list[str] = []

    class Errors(Layer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await self.app(scope, receive, send)
            except ValueError:
                seen.append(user.get())
                raise

    async def fails(request: Request) -> Response:
        user.set("ann")
        raise ValueError

    app = Starlette(routes=[Route("/pay", fails, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    app.add_middleware(Errors)
    assert await answers(app, 1) == [500]
    assert seen == ["ann"]


async def test_route_of_a_mounted_app_is_visible_outside(once: OnceKey) -> None:
    """The outer router writes into our scope, the mounted app's into a copy of it: as without us."""
    plain: list[tuple[Any, ...]] = []
    protected: list[tuple[Any, ...]] = []
    for seen in (plain, protected):
        inner = FastAPI()
        router = APIRouter(prefix="/v1")
        router.post("/pay/{id}")(pay_with_id)
        inner.include_router(router)
        app = Starlette(routes=[Mount("/api", inner)])
        if seen is protected:
            app.add_middleware(IdempotencyMiddleware, once=once)
        app.add_middleware(Metrics, seen=seen)
        assert await answers(app, 1, path="/api/v1/pay/7") == [201]
    assert [each[0] for each in protected] == [each[0] for each in plain]
    assert [each[2] for each in protected] == [each[2] for each in plain]


async def test_scope_of_the_server_is_left_as_it_was(once: OnceKey) -> None:
    """What is ours (the operation, the changed headers) stays inside."""
    seen: list[set[str]] = []

    class Keys(Layer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            before = set(scope)
            await self.app(scope, receive, send)
            seen.append(set(scope) - before)
            assert (b"accept-encoding", b"gzip, deflate") in [(n, v[:13]) for n, v in scope["headers"]]

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app.add_middleware(CopiesScope)
    app.add_middleware(IdempotencyMiddleware, once=once)
    app.add_middleware(Keys)
    assert await answers(app, 1) == [201]
    assert seen[0] <= {"route", "endpoint", "path_params", "router"}
