"""I1: an error that the handler did not return says nothing about its work, whoever sends it.

A timeout whose patience is over, middleware that caught what another one raised, an app of another framework: the
handler may have charged, or be charging. Only what the handler itself was seen to return is its word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from flask import Flask
from litestar import Litestar, Router, post
from litestar.response import Response as LitestarResponse
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.states import State
from oncekey.web import flask as once_flask
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect
from oncekey.web.litestar import OnceKeyPlugin

PATIENCE = 0.15
KEY = {"Idempotency-Key": "k-1"}


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        yield once


async def answers(app: Any, times: int = 3, path: str = "/pay", method: str = "POST") -> list[int]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
        return [(await client.request(method, path, headers=KEY)).status_code for _ in range(times)]


def state(once: OnceKey) -> State | None:
    record = once.store.read([("single-tenant", "k-1")])[0]
    return None if record is None else record.state


# ---------------------------------------------------------------- somebody answers for the handler


class MovesOn:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with anyio.move_on_after(PATIENCE) as patience:
            await self.app(scope, receive, send)
        if patience.cancelled_caught:
            await JSONResponse({}, 504)(scope, receive, send)


class WaitsFor:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.wait_for(self.app(scope, receive, send), PATIENCE)
            return
        except TimeoutError:
            pass
        await JSONResponse({}, 504)(scope, receive, send)


class WaitsForNext(BaseHTTPMiddleware):
    """The handler goes on while this has answered."""

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


class MakesAnError:
    """Another status for what the handler returned, and had done."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_another(message: Any) -> None:
            await send({**message, "status": 502} if "status" in message else message)

        await self.app(scope, receive, send_another)


SHAPES: dict[str, list[Any]] = {
    "a timeout that moves on": [MovesOn],
    "a timeout that waits": [WaitsFor],
    "a timeout around call_next": [WaitsForNext],
    "one that catches what another raised": [CatchesAll, FailsAfterwards],
    "one that makes an error of a success": [MakesAnError],
}


@pytest.mark.parametrize("where", ["app", "route"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_an_error_in_the_place_of_the_handler_is_in_doubt(once: OnceKey, shape: str, where: str) -> None:
    effects: list[int] = []

    async def pay(request: Request) -> Response:
        effects.append(1)
        await asyncio.sleep(3 * PATIENCE)
        return JSONResponse({}, 201)

    stack = [Middleware(each) for each in SHAPES[shape]]
    inner = stack if where == "route" else []
    app = Starlette(routes=[Route("/pay", pay, methods=["POST"], middleware=inner)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    app.user_middleware += stack if where == "app" else []
    first, *retries = await answers(app)
    assert first >= 500
    assert (retries, effects, state(once)) == ([409, 409], [1], State.UNKNOWN)


@pytest.mark.parametrize(
    ("status", "declared"),
    [(408, {}), (504, {"on_server_error": "retry"}), (400, {"final_client_errors": False})],
)
async def test_no_word_for_it_makes_a_timeout_harmless(status: int, declared: dict[str, Any]) -> None:
    """What is declared of errors, or is known of 408, holds for those of the handler."""
    effects: list[int] = []

    class Patience(MovesOn):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            with anyio.move_on_after(PATIENCE) as patience:
                await self.app(scope, receive, send)
            if patience.cancelled_caught:
                await JSONResponse({}, status)(scope, receive, send)

    async def pay(request: Request) -> Response:
        effects.append(1)
        await asyncio.sleep(3 * PATIENCE)
        return JSONResponse({}, 201)

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(**declared)) as once:
        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, once=once)
        app.user_middleware.append(Middleware(Patience))
        assert (await answers(app), effects) == ([status, 409, 409], [1])


@pytest.mark.parametrize("where", ["in front of the router", "in a mounted app"])
async def test_who_is_not_let_in_may_come_again(once: OnceKey, where: str) -> None:
    """429 and 401 are said before any work, by whomever."""
    let_in: list[int] = []

    class Limiter(MovesOn):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            let_in.append(1)
            if len(let_in) == 1:
                await JSONResponse({}, 429)(scope, receive, send)
            else:
                await self.app(scope, receive, send)

    async def pay(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse({}, 201)(scope, receive, send)

    app = Starlette(routes=[Mount("/", Limiter(pay) if where == "in a mounted app" else pay)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    if where != "in a mounted app":
        app.user_middleware.append(Middleware(Limiter))
    assert await answers(app) == [429, 201, 201]


async def test_a_timeout_in_litestar_is_in_doubt(once: OnceKey) -> None:
    effects: list[int] = []

    @post("/pay")
    async def pay() -> None:
        effects.append(1)
        await asyncio.sleep(3 * PATIENCE)

    routes = [Router("/", route_handlers=[pay], middleware=[MovesOn])]
    app = Litestar(routes, plugins=[OnceKeyPlugin(once)], logging_config=None)
    assert (await answers(app), effects) == ([504, 409, 409], [1])


def test_middleware_around_flask_that_catches_is_in_doubt(once: OnceKey) -> None:
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


async def test_an_app_of_another_kind_that_is_mounted_is_in_doubt(once: OnceKey) -> None:
    effects: list[int] = []

    async def other(scope: Any, receive: Any, send: Any) -> None:
        effects.append(1)  # and then it failed, and made a page of that
        await JSONResponse({}, 500)(scope, receive, send)

    app = FastAPI()
    app.mount("/old", other)
    protect(app, once)
    assert (await answers(app, path="/old/pay"), effects) == ([500, 409, 409], [1])


# ---------------------------------------------------------------- the handler itself


class PassesOn(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        answer: Response = await call_next(request)
        return answer


class Endpoint(HTTPEndpoint):
    runs = 0

    async def post(self, request: Request) -> Response:
        Endpoint.runs += 1
        return JSONResponse({}, 201 if Endpoint.runs > 1 else 503)


def _returning(runs: list[int]) -> Callable[..., Any]:
    async def pay(request: Request) -> Response:
        runs.append(1)
        return JSONResponse({}, 201 if len(runs) > 1 else 503)

    return pay


def _starlette(once: OnceKey, runs: list[int]) -> Any:
    app = Starlette(routes=[Route("/pay", _returning(runs), methods=["POST"])], middleware=[Middleware(PassesOn)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def _endpoint(once: OnceKey, runs: list[int]) -> Any:
    Endpoint.runs = 0
    app = Starlette(routes=[Route("/pay", Endpoint)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def _around(once: OnceKey, runs: list[int]) -> Any:
    return IdempotencyMiddleware(Starlette(routes=[Route("/pay", _returning(runs), methods=["POST"])]), once)


def _mounted(once: OnceKey, runs: list[int]) -> Any:
    mounted = FastAPI(middleware=[Middleware(PassesOn)])
    mounted.post("/pay")(_returning(runs))
    app = Starlette(routes=[Mount("/", mounted)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def _fastapi(once: OnceKey, runs: list[int]) -> Any:
    app = FastAPI(middleware=[Middleware(PassesOn)])
    app.post("/pay")(_returning(runs))
    protect(app, once)
    return app


def _streaming(once: OnceKey, runs: list[int]) -> Any:
    """Sent by a task of its own, with the servers of today."""

    async def pay(request: Request) -> Response:
        runs.append(1)
        return StreamingResponse(iter([b"{", b"}"]), 201 if len(runs) > 1 else 503)

    app = FastAPI(middleware=[Middleware(PassesOn)])
    app.post("/pay")(pay)
    protect(app, once)
    return app


def _litestar(once: OnceKey, runs: list[int]) -> Any:
    @post("/pay")
    async def pay() -> LitestarResponse[None]:
        runs.append(1)
        return LitestarResponse(None, status_code=201 if len(runs) > 1 else 503)

    return Litestar([pay], plugins=[OnceKeyPlugin(once)], logging_config=None)


@pytest.mark.parametrize("make", [_starlette, _endpoint, _around, _mounted, _fastapi, _streaming, _litestar])
async def test_an_error_that_the_handler_returns_is_its_word(once: OnceKey, make: Callable[..., Any]) -> None:
    """DESIGN 4: a returned 5xx is retryable, also with the usual middleware around it."""
    assert await answers(make(once, [])) == [503, 201, 201]


async def test_what_an_earlier_call_said_is_not_said_by_a_later_one(once: OnceKey) -> None:
    """Middleware that tries again: the second call charges, and runs out of time."""
    effects: list[int] = []

    async def pay(request: Request) -> Response:
        effects.append(1)
        if len(effects) == 2:
            await asyncio.sleep(3 * PATIENCE)
        return JSONResponse({}, 503)

    class TriesAgain(MovesOn):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def nowhere(message: Any) -> None: ...

            await self.app(scope, receive, nowhere)
            with anyio.move_on_after(PATIENCE):
                await self.app(scope, receive, send)
            await JSONResponse({}, 503)(scope, receive, send)

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    app.user_middleware.append(Middleware(TriesAgain))
    assert (await answers(app), len(effects)) == ([503, 409, 409], 2)


# ---------------------------------------------------------------- refused, and then not


@pytest.mark.parametrize("how", ["answers", "raises"])
@pytest.mark.parametrize("kind", ["fastapi", "starlette"])
async def test_a_request_that_no_route_took_is_forwarded_once(once: OnceKey, kind: str, how: str) -> None:
    """The app replaces an old one route by route: its 404 handler sends on what it does not know yet."""
    effects: list[int] = []

    async def forward(request: Request, error: Exception) -> Response:
        effects.append(1)
        if how == "raises":
            raise TimeoutError("the old app does not answer")
        return JSONResponse({}, 201)

    if kind == "fastapi":
        app: Any = FastAPI(exception_handlers={404: forward})
        protect(app, once)
    else:
        app = Starlette(exception_handlers={404: forward})
        app.add_middleware(IdempotencyMiddleware, once=once)
    assert await answers(app) == ([201, 201, 201] if how == "answers" else [500, 409, 409])
    assert effects == [1]


@pytest.mark.parametrize("missed", [404, 307])
@pytest.mark.parametrize("status", [201, 402])
async def test_what_another_app_was_asked_for_instead_is_done_once(once: OnceKey, missed: int, status: int) -> None:
    """A cascade: what the first app refuses, the second one gets. Its answer is an answer, also where it is a 4xx."""
    effects: list[int] = []

    class Cascade(MovesOn):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            refused = False

            async def unless_refused(message: Any) -> None:
                nonlocal refused
                refused = refused or message.get("status") == missed
                if not refused:
                    await send(message)

            await self.app(scope, receive, unless_refused)
            if refused:
                effects.append(1)
                await JSONResponse({}, status)(scope, receive, send)

    app = FastAPI()
    app.post({404: "/other", 307: "/pay/"}[missed])(lambda: None)
    protect(app, once)
    app.user_middleware.append(Middleware(Cascade))
    assert (await answers(app), effects) == ([status] * 3, [1])


@pytest.mark.parametrize("how", ["answers", "raises"])
def test_flask_forwards_what_no_route_took_once(once: OnceKey, how: str) -> None:
    effects: list[int] = []
    app = Flask("shop")
    once_flask.protect(app, once)

    @app.errorhandler(404)
    def forward(_: Exception) -> Any:
        effects.append(1)
        if how == "raises":
            raise TimeoutError("the old app does not answer")
        return {}, 201

    client = app.test_client()
    said = [client.post("/pay", headers=KEY).status_code for _ in range(3)]
    assert said == ([201, 201, 201] if how == "answers" else [500, 409, 409])
    assert effects == [1]


async def test_what_an_app_does_about_an_invalid_body_is_done_once(once: OnceKey) -> None:
    """Its handler of validation errors knows an older form of the body, and charges."""
    effects: list[int] = []

    async def older_form(request: Request, error: Exception) -> Response:
        effects.append(1)
        return JSONResponse({}, 201)

    app = FastAPI(exception_handlers={RequestValidationError: older_form})
    app.post("/pay")(lambda amount: None)
    protect(app, once)
    assert (await answers(app), effects) == ([201, 201, 201], [1])


async def test_a_404_of_a_second_try_is_the_endpoints(once: OnceKey) -> None:
    """Middleware knows that the route has moved. The endpoint charges, and then does not find something."""
    effects: list[int] = []

    class Moved(MovesOn):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            found = True

            async def unless_missing(message: Any) -> None:
                nonlocal found
                found = found and message.get("status") != 404
                if found:
                    await send(message)

            await self.app(scope, receive, unless_missing)
            if not found:
                await self.app({**scope, "path": "/v2/pay"}, receive, send)

    async def pay(request: Request) -> Response:
        effects.append(1)
        return JSONResponse({}, 404)

    for app in (FastAPI(), Starlette()):
        effects.clear()
        app.router.routes.append(Route("/v2/pay", pay, methods=["POST"]))
        if isinstance(app, FastAPI):
            protect(app, once)
        else:
            app.add_middleware(IdempotencyMiddleware, once=OnceKey("memory://", scope=SINGLE_TENANT))
        app.user_middleware.append(Middleware(Moved))
        assert (await answers(app), effects) == ([404, 404, 404], [1])


async def test_what_an_envelope_makes_of_an_error_is_still_the_handlers(once: OnceKey) -> None:
    """503 for a 500, and 400 for an invalid body: said by the handler, and by the framework before it."""
    runs: list[int] = []

    class Envelope(MovesOn):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def renamed(message: Any) -> None:
                status = message.get("status")
                await send({**message, "status": {500: 503, 422: 400}.get(status, status)} if status else message)

            await self.app(scope, receive, renamed)

    app = FastAPI()

    @app.post("/pay", status_code=201)
    async def pay(response: Response) -> None:
        runs.append(1)
        response.status_code = 500 if len(runs) == 1 else 201

    app.post("/typed")(lambda amount: None)
    protect(app, once)
    app.user_middleware.append(Middleware(Envelope))
    assert await answers(app, 1, path="/typed") == [400]
    assert state(once) is None
    assert await answers(app) == [503, 201, 201]


async def test_a_redirect_of_an_endpoint_is_not_the_routers(once: OnceKey) -> None:
    """Post, redirect, get: 307 is what RedirectResponse says by default. The scope that we see does not name the
    endpoint, since middleware of the mounted app has copied it."""
    effects: list[int] = []

    class Copies:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(dict(scope), receive, send)

    app, mounted = FastAPI(), FastAPI(middleware=[Middleware(Copies)])

    @mounted.post("/pay")
    async def pay() -> Response:
        effects.append(1)
        return RedirectResponse("/receipt")

    app.mount("/sub", mounted)
    protect(app, once)
    assert (await answers(app, path="/sub/pay"), effects) == ([307, 307, 307], [1])


# ---------------------------------------------------------------- raised and returned


@pytest.mark.parametrize("how", ["raised", "returned"])
async def test_what_is_declared_of_a_returned_error_does_not_hold_for_a_raised_one(how: str) -> None:
    """``on_server_error`` speaks of a handler's own word. What its framework made of an exception is not that."""
    effects: list[int] = []

    async def pay(request: Request) -> Response:
        effects.append(1)
        if how == "raised":
            raise ValueError
        return JSONResponse({}, 500)

    async def sorry(request: Request, error: Exception) -> Response:
        return JSONResponse({}, 500)

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(on_server_error="retry")) as once:
        app = Starlette(
            routes=[Route("/pay", pay, methods=["POST"])],
            exception_handlers={ValueError: sorry},
            middleware=[Middleware(PassesOn)],
        )
        app.add_middleware(IdempotencyMiddleware, once=once)
        assert await answers(app, 2) == ([500, 409] if how == "raised" else [500, 500])
    assert len(effects) == (1 if how == "raised" else 2)


async def test_an_error_that_the_handler_returns_inside_of_an_except_is_its_word(once: OnceKey) -> None:
    """Not the handler's own ``except``: that of middleware, which called it there since its cache was down."""

    class GoesOn(PassesOn):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            try:
                raise ConnectionError("the cache is down")
            except ConnectionError:
                return await super().dispatch(request, call_next)

    class GoesOnPlainly(MovesOn):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                raise ConnectionError("the cache is down")
            except ConnectionError:
                await self.app(scope, receive, send)

    app = Starlette(routes=[Route("/pay", _returning([]), methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    app.user_middleware += [Middleware(GoesOnPlainly), Middleware(GoesOn)]
    assert await answers(app) == [503, 201, 201]
