"""Litestar: ``Litestar([...], plugins=[OnceKeyPlugin(once)])`` adds middleware, operation and OpenAPI declarations.

::

    @post("/payments")
    async def pay(data: JSONBody[Payment], operation: CurrentOperation) -> Receipt: ...

Owns what is particular to Litestar:

* The router runs before any middleware, so the middleware knows the handler of a request, and wraps it then
  (``web/endpoints.py``). Requests with an unknown path or method do not reach the middleware.
* Litestar turns every exception into a response before any middleware sees it. ``after_exception`` reports exceptions
  for oncekey (``Refused``, ``NotExecuted``, ``OutcomeUnknown``), and those of Litestar's own validation.
* Inner middleware may raise too. Litestar would answer that outside of oncekey's middleware, which would see only the
  exception. So one more of Litestar's exception handlers runs directly inside of it.

oncekey's middleware is the innermost of the app's own. So authentication has run, and the scope function may read its
result in ``request.raw["user"]``. Middleware of routers, controllers and handlers runs inside.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from copy import copy
from functools import partial
from typing import Annotated, Any, cast, get_args

from litestar import Litestar, di, params
from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.exceptions import ClientException, HTTPException, ValidationException
from litestar.handlers import HTTPRouteHandler
from litestar.middleware import DefineMiddleware
from litestar.middleware._internal.exceptions import ExceptionHandlerMiddleware  # in the public API until 2.9
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.spec import OpenAPI
from litestar.plugins import InitPluginProtocol
from litestar.plugins.base import ReceiveRoutePlugin  # 2.15 has it here only
from litestar.response import Response
from litestar.response.base import ASGIResponse
from litestar.routes import BaseRoute
from litestar.types import ASGIApp, Receive, Scope, Send

from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import ConfigurationError, NoOperation
from oncekey.upkeep.in_app import UpkeepChoice, chosen
from oncekey.web import tuning
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.asgi_scope import SCOPE_KEY
from oncekey.web.declared import Handler, Match, Only, check_declarations, checked_only, matcher
from oncekey.web.endpoints import MARK, wrapped
from oncekey.web.event_loop import require_asyncio
from oncekey.web.openapi import declare
from oncekey.web.responses import checked

__all__ = ["CurrentOperation", "OnceKeyPlugin"]


class OnceKeyPlugin(InitPluginProtocol, ReceiveRoutePlugin):
    """Protects every state-changing route of the app, as ``once`` says.

    ``only="declared"``: protects what ``routes`` or ``@once.policy`` declares; other routes pass untouched, and those
    that change something are named in the log at start.

    ``dependency`` is the name under which handlers get their Operation: ``operation: CurrentOperation``.
    ``tune``: while the app is up, set Python's garbage collector and switch interval (docs/servers.md).
    ``upkeep``: as :class:`oncekey.web.asgi.IdempotencyMiddleware` has it; the plugin starts and ends it with the app.
    """

    def __init__(
        self,
        once: OnceKey,
        *,
        dependency: str = "operation",
        tune: bool = True,
        upkeep: UpkeepChoice = "auto",
        only: Only | None = None,
    ) -> None:
        self._once = checked(once)
        self._make_upkeep = chosen(once, upkeep)
        self._only = checked_only(only)
        self._handlers = _Handlers()
        self._tune = tune
        self._dependency = dependency

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        if self._dependency in app_config.dependencies:
            raise ConfigurationError(
                f"the app has a dependency '{self._dependency}' of its own: OnceKeyPlugin(once, dependency='…') takes "
                "another name"
            )
        app_config.dependencies[self._dependency] = Provide(_operation, sync_to_thread=False)
        ours = DefineMiddleware(
            cast("Any", IdempotencyMiddleware),
            once=self._once,
            upkeep=False,
            only=self._only,
            endpoints=self._handlers,
        )
        app_config.middleware.append(ours)
        app_config.middleware.append(_Inside)
        app_config.after_exception.append(_after_exception)
        app_config.lifespan.append(self._lifespan)
        if app_config.openapi_config is not None:
            app_config.openapi_config = _declaring(app_config.openapi_config, self._once, self._match)
        return app_config

    def receive_route(self, route: BaseRoute) -> None:
        """Litestar shows each route that is added to the app."""
        self._handlers.routes.append(route)

    def _match(self) -> Match:
        return matcher(self._handlers.each(), self._once, self._only)

    @asynccontextmanager
    async def _lifespan(self, app: Litestar) -> AsyncIterator[None]:
        """Refuse to start on a wrong schema; at the end wait for handlers and close everything.

        Litestar's middleware does not see the lifespan. Litestar ends lifespans in the reverse order: put a plugin that
        closes what handlers use before this one in ``plugins``.
        """
        require_asyncio()
        self._handlers.check_app(app, self._once, self._only)
        await asyncio.to_thread(self._once.start)
        if self._tune:
            tuning.settle()
        upkeep = self._make_upkeep() if self._make_upkeep is not None else None
        try:
            if upkeep is not None:
                upkeep.start()
            yield
        finally:
            if upkeep is not None:
                await self._once.drain()
                await upkeep.astop()
            if self._tune:
                tuning.restore()
            await self._once.aclose()


class _Handlers:
    """The handlers of the app. Litestar's router runs before any middleware, and puts the handler into the scope."""

    def __init__(self) -> None:
        self.routes: list[BaseRoute] = []
        self._checked = False

    def __deepcopy__(self, _: object) -> _Handlers:
        return self  # Litestar copies the arguments of middleware

    def cover(self) -> bool:
        return False  # ``_Inside`` sets ``covered`` for each request

    def knows_route(self, _: Any) -> bool:
        return True

    async def answer_to_error(self, _: Any, __: Exception) -> None:
        return None  # Litestar answers every exception itself, inside of the middleware

    def handler(self, scope: Any) -> Handler | None:
        handler = scope.get("route_handler")
        return Handler(handler.fn, scope["path_template"]) if isinstance(handler, HTTPRouteHandler) else None

    def check(self, scope: Any, once: OnceKey, only: Only | None) -> None:
        self.check_app(scope.get("litestar_app") or scope["app"], once, only)

    def check_app(self, app: Litestar, once: OnceKey, only: Only | None) -> None:
        """Check once only: Litestar makes one middleware for each handler."""
        if not self._checked:
            check_declarations(app, once, only)
            self._checked = True

    def each(self) -> Iterator[tuple[str, str, Any]]:
        for route in self.routes:
            for handler in getattr(route, "route_handlers", ()):
                for method in getattr(handler, "http_methods", ()):
                    yield str(method), route.path, handler.fn


def _operation(scope: Scope) -> Operation:
    operation = _of(scope)
    if operation is None:
        raise NoOperation(
            f"{scope['path']} has no operation: the route is not protected, or its key is optional and this request "
            "has none"
        )
    return operation


def _marker() -> Any:
    """Marks a parameter as a dependency for Litestar: NamedDependency since 2.23, before that ``params.Dependency``."""
    named = getattr(di, "NamedDependency", None)
    return params.Dependency() if named is None else get_args(named[Operation])[1]


CurrentOperation = Annotated[Operation, _marker()]
"""The Operation of this request, in a handler or a dependency; the parameter's name is the plugin's ``dependency``."""


def _of(scope: Scope) -> Operation | None:
    return cast("dict[str, Any]", scope).get(SCOPE_KEY)


# -- the key of a request that was refused -----------------------------------------------------------------------------


async def _after_exception(error: Exception, scope: Scope) -> None:
    operation = _of(scope)
    if operation is not None:
        operation.evidence.heard(error)
        if isinstance(error, ValidationException) or type(error) is ClientException:  # the body has no valid syntax
            operation.evidence.refused_by_validation()


class _Inside:
    """Directly inside of oncekey's middleware: it wraps the request's handler, which reports from then on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = ExceptionHandlerMiddleware(app, debug=None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = _of(scope)
        if operation is not None:
            operation.evidence.covered = _wrap(scope["route_handler"])
        await self.app(scope, receive, send)


def _wrap(handler: Any) -> bool:
    """False: it is a mounted ASGI app, whose endpoints are not wrapped."""
    if not isinstance(handler, HTTPRouteHandler):
        return False
    if not hasattr(handler._fn, MARK):
        awaited = not handler.has_sync_callable
        handler._fn = wrapped(handler._fn, partial(_status_of, handler), _status_of_error, awaited=awaited)
    return True


def _status_of(handler: HTTPRouteHandler, result: Any, _: dict[str, Any]) -> int:
    """The status of a Response, or the status that the handler declares."""
    status: int | None = getattr(result, "status_code", None) if isinstance(result, Response | ASGIResponse) else None
    return status or handler.status_code


def _status_of_error(error: BaseException) -> int | None:
    return error.status_code if isinstance(error, HTTPException) else None


# -- OpenAPI -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Declared(OpenAPI):
    """The document, with oncekey's declarations added when it is written."""

    def to_schema(self) -> dict[str, Any]:
        once: OnceKey = self.__dict__["_once"]
        return declare(
            super().to_schema(),
            self.__dict__["_match"](),
            profile=once.profile,
            docs_url=once.docs_url,
            authenticates=once.single_tenant is None,
            authorizes=once.authorize is not None,
        )


def _declaring(config: OpenAPIConfig, once: OnceKey, match: Callable[[], Match]) -> OpenAPIConfig:
    """A copy of the app's configuration whose documents have the declarations. (All apps share the default one.)"""
    changed = copy(config)

    def to_openapi_schema() -> OpenAPI:
        made = config.to_openapi_schema()
        declared = _Declared(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})
        declared.__dict__.update(_once=once, _match=match)
        return declared

    changed.to_openapi_schema = to_openapi_schema  # type: ignore[method-assign]
    return changed
