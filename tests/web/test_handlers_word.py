"""The handler's own answer is seen through the usual middleware, whatever the integration and the kind of endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from litestar import Litestar, post
from litestar.response import Response as LitestarResponse
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.states import State
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect
from oncekey.web.litestar import OnceKeyPlugin
from tests.web.retrying_client import CopiesScope, Layer, PassesOn, answers, state


@pytest.fixture
def retrying() -> Iterator[OnceKey]:
    """Where a 5xx of the handler itself means that nothing happened: only its own word gives the key back."""
    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(on_server_error="retry")) as once:
        yield once


class Endpoint(HTTPEndpoint):
    runs = 0

    async def post(self, request: Request) -> Response:
        Endpoint.runs += 1
        return JSONResponse({}, 201 if Endpoint.runs > 1 else 503)


def returning(runs: list[int]) -> Callable[..., Any]:
    async def pay(request: Request) -> Response:
        runs.append(1)
        return JSONResponse({}, 201 if len(runs) > 1 else 503)

    return pay


def starlette(once: OnceKey, runs: list[int]) -> Any:
    app = Starlette(routes=[Route("/pay", returning(runs), methods=["POST"])], middleware=[Middleware(PassesOn)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def endpoint_class(once: OnceKey, runs: list[int]) -> Any:
    Endpoint.runs = 0
    app = Starlette(routes=[Route("/pay", Endpoint)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def around(once: OnceKey, runs: list[int]) -> Any:
    return IdempotencyMiddleware(Starlette(routes=[Route("/pay", returning(runs), methods=["POST"])]), once)


def mounted(once: OnceKey, runs: list[int]) -> Any:
    inner = FastAPI(middleware=[Middleware(PassesOn)])
    inner.post("/pay")(returning(runs))
    app = Starlette(routes=[Mount("/", inner)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def fastapi(once: OnceKey, runs: list[int]) -> Any:
    app = FastAPI(middleware=[Middleware(PassesOn)])
    app.post("/pay")(returning(runs))
    protect(app, once)
    return app


def streaming(once: OnceKey, runs: list[int]) -> Any:
    """Sent by a task of its own, with the servers of today."""

    async def pay(request: Request) -> Response:
        runs.append(1)
        return StreamingResponse(iter([b"{", b"}"]), 201 if len(runs) > 1 else 503)

    app = FastAPI(middleware=[Middleware(PassesOn)])
    app.post("/pay")(pay)
    protect(app, once)
    return app


def litestar(once: OnceKey, runs: list[int]) -> Any:
    @post("/pay")
    async def pay() -> LitestarResponse[None]:
        runs.append(1)
        return LitestarResponse(None, status_code=201 if len(runs) > 1 else 503)

    return Litestar([pay], plugins=[OnceKeyPlugin(once)], logging_config=None)


@pytest.mark.parametrize("make", [starlette, endpoint_class, around, mounted, fastapi, streaming, litestar])
async def test_returned_error_is_the_handlers_word(retrying: OnceKey, make: Callable[..., Any]) -> None:
    assert await answers(make(retrying, [])) == [503, 201, 201]


async def test_returned_error_is_the_handlers_word_inside_an_except(retrying: OnceKey) -> None:
    """Not the handler's own ``except``: that of middleware, which called it there since its cache was down."""

    class GoesOn(PassesOn):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            try:
                raise ConnectionError("the cache is down")
            except ConnectionError:
                return await super().dispatch(request, call_next)

    class GoesOnPlainly(Layer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                raise ConnectionError("the cache is down")
            except ConnectionError:
                await self.app(scope, receive, send)

    app = Starlette(routes=[Route("/pay", returning([]), methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=retrying)
    app.user_middleware += [Middleware(GoesOnPlainly), Middleware(GoesOn)]
    assert await answers(app) == [503, 201, 201]


async def test_error_that_an_envelope_renames_is_still_the_handlers_word(retrying: OnceKey) -> None:
    """503 for a 500 of the handler, and 400 for an invalid body, which the framework refused."""
    runs: list[int] = []

    class Envelope(Layer):
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
    protect(app, retrying)
    app.user_middleware.append(Middleware(Envelope))
    assert await answers(app, 1, path="/typed") == [400]
    assert state(retrying) is None
    assert await answers(app) == [503, 201, 201]


@pytest.mark.parametrize("how", ["raised", "returned"])
async def test_on_server_error_does_not_hold_for_an_exception_that_a_handler_answers(
    retrying: OnceKey, how: str
) -> None:
    """What an error handler made of an exception is not the handler's word."""
    effects: list[int] = []

    async def pay(request: Request) -> Response:
        effects.append(1)
        if how == "raised":
            raise ValueError
        return JSONResponse({}, 500)

    async def sorry(request: Request, error: Exception) -> Response:
        return JSONResponse({}, 500)

    app = Starlette(
        routes=[Route("/pay", pay, methods=["POST"])],
        exception_handlers={ValueError: sorry},
        middleware=[Middleware(PassesOn)],
    )
    app.add_middleware(IdempotencyMiddleware, once=retrying)
    assert await answers(app, 2) == ([500, 409] if how == "raised" else [500, 500])
    assert len(effects) == (1 if how == "raised" else 2)


@pytest.mark.parametrize("effects", ["external", "transactional", "repeatable"])
async def test_success_of_an_error_handler_is_not_sent(effects: Any) -> None:
    """The endpoint raised: what it wrote is rolled back, and a 200 would say that it stands."""

    async def pay(request: Request) -> Response:
        raise ValueError

    async def fine(request: Request, error: Exception) -> Response:
        return JSONResponse({"paid": True}, 200)

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(effects=effects)) as once:
        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])], exception_handlers={ValueError: fine})
        app.add_middleware(IdempotencyMiddleware, once=once)
        external = effects == "external"
        assert await answers(app, 2) == ([409, 409] if external else [500, 500])
        assert state(once) is (State.UNKNOWN if external else State.FAILED_RETRYABLE)


async def test_redirect_of_an_endpoint_is_stored(once: OnceKey) -> None:
    """Post, redirect, get: 307 is what RedirectResponse says by default, and what a router says too. The mounted app's
    middleware copies the scope."""
    effects: list[int] = []
    app, inner = FastAPI(), FastAPI(middleware=[Middleware(CopiesScope)])

    @inner.post("/pay")
    async def pay() -> Response:
        effects.append(1)
        return RedirectResponse("/receipt")

    app.mount("/sub", inner)
    protect(app, once)
    assert (await answers(app, path="/sub/pay"), effects) == ([307, 307, 307], [1])
