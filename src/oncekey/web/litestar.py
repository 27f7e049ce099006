"""Litestar: ``Litestar([...], plugins=[OnceKeyPlugin(once)])`` adds the middleware, the operation and the declaration.

::

    @post("/payments")
    async def pay(data: JSONBody[Payment], operation: CurrentOperation) -> Receipt: ...

Owns what is particular to Litestar:

* It turns every exception into a response before any middleware sees it. So the exceptions that speak to oncekey
  (``Refused``, ``NotExecuted``, ``OutcomeUnknown``) are taken up in ``after_exception`` and raised again outside,
  and every other one is noted as raised.
* Its own refusal of a request (validation, a body that cannot be read) is a client error that comes out of litestar's
  code through nobody else's frames: the operation never began, and the key is not used up. Unknown paths and methods
  never get here, since middleware runs after the routing.
* Middleware may raise too, and would be answered outside of ours, where an exception is all that is left to see: so
  there is one more of litestar's own exception handlers right inside.

Our middleware is the innermost of the app's own: authentication has run, and the scope function may look at it in
``request.raw["user"]``. Middleware of routers, controllers and handlers runs inside.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from typing import Annotated, Any, cast, get_args

from litestar import Litestar, di, params
from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.middleware import DefineMiddleware
from litestar.middleware._internal.exceptions import ExceptionHandlerMiddleware  # in the public API until 2.9
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.spec import OpenAPI
from litestar.plugins import InitPluginProtocol
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import ConfigurationError, NoOperation, NotExecuted, OutcomeUnknown, Refused
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.openapi import declare
from oncekey.web.scopes import SCOPE_KEY
from oncekey.web.speakers import speaker_of
from oncekey.web.wire import checked

__all__ = ["CurrentOperation", "OnceKeyPlugin", "never_began"]

_FRAMEWORK = frozenset({"litestar", "msgspec", "anyio", "contextlib", "oncekey"})
_SAID = "oncekey.said"
"""Where an exception that speaks to us stands in the scope, between its handler and our middleware."""


class OnceKeyPlugin(InitPluginProtocol):
    """Protects every state-changing route of the app, as ``once`` says.

    ``dependency`` is the name under which handlers get their Operation: ``operation: CurrentOperation``.
    """

    def __init__(self, once: OnceKey, *, dependency: str = "operation") -> None:
        self._once = checked(once)
        self._dependency = dependency

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        if self._dependency in app_config.dependencies:
            raise ConfigurationError(
                f"the app has a dependency '{self._dependency}' of its own: OnceKeyPlugin(once, dependency='…') takes "
                "another name"
            )
        app_config.dependencies[self._dependency] = Provide(_operation, sync_to_thread=False)
        app_config.middleware.append(DefineMiddleware(cast("Any", IdempotencyMiddleware), once=self._once))
        app_config.middleware.append(_Inside)
        app_config.after_exception.append(_after_exception)
        app_config.lifespan.append(self._lifespan)
        if app_config.openapi_config is not None:
            app_config.openapi_config = _declaring(app_config.openapi_config, self._once)
        return app_config

    @asynccontextmanager
    async def _lifespan(self, _: Litestar) -> AsyncIterator[None]:
        """Refuse to start on a wrong schema; let go of everything at the end. (Middleware sees no lifespan here.)"""
        await asyncio.to_thread(self._once.start)
        try:
            yield
        finally:
            await self._once.aclose()


def _operation(scope: Scope) -> Operation:
    operation = _of(scope)
    if operation is None:
        raise NoOperation(
            f"{scope['path']} has no operation: the route is not protected, or its key is optional and this request "
            "has none"
        )
    return operation


def _marker() -> Any:
    """What tells litestar that a parameter is a dependency: NamedDependency since 2.23, which deprecates the other."""
    named = getattr(di, "NamedDependency", None)
    return params.Dependency() if named is None else get_args(named[Operation])[1]


CurrentOperation = Annotated[Operation, _marker()]
"""The Operation of this request, in a handler or a dependency; the parameter's name is the plugin's ``dependency``."""


def _of(scope: Scope) -> Operation | None:
    return cast("dict[str, Any]", scope).get(SCOPE_KEY)


# -- the key of a request that was refused -----------------------------------------------------------------------------


def never_began(error: BaseException) -> bool:
    """Whether litestar itself refused the request that ended in this error, before its handler was called."""
    if not isinstance(error, HTTPException) or not 400 <= error.status_code < 500:
        return False
    packages = []
    trace = error.__traceback__
    while trace is not None:
        packages.append(str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0])
        trace = trace.tb_next
    return packages[-1:] == ["litestar"] and _FRAMEWORK.issuperset(packages)


async def _after_exception(error: Exception, scope: Scope) -> None:
    operation = _of(scope)
    if operation is None:
        return
    operation.raised = True
    if isinstance(error, Refused | NotExecuted | OutcomeUnknown):
        cast("dict[str, Any]", scope)[_SAID] = error
    elif never_began(error):
        status: int | None = getattr(error, "status_code", None)
        operation.refused, operation.refused_as = True, None if status in (400, 422) else (status,)


class _Inside:
    """Right inside our middleware: raises what was said to us, in place of the response that litestar made of it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = ExceptionHandlerMiddleware(app, debug=None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = _of(scope)
        if operation is None:
            await self.app(scope, receive, send)
            return

        operation.passes += 1
        task = asyncio.current_task()

        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start" and speaker_of(status := message["status"], task) is not None:
                operation.said = status
            if _SAID not in scope:
                await send(message)

        await self.app(scope, receive, pass_on)
        if (said := cast("dict[str, Any]", scope).get(_SAID)) is not None:
            raise said


# -- OpenAPI -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Declared(OpenAPI):
    """The document, with our declaration added when it is written out."""

    def to_schema(self) -> dict[str, Any]:
        once: OnceKey = self.__dict__["_once"]
        return declare(
            super().to_schema(),
            once.routes,
            profile=once.profile,
            docs_url=once.docs_url,
            authenticates=once.single_tenant is None,
            authorizes=once.authorize is not None,
        )


def _declaring(config: OpenAPIConfig, once: OnceKey) -> OpenAPIConfig:
    """A copy of the app's configuration (the default one is everybody's) whose documents declare."""
    changed = copy(config)

    def to_openapi_schema() -> OpenAPI:
        made = config.to_openapi_schema()
        declared = _Declared(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})
        declared.__dict__["_once"] = once
        return declared

    changed.to_openapi_schema = to_openapi_schema  # type: ignore[method-assign]
    return changed
