"""Wraps endpoints: each reports to its operation that it was entered, what it returned and what it raised.

One mechanism for every framework. A framework's module finds its endpoints and knows what status they return; the
wrapper here only reports (``core/evidence.py``). The endpoint itself behaves as before. Outside of a protected request
the wrapper only reads a context variable.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol

from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.web.asgi_scope import SCOPE_KEY, App, Receive, Scope, Send
from oncekey.web.declared import Handler, Only
from oncekey.web.wsgi_environ import Environ

MARK = "__oncekey_wrapped__"

ReturnedStatus = Callable[[Any, dict[str, Any]], int]
"""Takes the endpoint's return value and its keyword arguments, and returns the status of the response."""
RaisedStatus = Callable[[BaseException], int | None]
"""Returns the status of an exception if it is the framework's HTTPException, otherwise None."""


class Endpoints(Protocol):
    """The endpoints behind the middleware, as a framework's module finds and wraps them."""

    def cover(self) -> bool:
        """Wrap new endpoints. True: all endpoints are wrapped, so a request without a report entered none."""

    def knows_route(self, scope: Scope) -> bool:
        """Whether the route that matched this request was wrapped."""

    def handler(self, scope: Scope) -> Handler | None:
        """The handler that the app's router will find for this request."""

    def check(self, scope: Scope, once: OnceKey, only: Only | None) -> None:
        """Check what the handlers declare (``check_declarations``)."""

    async def answer_to_error(self, scope: Scope, error: Exception) -> tuple[int, App] | None:
        """The response of the app's handler for every exception: its status, and an app that sends it. None: the app
        has no such handler."""


class WsgiEndpoints(Protocol):
    """The same for the WSGI middleware, which has no start and whose router needs only the environ."""

    def cover(self) -> bool:
        """Wrap new endpoints. True: all endpoints are wrapped, so a request without a report entered none."""

    def handler(self, environ: Environ) -> Handler | None:
        """The handler that the app's router will find for this request."""


def wrapped(
    call: Callable[..., Any], returned: ReturnedStatus, raised: RaisedStatus, *, awaited: bool | None = None
) -> Callable[..., Any]:
    """``call`` with reports. The result is of the same kind: a coroutine function, a plain or a generator function.

    ``awaited``: whether the framework awaits the result of the call; None: only if ``call`` is a coroutine function.
    """
    if hasattr(call, MARK):
        return call
    if awaited is None:
        awaited = is_coroutine_function(call)
    wrap = _wrapped_coroutine if awaited else _wrapped_function
    endpoint = functools.update_wrapper(wrap(call, returned, raised), call, updated=())
    setattr(endpoint, MARK, True)
    return endpoint


def _wrapped_coroutine(call: Callable[..., Any], returned: ReturnedStatus, raised: RaisedStatus) -> Callable[..., Any]:
    async def endpoint(*args: Any, **kwargs: Any) -> Any:
        operation = _current.get()
        if operation is None:
            return await call(*args, **kwargs)
        evidence = operation.evidence
        evidence.entered()
        try:
            result = await call(*args, **kwargs)
            status = returned(result, kwargs)
        except BaseException as error:
            evidence.raised_with(error, raised(error))
            raise
        evidence.returned_with(status)
        return result

    return endpoint


def _wrapped_function(call: Callable[..., Any], returned: ReturnedStatus, raised: RaisedStatus) -> Callable[..., Any]:
    """For a generator function only the call is reported: its body runs while the response is sent."""

    def endpoint(*args: Any, **kwargs: Any) -> Any:
        operation = _current.get()
        if operation is None:
            return call(*args, **kwargs)
        evidence = operation.evidence
        evidence.entered()
        try:
            result = call(*args, **kwargs)
            status = returned(result, kwargs)
        except BaseException as error:
            evidence.raised_with(error, raised(error))
            raise
        evidence.returned_with(status)
        return result

    return endpoint


def is_coroutine_function(call: Any) -> bool:
    while isinstance(call, functools.partial):
        call = call.func
    inner = inspect.unwrap(call)
    return any(
        inspect.iscoroutinefunction(each) or inspect.iscoroutinefunction(getattr(each, "__call__", None))  # noqa: B004
        for each in (call, inner)
    )


class ForeignApp:
    """An ASGI app whose endpoints are not wrapped. A request that reaches it may have entered one of them."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation: Operation | None = scope.get(SCOPE_KEY) or _current.get()
        if operation is not None:
            operation.evidence.covered = False
        await self.app(scope, receive, send)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)


def starlette_endpoints(middleware: Any, scope: Scope) -> Any:
    """The endpoints of the Starlette app that was passed to this middleware, or that contains it; None: no such app."""
    applications = sys.modules.get("starlette.applications")
    if applications is None:
        return None
    app = middleware.app
    if not isinstance(app, applications.Starlette):
        app = scope.get("app")
        layer = getattr(app, "middleware_stack", None)
        while layer is not None and layer is not middleware:
            layer = getattr(layer, "app", None)
        if layer is None or not isinstance(app, applications.Starlette):
            return None
    from oncekey.web.starlette import Endpoints  # only where Starlette is installed

    return Endpoints(app)
