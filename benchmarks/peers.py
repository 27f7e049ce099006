"""The peers as contestants, each set up as its own documentation says for production.

A peer is imported only by the function that builds it, and by name: what is not installed is a row "not installed" in
the report, and never an error, not for the type checker either.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from benchmarks.apps import Executions, WsgiApp

PACKAGES = {
    "idemkit": "idemkit",
    "asgi-idempotency-header": "asgi-idempotency-header",
    "dbos": "dbos",
    "procrastinate": "procrastinate",
    "pgqueuer": "pgqueuer",
}
POOL_SIZE = 20
REDIS_CONNECTIONS = 1024
"""redis-py opens at most 100 by default, and the next caller gets an error. idemkit stores after it has answered, so
that 64 clients need more than 64 connections."""


def version(peer: str) -> str | None:
    """The installed version of a peer, or None."""
    try:
        return metadata.version(PACKAGES[peer])
    except metadata.PackageNotFoundError:
        return None


def module(name: str) -> Any:
    return importlib.import_module(name)


# ---------------------------------------------------------------- idemkit


def _idemkit_backend(url: str) -> Any:
    """Its README: ``from_url`` for either; for PostgreSQL the pool is to be sized for the concurrency."""
    idemkit = module("idemkit")
    if url.startswith("redis"):
        return idemkit.RedisBackend.from_url(url, max_connections=REDIS_CONNECTIONS)
    return idemkit.PostgresBackend.from_url(url, min_size=POOL_SIZE, max_size=POOL_SIZE)


def _idemkit(app: Starlette, url: str) -> Starlette:
    """Without ``scope``: one tenant, as oncekey is set up here."""
    app.add_middleware(module("idemkit").IdempotencyMiddleware, backend=_idemkit_backend(url))
    return app


def _idemkit_wsgi(app: WsgiApp, url: str) -> WsgiApp:
    guarded: WsgiApp = module("idemkit").WSGIIdempotencyMiddleware(app, backend=_idemkit_backend(url))
    return guarded


async def prepare_idemkit(url: str) -> None:
    """What ``idemkit init-pg`` does."""
    await module("idemkit.backends.postgres").init_pg(url)


# ---------------------------------------------------------------- asgi-idempotency-header


def _asgi_idempotency_header(app: Starlette, url: str) -> Starlette:
    redis = module("redis.asyncio").from_url(url, max_connections=REDIS_CONNECTIONS)
    backend = module("idempotency_header_middleware.backends").RedisBackend(redis=redis)
    app.add_middleware(module("idempotency_header_middleware").IdempotencyHeaderMiddleware, backend=backend)
    return app


# ---------------------------------------------------------------- DBOS


def dbos_app(url: str, executions: Executions, insert: str | None = None) -> Starlette:
    """A handler that runs a workflow under the key as its id, and answers with its result.

    No step inside, unless the handler writes: then one transaction of its datasource, which commits the row and the
    step's checkpoint together. The workflow is called directly, which costs less than a handle that is started and
    asked for its result.
    """
    from sqlalchemy import text

    from benchmarks.apps import created, payment

    dbos = module("dbos")
    config = {"name": "bench", "system_database_url": url, "sys_db_pool_size": POOL_SIZE, "log_level": "WARNING"}
    dbos.DBOS(config=config)
    sources: list[Any] = []
    statement = text("INSERT INTO payments (amount, currency) VALUES (:amount, :currency)")

    async def write(asked: dict[str, Any]) -> None:
        await sources[0].sql_session().execute(statement, asked)

    async def run(asked: dict[str, Any]) -> dict[str, Any]:
        if sources:
            await sources[0].run_tx_step_async({"isolation_level": "READ COMMITTED"}, write, asked)
        return payment(executions.next(), asked)

    pay_once = dbos.DBOS.workflow(name="pay_once")(run)

    async def pay(request: Request) -> JSONResponse:
        asked = await request.json()
        key = request.headers.get("idempotency-key")
        if key is None:
            return JSONResponse({"error": "a key is needed"}, status_code=400)
        with dbos.SetWorkflowID(key.strip('"')):
            return created(await pay_once(asked))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if insert:  # it has to be there before the launch
            pool = {"pool_size": POOL_SIZE, "max_overflow": 0}
            sources.append(await dbos.AsyncSQLAlchemyDatasource.create(insert, engine_kwargs=pool))
        dbos.DBOS.launch()
        yield
        dbos.DBOS.destroy()

    return Starlette(
        routes=[Route("/payments", pay, methods=["POST"]), Route("/executions", executions.show, methods=["GET"])],
        lifespan=lifespan,
    )


GUARDS: dict[str, Callable[[Starlette, str], Starlette]] = {
    "idemkit": _idemkit,
    "asgi-idempotency-header": _asgi_idempotency_header,
}
WSGI_GUARDS: dict[str, Callable[[WsgiApp, str], WsgiApp]] = {"idemkit": _idemkit_wsgi}
