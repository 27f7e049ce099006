"""The app under load: one trivial endpoint, bare or behind one of the guards.

uvicorn calls :func:`create`, gunicorn :func:`create_wsgi`; both read what to build from the environment, so that two
contestants differ in their variables and nothing else:

* ``ONCEKEY_BENCH_GUARD``: ``bare``, ``oncekey``, a peer (``peers.py``) or a way by hand (``by_hand.py``); without it,
  ``oncekey`` where there is a store, else ``bare``;
* ``ONCEKEY_BENCH_STORE``: where the guard keeps its keys;
* ``ONCEKEY_BENCH_CACHE``: the Redis in front of oncekey's store; without it, there is none;
* ``ONCEKEY_BENCH_FRAMEWORK``: ``starlette`` (default) or ``fastapi``;
* ``ONCEKEY_BENCH_INSERT``: the database into which the handler writes one row; without it, it writes nothing.

``GET /executions`` says how often the handler of this process has run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks import by_hand, peers

GUARD = "ONCEKEY_BENCH_GUARD"
FRAMEWORK = "ONCEKEY_BENCH_FRAMEWORK"
STORE = "ONCEKEY_BENCH_STORE"
INSERT = "ONCEKEY_BENCH_INSERT"
CACHE = "ONCEKEY_BENCH_CACHE"

POOL_SIZE = 32
"""Connections of the handler that writes: enough for its 64 clients, few enough not to queue in the database."""
BUSINESS_TABLE = "CREATE TABLE IF NOT EXISTS payments (id bigserial PRIMARY KEY, amount bigint, currency text)"
BUSINESS_INSERT = "INSERT INTO payments (amount, currency) VALUES ($1, $2)"


def create() -> Starlette:
    """The ASGI app that the environment asks for."""
    framework = os.environ.get(FRAMEWORK, "starlette")
    url, insert = os.environ.get(STORE), os.environ.get(INSERT)
    guard = os.environ.get(GUARD) or ("oncekey" if url else "bare")
    if guard == "dbos":
        return peers.dbos_app(url or "", Executions(), insert)
    if guard in by_hand.GUARDS:
        return by_hand.app(guard, url or "", Executions(), inserts=insert is not None)
    factories = {"starlette": starlette_app, "fastapi": fastapi_app}
    if framework not in factories:
        raise SystemExit(f"{FRAMEWORK}={framework}: it takes {' or '.join(factories)}")
    app = inserting_app(insert, enlists=guard == "oncekey") if insert else factories[framework]()
    if guard == "bare":
        return app
    if not url:
        raise SystemExit(f"{GUARD}={guard} needs {STORE}")
    if guard == "oncekey":
        return protect(app, url, effects="transactional" if insert else "external", cache=os.environ.get(CACHE))
    if guard not in peers.GUARDS:
        raise SystemExit(
            f"{GUARD}={guard}: it takes bare, oncekey, dbos, {', '.join((*peers.GUARDS, *by_hand.GUARDS))}"
        )
    return peers.GUARDS[guard](app, url)


def protect(app: Starlette, url: str, effects: Any = "external", cache: str | None = None) -> Starlette:
    """Put the middleware in front, as the README does."""
    from oncekey import SINGLE_TENANT, OnceKey, Policy
    from oncekey.web.asgi import IdempotencyMiddleware

    options = {} if cache is None else cache_options(cache)
    once = OnceKey(url, scope=SINGLE_TENANT, policy=Policy(effects=effects), migrate=True, **options)
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def cache_options(url: str) -> dict[str, Any]:
    """The options of OnceKey for a cache."""
    return {"cache": url, "cache_secret": "only for benchmarks"}


class Executions:
    """Counts how often the handler ran. Its numbers begin elsewhere in every process, so that no two answers agree."""

    def __init__(self) -> None:
        self.count = 0
        self._base = os.getpid() * 1_000_000_000

    def next(self) -> int:
        self.count += 1
        return self._base + self.count

    async def show(self, request: Request) -> JSONResponse:
        return JSONResponse({"executions": self.count})


def payment(number: int, asked: dict[str, Any]) -> dict[str, Any]:
    """What the handler answers; a note in the request comes back, which makes the answer as large as the request."""
    made = {"id": number, "amount": asked["amount"], "currency": asked["currency"], "status": "created"}
    return {**made, "note": asked["note"]} if "note" in asked else made


def created(answer: dict[str, Any], background: BackgroundTask | None = None) -> JSONResponse:
    location = {"Location": f"/payments/{answer['id']}"}
    return JSONResponse(answer, status_code=201, headers=location, background=background)


def starlette_app() -> Starlette:
    executions = Executions()

    async def pay(request: Request) -> JSONResponse:
        return created(payment(executions.next(), await request.json()))

    return Starlette(
        routes=[Route("/payments", pay, methods=["POST"]), Route("/executions", executions.show, methods=["GET"])]
    )


def fastapi_app() -> Starlette:
    from fastapi import FastAPI

    app = FastAPI()
    executions = Executions()

    @app.post("/payments", status_code=201)
    async def pay(response: Response, asked: dict[str, Any]) -> dict[str, Any]:
        answer = payment(executions.next(), asked)
        response.headers["Location"] = f"/payments/{answer['id']}"
        return answer

    app.add_route("/executions", executions.show, methods=["GET"])
    return app


def inserting_app(url: str, *, enlists: bool) -> Starlette:
    """The handler writes a row of business: in a commit of its own or, enlisted, in the one that completes the key."""
    import asyncpg

    from oncekey import current

    executions = Executions()
    pools: list[Any] = []
    opening = asyncio.Lock()

    async def pool() -> Any:
        async with opening:
            if not pools:
                pools.append(await asyncpg.create_pool(url, min_size=POOL_SIZE, max_size=POOL_SIZE))
        return pools[0]

    async def pay(request: Request) -> JSONResponse:
        asked = await request.json()
        connections = pools[0] if pools else await pool()
        if not enlists:
            async with connections.acquire() as connection:
                await connection.execute(BUSINESS_INSERT, asked["amount"], asked["currency"])
            return created(payment(executions.next(), asked))
        connection = await connections.acquire()
        await current().enlist(connection)
        await connection.execute(BUSINESS_INSERT, asked["amount"], asked["currency"])
        return created(payment(executions.next(), asked), BackgroundTask(connections.release, connection))

    return Starlette(
        routes=[Route("/payments", pay, methods=["POST"]), Route("/executions", executions.show, methods=["GET"])]
    )


# ---------------------------------------------------------------- WSGI

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def create_wsgi() -> WsgiApp:
    """The WSGI app that the environment asks for."""
    url = os.environ.get(STORE)
    guard = os.environ.get(GUARD) or ("oncekey" if url else "bare")
    app = wsgi_app()
    if guard == "bare" or not url:
        return app
    if guard == "oncekey":
        from oncekey import SINGLE_TENANT, OnceKey
        from oncekey.web.wsgi import IdempotencyMiddleware

        return IdempotencyMiddleware(app, once=OnceKey(url, scope=SINGLE_TENANT, migrate=True))
    return peers.WSGI_GUARDS[guard](app, url)


def wsgi_app() -> WsgiApp:
    numbers = itertools.count(1)  # next() of it is one step for all threads
    ran = [0]

    def pay(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if environ["REQUEST_METHOD"] == "GET":
            body = json.dumps({"executions": ran[0]}).encode()
            start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
            return [body]
        asked = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        ran[0] = number = next(numbers)
        body = json.dumps(payment(number, asked)).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response("201 Created", [*headers, ("Location", f"/payments/{number}")])
        return [body]

    return pay
