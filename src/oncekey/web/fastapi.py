"""FastAPI: ``protect(app, once)`` adds the middleware, spares the keys of refused requests, and declares it in OpenAPI.

::

    once = OnceKey("sqlite:///app.db", scope=tenant_of)
    protect(app, once)

    @app.post("/payments", status_code=201)
    async def pay(payment: Payment, op: CurrentOperation) -> Receipt: ...

Owns how one tells, in FastAPI, that the operation never began, so that the key is not used up:

* *its validation refused the request*: a ``RequestValidationError`` whose innermost frame is FastAPI's. An endpoint may
  raise that error too, and then it did begin. What a custom route class, or a dependency with ``yield``, makes of the
  error counts as well: it is the context of the new one.
* *credentials are missing, the body cannot be read, no route or method fits*: an ``HTTPException`` out of the
  framework's own code, through nobody else's frames.
* *the router redirects to the path with or without its slash*: the client comes again with the same key and another
  path, and must not find the key taken.

Errors are seen in the exception handlers. They are wrapped, with those of mounted apps, when the app builds its stack,
so it does not matter when they were registered. A dependency runs before the body is validated: if it used a verb of
the operation, ``Operation.discardable`` keeps the key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, routing
from fastapi import __version__ as fastapi_version
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Router
from starlette.types import ASGIApp

from oncekey.engine import enlisting
from oncekey.engine.enlisting import Commit
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import ConfigurationError, NoOperation
from oncekey.upkeep.service import Upkeep
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.openapi import declare
from oncekey.web.scopes import SCOPE_KEY
from oncekey.web.wire import checked

__all__ = [
    "CurrentOperation",
    "OptionalOperation",
    "declare_openapi",
    "enlisted_session",
    "never_began",
    "protect",
    "spare_refused",
]

_FRAMEWORK = frozenset({"fastapi", "starlette", "anyio", "contextlib", "oncekey"})
_BEFORE_THE_ENDPOINT = ("fastapi.routing", "fastapi.security.", "starlette.routing", "starlette.requests")
_MARK = "__oncekey__"


def protect(app: FastAPI, once: OnceKey, *, upkeep: bool | Upkeep = False) -> None:
    """Make every state-changing route of ``app`` run once per key, as ``once`` says.

    ``upkeep``: as :class:`oncekey.web.asgi.IdempotencyMiddleware` has it.

    Middleware that is added after this runs outside of it: add authentication that the scope function relies on later.
    """
    if any(getattr(item, "cls", None) is IdempotencyMiddleware for item in app.user_middleware):
        raise ConfigurationError("protect(app, once): this app is protected already; call it once")
    checked(once)  # the middleware itself is made at the first request
    app.add_middleware(IdempotencyMiddleware, once=once, upkeep=upkeep)
    spare_refused(app)
    declare_openapi(app, once)


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

    Needs FastAPI 0.118 or newer: before, dependencies ended before the response, and took the transaction with them.
    """
    if _version() < (0, 118):
        raise ConfigurationError(f"enlisted_session needs fastapi>=0.118, and this is {fastapi_version}: upgrade it")

    async def dependency(operation: CurrentOperation) -> AsyncIterator[Any]:
        # Not by operation.enlist: it runs before the body is validated, and a refused body must not use up the key.
        session = make()
        if hasattr(session, "sync_session"):
            async with session:
                await enlisting.start(operation, session, commit)
                yield session
            return
        try:
            await run_in_threadpool(enlisting.start, operation, session, commit, blocking=True)
            yield session
        finally:
            await run_in_threadpool(session.close)

    return dependency


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in fastapi_version.split(".")[:2] if part.isdecimal())


OptionalOperation = Annotated[Operation | None, Depends(_optional_operation)]
"""As CurrentOperation, and None where the route is not protected or its optional key was not sent."""


# -- the key of a request that was refused -----------------------------------------------------------------------------


def spare_refused(app: Starlette) -> None:
    """Discard the key of a request that ``app`` or an app mounted in it refuses. Part of :func:`protect`; alone, for
    an app that stands inside another which has the middleware."""

    def wrap_handlers() -> None:
        for each in (app, *(mounted for _, mounted in _mounted(app))):
            for kind, handler in list(each.exception_handlers.items()):
                if kind not in (500, Exception) and not hasattr(handler, _MARK):
                    each.exception_handlers[kind] = _wrapped(handler)

    _before_stack(app, wrap_handlers)


def never_began(error: BaseException) -> bool:
    """Whether the framework refused the request that ended in this error, before its endpoint was called."""
    modules = []
    trace = error.__traceback__
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__")))
        trace = trace.tb_next
    if not modules:
        return False
    packages = [module.partition(".")[0] for module in modules]
    if isinstance(error, RequestValidationError):
        return packages[-1] == "fastapi"
    if isinstance(error, HTTPException) and modules[-1].startswith(_BEFORE_THE_ENDPOINT):
        return _FRAMEWORK.issuperset(packages)
    context = error.__cause__ or error.__context__
    return isinstance(context, RequestValidationError) and never_began(context)


def _wrapped(handler: Callable[..., Any]) -> Callable[..., Any]:
    function = handler.func if isinstance(handler, functools.partial) else handler
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    call = handler if is_async else functools.partial(run_in_threadpool, handler)

    async def wrapped(connection: HTTPConnection, error: Exception) -> Any:
        operation: Operation | None = connection.scope.get(SCOPE_KEY)
        if operation is None or not never_began(error):
            return await call(connection, error)
        operation.refused = True
        # With which 4xx an invalid body is refused is the app's affair. Of a 404 somebody may make more than an answer.
        operation.refused_as = (error.status_code,) if isinstance(error, HTTPException) else None
        return await call(connection, error)

    setattr(wrapped, _MARK, True)
    return wrapped


# -- OpenAPI -----------------------------------------------------------------------------------------------------------


def declare_openapi(app: FastAPI, once: OnceKey) -> None:
    """Say in the app's OpenAPI document which operations take a key, and what they answer; in the documents of mounted
    apps too, from the first request on. Part of :func:`protect`."""

    def wrap_all() -> None:
        _wrap_openapi(app, once, "")  # again: the app may have put a function of its own there since
        for prefix, mounted in _mounted(app):
            if isinstance(mounted, FastAPI):
                _wrap_openapi(mounted, once, prefix)

    _wrap_openapi(app, once, "")
    _before_stack(app, wrap_all)


def _wrap_openapi(app: FastAPI, once: OnceKey, prefix: str) -> None:
    original = app.openapi
    if hasattr(original, _MARK):
        return
    last: tuple[object, dict[str, Any]] | None = None

    def openapi() -> dict[str, Any]:
        nonlocal last
        document = original()  # FastAPI makes a new one when routes were added, and the same one otherwise
        if last is None or last[0] is not document:
            declared = declare(
                document,
                once.routes,
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


def _before_stack(app: Starlette, action: Callable[[], None]) -> None:
    """Run ``action`` when the app builds its stack, before its first request: all it consists of is known by then."""
    original = app.build_middleware_stack

    def build_middleware_stack() -> ASGIApp:
        action()
        return original()

    app.build_middleware_stack = build_middleware_stack  # type: ignore[method-assign]


def _mounted(app: Starlette | Router, prefix: str = "") -> Iterator[tuple[str, Starlette]]:
    """The apps mounted in ``app`` and in those, each with its path; included routers and middleware are looked into."""
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
