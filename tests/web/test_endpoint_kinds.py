"""Endpoints that need a word of their own: streams, files, hosts, and middleware that keeps more than one reference.

How endpoints are declared otherwise is in tests/web/verdicts.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Host, Mount, Route, Router
from starlette.staticfiles import StaticFiles

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect
from tests.web.retrying_client import Layer, answers, replies, state
from tests.web.versions import YIELDING_ENDPOINTS


async def declined(request: Request) -> Response:
    current().downstream_key("charge")
    return JSONResponse({}, 402)


# ---------------------------------------------------------------- streams


async def async_lines() -> AsyncIterable[bytes]:
    yield b"one "
    yield b"two"


def lines() -> Iterable[bytes]:
    yield b"one "
    yield b"two"


async def async_lines_that_break() -> AsyncIterable[bytes]:
    yield b"one "
    raise ConnectionError("the provider hung up")


@pytest.mark.parametrize("endpoint", [async_lines, lines])
async def test_generator_endpoint_is_stored_when_it_has_ended(once: OnceKey, endpoint: Callable[..., Any]) -> None:
    async def streams() -> Response:
        return StreamingResponse(endpoint(), 201)

    app = FastAPI()
    app.post("/pay", status_code=201)(streams)
    protect(app, once)
    first, second = await replies(app, 2)
    assert (first.status_code, first.content, second.content) == (201, b"one two", b"one two")
    assert second.headers["idempotency-replayed"] == "true"
    assert state(once) is State.COMPLETED


needs_yielding_endpoints = pytest.mark.skipif(
    not YIELDING_ENDPOINTS, reason="an async endpoint with yield needs FastAPI 0.134"
)


@pytest.mark.parametrize("endpoint", [pytest.param(async_lines, marks=needs_yielding_endpoints), lines])
async def test_endpoint_that_yields_is_stored_when_it_has_ended(once: OnceKey, endpoint: Callable[..., Any]) -> None:
    """FastAPI makes the stream of an endpoint with ``yield``: the wrapped one is still a generator function to it."""
    app = FastAPI()
    app.post("/pay", status_code=201, response_class=StreamingResponse)(endpoint)
    protect(app, once)
    first, second = await replies(app, 2)
    assert (first.status_code, first.content, second.content) == (201, b"one two", b"one two")
    assert state(once) is State.COMPLETED


@pytest.mark.parametrize(("effects", "then"), [("external", State.UNKNOWN), ("repeatable", State.FAILED_RETRYABLE)])
async def test_stream_that_breaks_off_is_not_stored(effects: Any, then: State) -> None:
    async def streams() -> Response:
        return StreamingResponse(async_lines_that_break(), 201)

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(effects=effects)) as once:
        app = FastAPI()
        app.post("/pay")(streams)
        protect(app, once)
        assert await answers(app, 1) == [500]
        assert state(once) is then


async def test_response_that_cannot_be_serialized_is_not_stored(once: OnceKey) -> None:
    """The endpoint returned, and had done its work."""
    app = FastAPI()

    @app.post("/pay", response_model=None)
    async def pay() -> Any:
        return {"amount": object()}

    protect(app, once)
    assert (await answers(app), state(once)) == ([500, 409, 409], State.UNKNOWN)


# ---------------------------------------------------------------- mounted and routed by host


async def test_endpoint_behind_a_host_route_is_heard(once: OnceKey) -> None:
    inner = Router([Route("/pay", declined, methods=["POST"])])
    app = Starlette(routes=[Host("api.test", inner)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    assert await answers(app) == [402, 402, 402]
    assert state(once) is State.FAILED
    assert await answers(app, 1, path="/nowhere", headers={"Idempotency-Key": "k-2"}) == [404]
    assert once.store.read([("single-tenant", "k-2")]) == [None]


async def test_405_of_static_files_is_an_answer(once: OnceKey, tmp_path: Path) -> None:
    """An app that is not wrapped: what it answers counts as its word, and is said once."""
    app = FastAPI()
    app.mount("/files", StaticFiles(directory=tmp_path))
    protect(app, once)
    assert await answers(app, path="/files/a.txt") == [405, 405, 405]
    assert state(once) is State.FAILED


async def test_raw_app_as_default_of_a_router_counts_as_entered(once: OnceKey) -> None:
    runs: list[int] = []

    async def other(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await JSONResponse({}, 402)(scope, receive, send)

    app = IdempotencyMiddleware(Starlette(routes=[Mount("/", Router([], default=other))]), once)
    assert (await answers(app), runs, state(once)) == ([402, 402, 402], [1], State.FAILED)


# ---------------------------------------------------------------- middleware of a route


class KeepsTwice(Layer):
    """Calls the app by another name than ``app``."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.next = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.next(scope, receive, send)


class KeepsInClosure(Layer):
    def __init__(self, app: Any) -> None:
        super().__init__(app)

        async def call(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)

        self.call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.call(scope, receive, send)


def plain_function(app: Any) -> Any:
    async def call(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)

    return call


class KeepsByAnotherName:
    def __init__(self, app: Any) -> None:
        self.next = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.next(scope, receive, send)


LAYERS = [KeepsTwice, KeepsInClosure, plain_function, KeepsByAnotherName]
RUNS: list[int] = []


class Payments(HTTPEndpoint):
    async def post(self, request: Request) -> Response:
        RUNS.append(1)
        return JSONResponse({}, 402)


class PaymentsInAThread(HTTPEndpoint):
    def post(self, request: Request) -> Response:
        RUNS.append(1)
        return JSONResponse({}, 402)


async def pay(request: Request) -> Response:
    RUNS.append(1)
    return JSONResponse({}, 402)


def pay_in_a_thread(request: Request) -> Response:
    RUNS.append(1)
    return JSONResponse({}, 402)


@pytest.mark.parametrize("endpoint", [pay, pay_in_a_thread, Payments, PaymentsInAThread])
@pytest.mark.parametrize("layer", LAYERS)
async def test_endpoint_counts_as_entered_however_middleware_of_its_route_keeps_it(
    once: OnceKey, layer: Any, endpoint: Any
) -> None:
    """Its 402 is final. A request that never entered it would run again."""
    RUNS.clear()
    methods = None if isinstance(endpoint, type) else ["POST"]
    app = Starlette(
        routes=[Route("/pay", endpoint, methods=methods, middleware=[Middleware(layer), Middleware(Layer)])]
    )
    app.add_middleware(IdempotencyMiddleware, once=once)
    assert (await answers(app), RUNS, state(once)) == ([402, 402, 402], [1], State.FAILED)


@pytest.mark.parametrize("layer", [KeepsTwice, KeepsInClosure, plain_function])
@pytest.mark.parametrize("endpoint", [pay, pay_in_a_thread])
async def test_endpoint_is_wrapped_behind_middleware_of_its_route(once: OnceKey, layer: Any, endpoint: Any) -> None:
    """What the middleware itself refuses leaves the key unused: the endpoint would have reported."""
    RUNS.clear()
    allowed = False

    class Guard(Layer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if allowed:
                await self.app(scope, receive, send)
            else:
                await JSONResponse({}, 403)(scope, receive, send)

    route = Route("/pay", endpoint, methods=["POST"], middleware=[Middleware(Guard), Middleware(layer)])
    app = Starlette(routes=[route])
    app.add_middleware(IdempotencyMiddleware, once=once)
    assert (await answers(app, 2), state(once), RUNS) == ([403, 403], None, [])
    allowed = True
    assert (await answers(app, 2), state(once), RUNS) == ([402, 402], State.FAILED, [1])


async def test_method_that_calls_super_is_entered_once(once: OnceKey) -> None:
    """Both classes have a route, so both are wrapped; a second call would make its 402 the word of the last one."""

    class Careful(Payments):
        async def post(self, request: Request) -> Response:
            return await super().post(request)

    RUNS.clear()
    app = Starlette(routes=[Route("/base", Payments), Route("/pay", Careful)])
    app.add_middleware(IdempotencyMiddleware, once=once)
    assert (await answers(app), RUNS, state(once)) == ([402, 402, 402], [1], State.FAILED)
    other = {"Idempotency-Key": "k-2"}
    assert (await answers(app, 2, path="/base", headers=other), len(RUNS)) == ([402, 402], 2)


@pytest.mark.parametrize("endpoint", [pay, Payments])
async def test_endpoint_of_two_apps_reports_to_each(endpoint: Any) -> None:
    RUNS.clear()
    for _ in range(2):
        with OnceKey("memory://", scope=SINGLE_TENANT) as once:
            methods = None if isinstance(endpoint, type) else ["POST"]
            app = Starlette(routes=[Route("/pay", endpoint, methods=methods)])
            app.add_middleware(IdempotencyMiddleware, once=once)
            assert (await answers(app), state(once)) == ([402, 402, 402], State.FAILED)
    assert RUNS == [1, 1]
