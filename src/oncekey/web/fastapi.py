"""FastAPI: ``protect(app, once)`` adds the middleware, wraps the endpoints, and declares the key in OpenAPI.

::

    once = OnceKey("sqlite:///app.db", scope=tenant_of)
    protect(app, once)

    @app.post("/payments", status_code=201)
    async def pay(payment: Payment, op: CurrentOperation) -> Receipt: ...

Endpoints are found and wrapped as Starlette's are (``web/starlette.py``), so a request that FastAPI refuses before its
endpoint (validation, security, an unknown path) does not use up its key. Dependencies run before the endpoint. What a
dependency does outside of the database is not protected, unless it uses a verb of the operation: then the operation has
begun.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, routing
from fastapi import __version__ as fastapi_version
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.routing import Router

from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.engine.transactions import enlistment
from oncekey.engine.transactions.enlistment import Commit
from oncekey.errors import ConfigurationError, NoOperation
from oncekey.upkeep.in_app import UpkeepChoice
from oncekey.web import starlette
from oncekey.web.asgi_scope import SCOPE_KEY
from oncekey.web.declared import Match, Only, endpoints_of, matcher
from oncekey.web.openapi import declare

__all__ = [
    "CurrentOperation",
    "OptionalOperation",
    "declare_openapi",
    "enlisted_session",
    "protect",
]

_MARK = "__oncekey__"


def protect(
    app: FastAPI, once: OnceKey, *, upkeep: UpkeepChoice = "auto", tune: bool = True, only: Only | None = None
) -> None:
    """Make every state-changing route of ``app`` run once per key, as ``once`` says.

    ``upkeep``, ``tune``, ``only``: as :class:`oncekey.web.asgi.IdempotencyMiddleware` has them.

    Middleware that is added after this runs outside of it: add authentication that the scope function relies on later.
    """
    starlette.protect(app, once, upkeep=upkeep, tune=tune, only=only)
    declare_openapi(app, once, only=only)


async def _optional_operation(connection: HTTPConnection) -> Operation | None:
    operation: Operation | None = connection.scope.get(SCOPE_KEY)
    return operation


async def _operation(connection: HTTPConnection) -> Operation:
    operation = await _optional_operation(connection)
    if operation is None:
        raise NoOperation(
            f"{connection.scope['path']} has no operation: the route is not protected, or its key is optional and "
            "this request has none; ask for OptionalOperation, which is None then"
        )
    return operation


CurrentOperation = Annotated[Operation, Depends(_operation)]
"""``op: CurrentOperation``, in an endpoint or a dependency."""


def enlisted_session(make: Callable[[], Any], *, commit: Commit = "engine") -> Callable[..., AsyncIterator[Any]]:
    """A dependency that gives a SQLAlchemy session that is enlisted already, and closes it after the response.

    ``make``: a ``sessionmaker``, an ``async_sessionmaker``, or any function that returns a session. ::

        PaySession = Annotated[Session, Depends(enlisted_session(SessionLocal))]

        @app.post("/payments", status_code=201)
        def pay(payment: Payment, session: PaySession) -> Receipt: ...

    Needs FastAPI 0.118 or newer: an older FastAPI ends dependencies, and so the transaction, before the response.
    """
    if _version() < (0, 118):
        raise ConfigurationError(f"enlisted_session needs fastapi>=0.118, and this is {fastapi_version}: upgrade it")

    async def dependency(operation: CurrentOperation) -> AsyncIterator[Any]:
        # Not operation.enlist: this runs before the body is validated, and a refused body must not use up the key.
        session = make()
        if hasattr(session, "sync_session"):
            async with session:
                await enlistment.start(operation, session, commit)
                yield session
            return
        try:
            await run_in_threadpool(enlistment.start, operation, session, commit, blocking=True)
            yield session
        finally:
            await run_in_threadpool(session.close)

    return dependency


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in fastapi_version.split(".")[:2] if part.isdecimal())


OptionalOperation = Annotated[Operation | None, Depends(_optional_operation)]
"""CurrentOperation, or None if the route is not protected or the client sent no optional key."""


# -- OpenAPI -----------------------------------------------------------------------------------------------------------


def declare_openapi(app: FastAPI, once: OnceKey, *, only: Only | None = None) -> None:
    """Describe in the app's OpenAPI document which operations take a key, and what they answer; from the first request
    on also in the documents of mounted apps. :func:`protect` calls it."""

    def match() -> Match:
        return matcher(endpoints_of(app), once, only)

    def wrap_all() -> None:
        _wrap_openapi(app, once, match, "")  # again: the app may have replaced the function since then
        for prefix, mounted in _mounted(app):
            if isinstance(mounted, FastAPI):
                _wrap_openapi(mounted, once, match, prefix)

    _wrap_openapi(app, once, match, "")
    starlette.before_stack(app, wrap_all)


def _wrap_openapi(app: FastAPI, once: OnceKey, match: Callable[[], Match], prefix: str) -> None:
    original = app.openapi
    if hasattr(original, _MARK):
        return
    last: tuple[object, dict[str, Any]] | None = None

    def openapi() -> dict[str, Any]:
        nonlocal last
        document = original()  # FastAPI makes a new document after routes were added, otherwise it returns the same
        if last is None or last[0] is not document:
            declared = declare(
                document,
                match(),
                profile=once.profile,
                docs_url=once.docs_url,
                authenticates=once.single_tenant is None,
                authorizes=once.authorize is not None,
                prefix=prefix,
            )
            last = (document, declared)
        return last[1]

    setattr(openapi, _MARK, True)
    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation says to


# -- how an app is put together ----------------------------------------------------------------------------------------


def _mounted(app: Starlette | Router, prefix: str = "") -> Iterator[tuple[str, Starlette]]:
    """All apps that are mounted in ``app``, at any depth, each with its path; also behind routers and middleware."""
    contexts = getattr(routing, "iter_route_contexts", iter)  # newer FastAPI keeps an included router as one route
    for route in contexts(app.routes):
        inner = getattr(route, "app", None)
        while inner is not None and not isinstance(inner, Starlette | Router):
            inner = getattr(inner, "app", None)  # behind middleware
        if inner is None:
            continue
        path = prefix + (getattr(route, "path", None) or "")
        if isinstance(inner, Starlette):
            yield path, inner
        yield from _mounted(inner, path)
