"""FastAPI: ``protect(app, once)`` adds the middleware, spares keys of refused requests, and declares it all in OpenAPI.

::

    once = OnceKey("sqlite:///app.db", scope=tenant_of)
    protect(app, once)

    @app.post("/payments", status_code=201)
    async def pay(payment: Payment, op: CurrentOperation) -> Receipt: ...

Owns how one tells, in FastAPI, that the operation never began, so that the key is not used up:

* *its validation refused the request*: a ``RequestValidationError`` whose innermost frame is FastAPI's. An endpoint may
  raise that error too, and then it did begin. What a dependency with ``yield`` or a custom route class makes of it counts
  as well: it is the context of the new error.
* *the body could not be read, or no route or method fits*: an ``HTTPException`` that comes from the routing code through
  nobody's frames but the framework's.
* *the router redirects to the path with or without the slash*: the client comes again with the same key and another path,
  and must not find it taken.

All of it is seen in the exception handlers, wherever they were registered, since they are wrapped when the app builds its
stack, with those of mounted apps. A dependency runs before the body is validated: if it used a verb of the operation,
``Operation.discardable`` keeps the key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, routing
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import ConfigurationError, NoOperation
from oncekey.web.asgi import SCOPE_KEY, IdempotencyMiddleware
from oncekey.web.openapi import declare

__all__ = ["CurrentOperation", "OptionalOperation", "declare_openapi", "protect", "spare_refused"]

_FRAMEWORK = frozenset({"fastapi", "starlette", "anyio", "contextlib", "oncekey"})
_READS_AND_ROUTES = frozenset({"fastapi.routing", "starlette.routing", "starlette.requests"})
_MARK = "__oncekey__"


def protect(app: FastAPI, once: OnceKey) -> None:
    """Make every state-changing route of ``app`` run once per key, as ``once`` says.

    Middleware that is added after this runs outside of it: add authentication that the scope function relies on later.
    """
    if any(item.cls is IdempotencyMiddleware for item in app.user_middleware):  # type: ignore[comparison-overlap]
        raise ConfigurationError("protect(app, once): this app is protected already; call it once")
    app.add_middleware(_Redirects)
    app.add_middleware(IdempotencyMiddleware, once=once)
    spare_refused(app)
    declare_openapi(app, once)


def operation_of(connection: HTTPConnection) -> Operation:
    """The Operation of this request; NoOperation where the route is not protected or the request has no key."""
    operation = optional_operation(connection)
    if operation is None:
        raise NoOperation(
            f"{connection.scope['path']} has no operation: the route is not protected, or its key is optional and "
            "this request has none; ask for OptionalOperation, which is None then"
        )
    return operation


def optional_operation(connection: HTTPConnection) -> Operation | None:
    """The Operation of this request, or None."""
    operation: Operation | None = connection.scope.get(SCOPE_KEY)
    return operation


async def _operation_of(connection: HTTPConnection) -> Operation:  # async: FastAPI sends plain functions to a thread
    return operation_of(connection)


async def _optional_operation(connection: HTTPConnection) -> Operation | None:
    return optional_operation(connection)


CurrentOperation = Annotated[Operation, Depends(_operation_of)]
"""``op: CurrentOperation`` in an endpoint or a dependency."""

OptionalOperation = Annotated[Operation | None, Depends(_optional_operation)]
"""As CurrentOperation, and None where the request is not protected."""


# -- the key of a request that was refused -----------------------------------------------------------------------------


def spare_refused(app: Starlette) -> None:
    """Discard the key of a request that FastAPI refuses. Part of :func:`protect`; alone, for a FastAPI app that stands
    inside another app which has the middleware."""
    original = app.build_middleware_stack
    if hasattr(original, _MARK):
        return

    def build_middleware_stack() -> ASGIApp:
        # Now, and not earlier: handlers and mounts may be added until the app builds its stack.
        for _, mounted in _mounted(app):
            spare_refused(mounted)
        handlers = app.exception_handlers
        app.exception_handlers = {
            kind: handler if kind in (500, Exception) else _wrapped(handler) for kind, handler in handlers.items()
        }
        try:
            return original()
        finally:
            app.exception_handlers = handlers

    setattr(build_middleware_stack, _MARK, True)
    app.build_middleware_stack = build_middleware_stack  # type: ignore[method-assign]


def never_began(error: BaseException) -> bool:
    """Whether FastAPI refused the request that ended in this error, before its endpoint was called."""
    modules = [frame.f_globals.get("__name__", "") for frame in _frames(error)]
    if not modules:
        return False
    if isinstance(error, RequestValidationError):
        return _package(modules[-1]) == "fastapi"
    if isinstance(error, HTTPException) and modules[-1] in _READS_AND_ROUTES:
        return all(_package(module) in _FRAMEWORK for module in modules)
    cause = error.__cause__ or error.__context__
    return isinstance(cause, RequestValidationError) and never_began(cause)


def _frames(error: BaseException) -> Iterator[Any]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _package(module: str) -> str:
    return module.partition(".")[0]


def _wrapped(handler: Callable[..., Any]) -> Callable[..., Any]:
    asynchronous = _is_async(handler)

    @functools.wraps(handler, updated=())
    async def wrapped(connection: HTTPConnection, error: Exception) -> Any:
        operation = optional_operation(connection)
        if operation is not None and never_began(error):
            operation.refused = True
        if asynchronous:
            return await handler(connection, error)
        return await run_in_threadpool(handler, connection, error)

    return wrapped


def _is_async(handler: Any) -> bool:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - it is called, not asked whether it can be


class _Redirects:
    """Sees the router's own redirect, which is returned and not raised. Stands right inside our middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation: Operation | None = scope.get(SCOPE_KEY)
        if operation is None:
            await self.app(scope, receive, send)
            return

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (307, 308) and _unrouted(scope):
                operation.refused = True
            await send(message)

        await self.app(scope, receive, seen)


def _unrouted(scope: Scope) -> bool:
    """A router looked at this very scope and found no endpoint, or only an app that looks further."""
    endpoint = scope.get("endpoint")
    return "router" in scope and (endpoint is None or isinstance(endpoint, Starlette | Router))


# -- mounted apps and OpenAPI ------------------------------------------------------------------------------------------


def _mounted(app: Starlette) -> Iterator[tuple[str, Starlette]]:
    """The apps mounted in ``app``, each with its path; also those inside included routers or behind middleware."""
    contexts = getattr(routing, "iter_route_contexts", iter)  # newer FastAPI keeps included routers as one route
    for route in contexts(app.routes):
        inner = getattr(route, "app", None)
        while inner is not None and not isinstance(inner, Starlette):
            inner = getattr(inner, "app", None) if not isinstance(inner, Router) else None
        if inner is not None:
            yield getattr(route, "path", None) or "", inner


def declare_openapi(app: FastAPI, once: OnceKey, *, prefix: str = "") -> None:
    """Say in the app's OpenAPI document which operations take a key, and what they answer. Part of :func:`protect`."""
    original = app.openapi
    if hasattr(original, _MARK):
        return
    last: tuple[object, dict[str, Any]] | None = None

    def openapi() -> dict[str, Any]:
        nonlocal last
        document = original()
        if last is None or last[0] is not document:
            for path, mounted in _mounted(app):
                if isinstance(mounted, FastAPI):
                    declare_openapi(mounted, once, prefix=prefix + path)
            declared = declare(
                document,
                once.routes,
                profile=once.profile,
                docs_url=once.docs_url,
                authenticates=once.single_tenant is None,
                prefix=prefix,
            )
            last = (document, declared)
        return last[1]

    setattr(openapi, _MARK, True)
    app.openapi = openapi  # type: ignore[method-assign]
