"""The app under load: one trivial endpoint, in Starlette and in FastAPI, bare or protected.

uvicorn calls :func:`create`, which reads what to build from the environment, so that bare and protected
differ in one variable and nothing else:

* ``ONCEKEY_BENCH_FRAMEWORK``: ``starlette`` (default) or ``fastapi``;
* ``ONCEKEY_BENCH_STORE``: the store's URL; empty or absent means bare.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

FRAMEWORK = "ONCEKEY_BENCH_FRAMEWORK"
STORE = "ONCEKEY_BENCH_STORE"


def create() -> Starlette:
    """The app that the environment asks for."""
    framework = os.environ.get(FRAMEWORK, "starlette")
    factories = {"starlette": starlette_app, "fastapi": fastapi_app}
    if framework not in factories:
        raise SystemExit(f"{FRAMEWORK}={framework}: it takes {' or '.join(factories)}")
    app = factories[framework]()
    url = os.environ.get(STORE)
    return protect(app, url) if url else app


def protect(app: Starlette, url: str) -> Starlette:
    """Put the middleware in front, as the README does."""
    from oncekey import SINGLE_TENANT, OnceKey
    from oncekey.web.asgi import IdempotencyMiddleware

    once = OnceKey(url, scope=SINGLE_TENANT, migrate=True)
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def starlette_app() -> Starlette:
    numbers = itertools.count(1)

    async def pay(request: Request) -> JSONResponse:
        asked = await request.json()
        number = next(numbers)
        return JSONResponse(
            {"id": number, "amount": asked["amount"], "currency": asked["currency"], "status": "created"},
            status_code=201,
            headers={"Location": f"/payments/{number}"},
        )

    return Starlette(routes=[Route("/payments", pay, methods=["POST"])])


def fastapi_app() -> Starlette:
    from fastapi import FastAPI

    app = FastAPI()
    numbers = itertools.count(1)

    @app.post("/payments", status_code=201)
    async def pay(response: Response, asked: dict[str, Any]) -> dict[str, Any]:
        number = next(numbers)
        response.headers["Location"] = f"/payments/{number}"
        return {"id": number, "amount": asked["amount"], "currency": asked["currency"], "status": "created"}

    return app
