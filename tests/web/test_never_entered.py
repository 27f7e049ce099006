"""Requests whose endpoint is never entered: refused, forwarded elsewhere, or answered by middleware."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from flask import Flask
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.states import State
from oncekey.web import flask as once_flask
from oncekey.web import starlette as once_starlette
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import CurrentOperation, protect
from tests.web.retrying_client import KEY, Layer, answers, state

# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("status", [302, 400, 401, 402, 403, 404, 425, 429])
async def test_refusal_of_middleware_leaves_the_key_unused(once: OnceKey, status: int) -> None:
    runs: list[int] = []

    class Guard(Layer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if (b"authorization", b"me") in scope["headers"]:
                await self.app(scope, receive, send)
            else:
                await JSONResponse({}, status)(scope, receive, send)

    async def pay(request: Request) -> Response:
        runs.append(1)
        return JSONResponse({}, 201)

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])], middleware=[Middleware(Guard)])
    once_starlette.protect(app, once)
    assert await answers(app, 2) == [status, status]
    assert state(once) is None
    assert await answers(app, 2, headers={"authorization": "me"}, json={"another": "body"}) == [201, 201]
    assert runs == [1]


@pytest.mark.parametrize("status", [303, 401, 402, 403, 429])
async def test_refusal_of_a_dependency_leaves_the_key_unused(once: OnceKey, status: int) -> None:
    async def signed_in() -> None:
        raise HTTPException(status)

    app = FastAPI()
    app.post("/pay", dependencies=[Depends(signed_in)])(lambda: None)
    protect(app, once)
    assert (await answers(app, 2), state(once)) == ([status, status], None)


async def test_refusal_of_a_later_attempt_gives_the_key_back(once: OnceKey) -> None:
    """The key stands for its first request: it stays, with its fingerprint."""
    allowed: list[bool] = [True, False, True]

    async def permitted() -> None:
        if not allowed.pop(0):
            raise HTTPException(403)

    app = FastAPI()

    @app.post("/pay", dependencies=[Depends(permitted)])
    async def pay(op: CurrentOperation) -> Any:
        return JSONResponse({}, 429 if op.attempt == 1 else 201)

    protect(app, once)
    assert await answers(app, 2) == [429, 403]
    assert state(once) is State.FAILED_RETRYABLE
    assert await answers(app, 1, json={"another": "body"}) == [422]
    assert await answers(app, 2) == [201, 201]


class Payment(BaseModel):
    amount: float


async def test_validation_handler_that_fails_leaves_the_key_unused(once: OnceKey) -> None:
    """NaN is no number of JSON: FastAPI's own answer to an invalid body cannot be written with it."""
    app = FastAPI()

    @app.post("/pay", status_code=201)
    async def pay(payment: list[Payment]) -> None: ...

    protect(app, once)
    body = json.dumps({"amount": float("nan")})
    assert await answers(app, 2, content=body, headers={"content-type": "application/json"}) == [500, 500]
    assert state(once) is None
    assert await answers(app, 2, json=[{"amount": 1}]) == [201, 201]


@pytest.mark.parametrize("effects", ["external", "transactional", "phased", "repeatable"])
async def test_exception_of_a_dependency_follows_the_effects(effects: Any) -> None:
    async def session() -> None:
        raise ConnectionError("the database is down")

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(effects=effects)) as once:
        app = FastAPI()
        app.post("/pay", dependencies=[Depends(session)])(lambda: None)
        protect(app, once)
        external = effects == "external"
        assert await answers(app, 2) == ([500, 409] if external else [500, 500])
        assert state(once) is (State.UNKNOWN if external else State.FAILED_RETRYABLE)


# ---------------------------------------------------------------- answered by others


async def test_success_of_middleware_is_stored_and_warned_about(
    once: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    answered: list[int] = []

    class Answers(Layer):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            answered.append(1)
            await JSONResponse({}, 200)(scope, receive, send)

    app = Starlette(routes=[Route("/pay", lambda request: None, methods=["POST"])], middleware=[Middleware(Answers)])
    once_starlette.protect(app, once)
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert (await answers(app), answered) == ([200, 200, 200], [1])
        await answers(app, 1, headers={"Idempotency-Key": "k-2"})
    told = [record for record in caplog.records if "before its endpoint was entered" in record.getMessage()]
    assert len(told) == 1
    assert told[0].getMessage().startswith("POST /pay was answered with a success")


@pytest.mark.parametrize("how", ["answers", "raises"])
@pytest.mark.parametrize("kind", ["fastapi", "starlette"])
async def test_request_that_a_404_handler_forwards_is_forwarded_once(once: OnceKey, kind: str, how: str) -> None:
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


@pytest.mark.parametrize("how", ["answers", "raises"])
def test_request_that_a_404_handler_of_flask_forwards_is_forwarded_once(once: OnceKey, how: str) -> None:
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


@pytest.mark.parametrize(
    ("missed", "status", "expected", "times"),
    [
        (404, 201, [201, 201, 201], 1),
        (307, 201, [201, 201, 201], 1),
        (404, 503, [503, 409, 409], 1),
        (404, 402, [402, 402, 402], 3),  # a refusal before the endpoint: the key stays unused
    ],
)
async def test_cascade_to_another_app_is_stored_by_its_response(
    once: OnceKey, missed: int, status: int, expected: list[int], times: int
) -> None:
    """A cascade. A success is stored, and an error leaves the outcome open; a 4xx before any endpoint refuses."""
    effects: list[int] = []

    class Cascade(Layer):
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
    assert (await answers(app), len(effects)) == (expected, times)


async def test_success_of_a_validation_handler_is_stored(once: OnceKey) -> None:
    """It knows an older form of the body, and charges."""
    effects: list[int] = []

    async def older_form(request: Request, error: Exception) -> Response:
        effects.append(1)
        return JSONResponse({}, 201)

    app = FastAPI(exception_handlers={RequestValidationError: older_form})
    app.post("/pay")(lambda amount: None)
    protect(app, once)
    assert (await answers(app), effects) == ([201, 201, 201], [1])


async def test_404_of_an_endpoint_that_middleware_found_later_is_stored(once: OnceKey) -> None:
    """Middleware knows that the route has moved. The endpoint charges, and then does not find something."""
    effects: list[int] = []

    class Moved(Layer):
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
