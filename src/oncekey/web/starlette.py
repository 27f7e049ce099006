"""Starlette: ``protect(app, once)`` adds the middleware and wraps the app's endpoints.

::

    once = OnceKey("sqlite:///app.db", scope=tenant_of)
    protect(app, once)

Owns how endpoints are found in the routers of Starlette and FastAPI:

* ``Route`` with a function, ``HTTPEndpoint`` classes, and FastAPI's ``dependant.call`` are wrapped
  (``web/endpoints.py``), in mounted apps and included routers too, also when they are added after the first request.
* A mounted app of another framework or a raw ASGI endpoint cannot be wrapped. It is marked as foreign: a request
  that reaches it may have entered an endpoint that does not report.
* The handler of validation errors reports that validation refused the request before its endpoint. So the key stays
  unused, also if that handler fails itself (on ``NaN``, for example).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from types import FunctionType
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.routing import BaseRoute, Host, Mount, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from oncekey.engine.once import OnceKey
from oncekey.engine.operation import _current
from oncekey.errors import ConfigurationError
from oncekey.upkeep.in_app import UpkeepChoice
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.asgi_scope import SCOPE_KEY
from oncekey.web.declared import Handler, Only, check_declarations, checked_only
from oncekey.web.endpoints import MARK, ForeignApp, wrapped
from oncekey.web.responses import checked
from oncekey.web.starlette_errors import is_async, wrap_handlers
from oncekey.web.starlette_router import RouterLookup, app_behind

__all__ = ["protect"]

_MOST_LAYERS = 100
_METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "query")


def protect(
    app: Starlette, once: OnceKey, *, upkeep: UpkeepChoice = "auto", tune: bool = True, only: Only | None = None
) -> None:
    """Make every state-changing route of ``app`` run once per key, as ``once`` says.

    ``upkeep``, ``tune``, ``only``: as :class:`oncekey.web.asgi.IdempotencyMiddleware` has them.

    Middleware that is added after this runs outside of it: add authentication that the scope function relies on later.
    A ``CORSMiddleware`` always runs outside of it, so that a browser can read oncekey's answers too.
    """
    if any(getattr(item, "cls", None) is IdempotencyMiddleware for item in app.user_middleware):
        raise ConfigurationError("protect(app, once): this app is protected already; call it once")
    checked(once)  # the middleware itself is made at the first request
    endpoints = Endpoints(app)
    app.add_middleware(
        IdempotencyMiddleware, once=once, upkeep=upkeep, tune=tune, only=checked_only(only), endpoints=endpoints
    )

    def prepare() -> None:
        _cors_outside(app)
        endpoints.cover()

    before_stack(app, prepare)


def before_stack(app: Starlette, action: Callable[[], None]) -> None:
    """Run ``action`` when the app builds its stack, before its first request: then all its parts are known."""
    original = app.build_middleware_stack

    def build_middleware_stack() -> ASGIApp:
        action()
        return original()

    app.build_middleware_stack = build_middleware_stack  # type: ignore[method-assign]


def _cors_outside(app: Starlette) -> None:
    """Move ``CORSMiddleware`` outside: without its headers a browser cannot read oncekey's replays and refusals."""
    stack: list[Any] = app.user_middleware
    ours = next(i for i, item in enumerate(stack) if item.cls is IdempotencyMiddleware)
    inside = [item for item in stack[ours:] if isinstance(item.cls, type) and issubclass(item.cls, CORSMiddleware)]
    rest = [item for item in stack[ours:] if item not in inside]
    stack[ours:] = [*inside, *rest]


class Endpoints:
    """Finds and wraps the endpoints of an app, again after routes were added."""

    def __init__(self, app: Starlette | Router) -> None:
        self._app = app
        self._router = RouterLookup()
        self._seen: list[tuple[list[BaseRoute], int, BaseRoute | None]] = []
        """Each list of routes, its length and its last route: they show whether the list has changed."""
        self._known: dict[int, Any] = {}
        self._complete = True

    def cover(self) -> bool:
        """Wrap new endpoints. True: all endpoints are wrapped, so a request without a report entered none."""
        for routes, count, last in self._seen:
            if len(routes) != count or (count and routes[-1] is not last):
                break
        else:
            if self._seen:
                return self._complete
        self._seen, self._known, self._complete = [], {}, True
        self._router = RouterLookup()
        self._wrap_app(self._app)
        return self._complete

    def check(self, _: Scope, once: OnceKey, only: Only | None) -> None:
        """Check what the handlers declare."""
        check_declarations(self._app, once, only)

    def handler(self, scope: Scope) -> Handler | None:
        """The handler that the app's router will find for this request."""
        self.cover()
        return self._router.handler(self._app, scope)

    def knows_route(self, scope: Scope) -> bool:
        """Whether the route that matched this request was wrapped. If not, all routes are read again before the next
        request."""
        route = scope.get("route")
        if route is None or id(route) in self._known:
            return True
        self._seen = []
        return False

    async def answer_to_error(self, scope: Scope, error: Exception) -> tuple[int, ASGIApp] | None:
        """Starlette calls the handler of ``Exception`` or of 500 in its outermost middleware, outside of oncekey's."""
        app = self._app
        if not isinstance(app, Starlette) or app.debug:  # with debug, Starlette sends a page with the traceback
            return None
        handler: Any = app.exception_handlers.get(500) or app.exception_handlers.get(Exception)
        if handler is None:
            return None
        request = Request(scope)
        if is_async(handler):
            response = await handler(request, error)
        else:
            response = await run_in_threadpool(handler, request, error)
        return response.status_code, response

    def _wrap_app(self, app: Starlette | Router) -> None:
        if isinstance(app, Starlette):
            wrap_handlers(app)
        router = app.router if isinstance(app, Starlette) else app
        if getattr(router.default, "__func__", None) is not Router.not_found and not _is_foreign(router.default):
            router.default = ForeignApp(router.default)
        self._watch(router.routes)
        for route in self._router.learn(router):
            self._known[id(route)] = route
            self._wrap_route(route)

    def _watch(self, routes: list[BaseRoute]) -> None:
        self._seen.append((routes, len(routes), routes[-1] if routes else None))
        for route in routes:
            self._known[id(route)] = route
            included = getattr(route, "original_router", None)
            if included is not None:  # newer FastAPI: an included router, to which routes may still be added
                self._watch(included.routes)

    def _wrap_route(self, route: Any) -> None:
        if (dependant := getattr(route, "dependant", None)) is not None:
            if getattr(route, "methods", None):
                _wrap_fastapi(route, dependant)
        elif isinstance(route, Mount | Host):
            inner = app_behind(route.app)
            if inner is not None:
                self._wrap_app(inner)
            elif not _is_foreign(route.app):
                route.app = ForeignApp(route.app)
        elif isinstance(route, Route):
            if not (_wrap_function(route) or _wrap_class(route) or _is_foreign(route.app)):
                route.app = ForeignApp(route.app)
        elif not isinstance(route, WebSocketRoute):
            self._complete = False  # an unknown kind of route


def _is_foreign(app: Any) -> bool:
    return isinstance(app, ForeignApp)


def _status_of_response(response: Any, _: dict[str, Any]) -> int:
    status: int = getattr(response, "status_code", 200)
    return status


def _status_of_error(error: BaseException) -> int | None:
    return error.status_code if isinstance(error, HTTPException) else None


def _wrap_fastapi(route: Any, dependant: Any) -> None:
    """FastAPI reads ``dependant.call`` at each request. A return value that is not a Response gets the route's status,
    or the status that the endpoint set on its Response parameter."""
    default: int = getattr(route, "status_code", None) or 200
    parameter: str | None = dependant.response_param_name

    def status_of(result: Any, arguments: dict[str, Any]) -> int:
        status = getattr(result, "status_code", None) if hasattr(result, "raw_headers") else None
        if status is None and parameter is not None:
            status = arguments[parameter].status_code
        return status or default

    dependant.call = wrapped(dependant.call, status_of, _status_of_error)
    if not hasattr(route.app, MARK):
        route.app = _app_in_context(route.app)


def _app_in_context(app: ASGIApp) -> ASGIApp:
    """``_in_context`` for a whole route."""

    def in_context(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if _current.get() is None and SCOPE_KEY in scope:
            _current.set(scope[SCOPE_KEY])
        return app(scope, receive, send)

    setattr(in_context, MARK, True)
    return in_context


def _wrap_function(route: Route) -> bool:
    """Starlette keeps the function in a closure, behind the route's middleware. The function is replaced inside of that
    closure, because middleware may hold other references to the closure."""
    endpoint = route.endpoint
    if not _is_function(endpoint):
        return False
    for cell in _cells(route.app):
        held = cell.cell_contents
        in_thread = isinstance(held, functools.partial) and held.args == (endpoint,)
        if held is endpoint or in_thread:
            call = wrapped(endpoint, _status_of_response, _status_of_error)
            cell.cell_contents = _in_context(
                functools.partial(run_in_threadpool, call) if in_thread else call, endpoint
            )
            return True
        if hasattr(held, MARK) and held.__wrapped__ is endpoint:
            return True
    return False


def _in_context(call: Callable[..., Any], endpoint: Any) -> Callable[..., Any]:
    """``call`` with the operation in the context: middleware may call it in a new context."""

    def in_context(request: HTTPConnection) -> Awaitable[Any]:
        if _current.get() is None and SCOPE_KEY in request.scope:
            _current.set(request.scope[SCOPE_KEY])
        result: Awaitable[Any] = call(request)
        return result

    in_context.__wrapped__ = endpoint  # type: ignore[attr-defined]
    setattr(in_context, MARK, True)
    return in_context


def _cells(app: Any) -> Iterator[Any]:
    """The closure cells of the functions in a chain of middleware. A class keeps the next layer as ``app``."""
    waiting: list[Any] = [app]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_LAYERS:
        layer = waiting.pop()
        while layer is not None and not isinstance(layer, FunctionType):
            layer = getattr(layer, "app", None)
        if layer is None or id(layer) in seen:
            continue
        seen.add(id(layer))
        for cell in layer.__closure__ or ():
            try:
                waiting.append(cell.cell_contents)
            except ValueError:  # it is empty
                continue
            yield cell


def _is_function(endpoint: Any) -> bool:
    while isinstance(endpoint, functools.partial):
        endpoint = endpoint.func
    return inspect.isfunction(endpoint) or inspect.ismethod(endpoint)


def _wrap_class(route: Route) -> bool:
    """Starlette creates an HTTPEndpoint for each request, so its methods are wrapped in the class itself."""
    kind: Any = route.app
    while kind is not None and not isinstance(kind, type):
        kind = getattr(kind, "app", None)
    if kind is None or not issubclass(kind, HTTPEndpoint) or kind.dispatch is not HTTPEndpoint.dispatch:
        return False  # with its own ``dispatch`` the class may not call its methods
    for name in _METHODS:
        method = getattr(kind, name, None)
        if method is not None and not hasattr(method, MARK):
            setattr(kind, name, _method_of_class(name, method))
    return True


def _method_of_class(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` with reports if it is the endpoint of its class. A call from a subclass by super() does not report."""
    reports = wrapped(method, _status_of_response, _status_of_error)

    def chosen(self: HTTPEndpoint) -> Callable[..., Any]:
        return reports if getattr(type(self), name) is endpoint else method

    async def awaited(self: HTTPEndpoint, *args: Any, **kwargs: Any) -> Any:
        return await chosen(self)(self, *args, **kwargs)

    def plain(self: HTTPEndpoint, *args: Any, **kwargs: Any) -> Any:
        return chosen(self)(self, *args, **kwargs)

    kind: Callable[..., Any] = awaited if inspect.iscoroutinefunction(method) else plain
    endpoint = functools.update_wrapper(kind, method, updated=())
    setattr(endpoint, MARK, True)
    return endpoint
