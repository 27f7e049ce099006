"""Wraps the exception handlers of a Starlette app: they report that validation refused a request, so that its key stays
unused."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection

from oncekey.engine.operation import Operation
from oncekey.web.asgi_scope import SCOPE_KEY
from oncekey.web.endpoints import MARK


def wrap_handlers(app: Starlette) -> None:
    """Let the app's exception handlers report a refused validation. (If the app has already built its stack, Starlette
    has copied them: then a crash in a handler counts as a crash.)"""
    for kind, handler in list(app.exception_handlers.items()):
        if kind not in (500, Exception) and not hasattr(handler, MARK):
            app.exception_handlers[kind] = _reporting(handler)


def is_async(handler: Any) -> bool:
    function = handler.func if isinstance(handler, functools.partial) else handler
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _reporting(handler: Callable[..., Any]) -> Callable[..., Any]:
    call = handler if is_async(handler) else functools.partial(run_in_threadpool, handler)

    async def reporting(connection: HTTPConnection, error: Exception) -> Any:
        operation: Operation | None = connection.scope.get(SCOPE_KEY)
        if operation is not None and _is_refusal(error):
            operation.evidence.refused_by_validation()
        return await call(connection, error)

    setattr(reporting, MARK, True)
    return reporting


def _is_refusal(error: Exception) -> bool:
    """Only FastAPI's validation error. A handler of HTTPException 404 may forward the request, and then fail."""
    fastapi_errors = sys.modules.get("fastapi.exceptions")
    return fastapi_errors is not None and isinstance(error, fastapi_errors.RequestValidationError)
