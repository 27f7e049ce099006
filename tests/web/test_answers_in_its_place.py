"""I1: an answer that is sent in the handler's place says nothing about what the handler did.

A timeout, middleware that catches what another one raised, an app of another framework: the handler may have charged,
or be charging.
"""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from flask import Flask
from litestar import Litestar, Router, post
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, Refused, current
from oncekey.core.states import State
from oncekey.web import flask as once_flask
from oncekey.web import starlette as once_starlette
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect
from oncekey.web.litestar import OnceKeyPlugin
from tests.web.retrying_client import KEY, PATIENCE, CopiesScope, Layer, MovesOn, answers, state


class WaitsFor(Layer):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.wait_for(self.app(scope, receive, send), PATIENCE)
            return
        except TimeoutError:
            pass
        await JSONResponse({}, 504)(scope, receive, send)


class WaitsForNext(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        try:
            answer: Response = await asyncio.wait_for(call_next(request), PATIENCE)
            return answer
        except TimeoutError:
            return JSONResponse({}, 504)


class CatchesAll(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        try:
            answer: Response = await call_next(request)
            return answer
        except Exception:
            return JSONResponse({}, 500)


class FailsAfterwards(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        await call_next(request)
        raise ConnectionError("the audit log is down")


class MakesAnError(Layer):
    """Another status for what the handler returned, and had done."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_another(message: Any) -> None:
            await send({**message, "status": 502} if "status" in message else message)

        await self.app(scope, receive, send_another)


SHAPES: dict[str, list[Any]] = {
    "timeout that moves on": [MovesOn],
    "timeout around middleware that copies the scope": [MovesOn, CopiesScope],
    "timeout that waits": [WaitsFor],
    "timeout around call_next": [WaitsForNext],
    "catch-all around middleware that raised": [CatchesAll, FailsAfterwards],
    "middleware that makes an error of a success": [MakesAnError],
}


async def pays_slowly(effects: list[int]) -> Response:
    effects.append(1)
    await asyncio.sleep(3 * PATIENCE)
    return JSONResponse({}, 201)


@pytest.mark.parametrize("where", ["app", "route"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_error_in_place_of_the_handler_makes_the_key_unknown(once: OnceKey, shape: str, where: str) -> None:
    effects: list[int] = []

    async def pay(request: Request) -> Response:
        return await pays_slowly(effects)

    stack = [Middleware(each) for each in SHAPES[shape]]
    inner = stack if where == "route" else []
    app = Starlette(routes=[Route("/pay", pay, methods=["POST"], middleware=inner)])
    once_starlette.protect(app, once)
    app.user_middleware += stack if where == "app" else []
    first, *retries = await answers(app)
    assert first >= 500
    assert (retries, effects, state(once)) == ([409, 409], [1], State.UNKNOWN)


@pytest.mark.parametrize("status", [200, 303, 400, 401, 402, 408, 425, 429, 500, 504])
@pytest.mark.parametrize("kind", ["starlette", "fastapi"])
async def test_any_status_of_a_timeout_makes_the_key_unknown(once: OnceKey, kind: str, status: int) -> None:
    """A success in the handler's place is not sent either: it is not stored."""
    effects: list[int] = []

    class Timeout(MovesOn):
        pass

    Timeout.status = status

    async def pay(request: Request) -> Response:
        return await pays_slowly(effects)

    app: Any = FastAPI() if kind == "fastapi" else Starlette()
    app.router.routes.append(Route("/pay", pay, methods=["POST"]))
    once_starlette.protect(app, once)
    app.user_middleware += [Middleware(Timeout), Middleware(CopiesScope)]
    assert await answers(app) == [status if status >= 400 else 409, 409, 409]
    assert (effects, state(once)) == ([1], State.UNKNOWN)


@pytest.mark.parametrize(
    ("status", "declared"),
    [
        (408, {"retryable_statuses": frozenset({408})}),
        (504, {"on_server_error": "retry"}),
        (504, {"on_server_error": "replay"}),
        (400, {"final_client_errors": False}),
    ],
)
async def test_declared_meaning_of_a_status_does_not_hold_for_a_timeout(status: int, declared: dict[str, Any]) -> None:
    """A policy speaks of answers that the handler gives itself."""
    effects: list[int] = []

    class Timeout(MovesOn):
        pass

    Timeout.status = status

    async def pay(request: Request) -> Response:
        return await pays_slowly(effects)

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(**declared)) as once:
        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        once_starlette.protect(app, once)
        app.user_middleware.append(Middleware(Timeout))
        assert (await answers(app), effects) == ([status, 409, 409], [1])


@pytest.mark.parametrize("effects", ["transactional", "phased", "repeatable"])
async def test_timeout_leaves_the_key_retryable_where_a_second_run_is_harmless(effects: Any) -> None:
    runs: list[int] = []

    async def pay(request: Request) -> Response:
        runs.append(1)
        if len(runs) == 1:
            await asyncio.sleep(3 * PATIENCE)
        return JSONResponse({}, 201)

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(effects=effects)) as once:
        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        once_starlette.protect(app, once)
        app.user_middleware.append(Middleware(MovesOn))
        assert (await answers(app), len(runs)) == ([504, 201, 201], 2)


@pytest.mark.parametrize("where", ["in front of the router", "in a mounted app"])
async def test_429_of_a_limiter_leaves_the_key_for_another_try(once: OnceKey, where: str) -> None:
    let_in: list[int] = []

    class Limiter(Layer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            let_in.append(1)
            if len(let_in) == 1:
                await JSONResponse({}, 429)(scope, receive, send)
            else:
                await self.app(scope, receive, send)

    async def pay(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse({}, 201)(scope, receive, send)

    app = Starlette(routes=[Mount("/", Limiter(pay) if where == "in a mounted app" else pay)])
    once_starlette.protect(app, once)
    if where != "in a mounted app":
        app.user_middleware.append(Middleware(Limiter))
    assert await answers(app) == [429, 201, 201]


async def test_timeout_in_litestar_makes_the_key_unknown(once: OnceKey) -> None:
    effects: list[int] = []

    @post("/pay")
    async def pay() -> None:
        effects.append(1)
        await asyncio.sleep(3 * PATIENCE)

    routes = [Router("/", route_handlers=[pay], middleware=[MovesOn])]
    app = Litestar(routes, plugins=[OnceKeyPlugin(once)], logging_config=None)
    assert (await answers(app), effects) == ([504, 409, 409], [1])


def test_catch_all_around_flask_makes_the_key_unknown(once: OnceKey) -> None:
    effects: list[int] = []
    app = Flask("shop")

    @app.post("/pay")
    def pay() -> dict[str, int]:
        effects.append(1)
        return {}

    whole = app.wsgi_app

    def caught(environ: Any, start_response: Any) -> Any:
        try:
            list(whole(environ, lambda *_: lambda _: None))
            raise ConnectionError("the audit log is down")
        except ConnectionError:
            pass
        start_response("500 Internal Server Error", [("content-type", "text/plain")])
        return [b"sorry"]

    app.wsgi_app = caught  # type: ignore[method-assign]
    once_flask.protect(app, once)
    client = app.test_client()
    assert [client.post("/pay", headers=KEY).status_code for _ in range(3)] == [500, 409, 409]
    assert effects == [1]


async def test_500_of_a_mounted_app_of_another_kind_makes_the_key_unknown(once: OnceKey) -> None:
    effects: list[int] = []

    async def other(scope: Any, receive: Any, send: Any) -> None:
        effects.append(1)  # and then it failed, and made a page of that
        await JSONResponse({}, 500)(scope, receive, send)

    app = FastAPI()
    app.mount("/old", other)
    protect(app, once)
    assert (await answers(app, path="/old/pay"), effects) == ([500, 409, 409], [1])


# ---------------------------------------------------------------- middleware that calls the handler twice


class TriesAgain(Layer):
    """Calls the app twice, and the second answer counts."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def nowhere(message: Any) -> None: ...

        await self.app(scope, receive, nowhere)
        await self.app(scope, receive, send)


async def test_word_of_an_earlier_call_does_not_hold_for_a_later_one() -> None:
    """The second call charges, and runs out of time."""
    effects: list[int] = []

    async def pay(request: Request) -> Response:
        effects.append(1)
        if len(effects) == 2:
            await asyncio.sleep(3 * PATIENCE)
        return JSONResponse({}, 503)

    class Impatient(Layer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def nowhere(message: Any) -> None: ...

            await self.app(scope, receive, nowhere)
            with anyio.move_on_after(PATIENCE):
                await self.app(scope, receive, send)
            await JSONResponse({}, 503)(scope, receive, send)

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(on_server_error="retry")) as once:
        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, once=once)
        app.user_middleware.append(Middleware(Impatient))
        assert (await answers(app), len(effects)) == ([503, 409, 409], 2)


@pytest.mark.parametrize("word", ["Refused", "NotExecuted", "not_executed()", "402"])
async def test_word_of_a_later_call_does_not_hold_for_an_earlier_one(once: OnceKey, word: str) -> None:
    """The first call charged, and its answer was lost."""
    charges: list[int] = []

    async def pay(request: Request) -> Response:
        if not charges:
            charges.append(1)
            return JSONResponse({}, 504)
        match word:
            case "Refused":
                raise Refused("no")
            case "NotExecuted":
                raise NotExecuted("the bank is closed")
            case "not_executed()":
                current().not_executed()
                return JSONResponse({}, 503)
        return JSONResponse({}, 402)

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    once_starlette.protect(app, once)
    app.user_middleware.append(Middleware(TriesAgain))
    await answers(app, 1)
    assert (await answers(app, 2), state(once)) == ([409, 409], State.UNKNOWN)
    assert charges == [1]
