"""Who speaks: the handler itself, or somebody in its place.

A handler that *returned* an error says what became of its work. An error that a framework makes of an exception, or
that middleware sends when its patience is over, says nothing: the work may have been done, or be under way. Inside an
app both are messages. This owns what we know of the frameworks' ways, to tell them apart; who cannot be known has not
been the handler. What stands between a framework and a handler (a decorator, a route class of the app's own) is the
handler: it speaks for itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Iterator
from itertools import chain
from types import FrameType
from typing import Any

from oncekey.engine.operation import Operation, _current
from oncekey.web.scopes import SCOPE_KEY, Message, Receive, Scope, Send

_STARLETTE_HANDLERS = "starlette.exception_handlers"


class InnerScope(dict[str, Any]):
    """A scope that notices when Starlette's ExceptionMiddleware is reached, to hear what is said inside of it.

    There a handler's own response can be told from what is made of an exception, and from what middleware further out
    says in its place.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name == _STARLETTE_HANDLERS:
            if id(value[0]) not in _known:
                _listen_inside(sys._getframe(1).f_locals.get("self"))
            value = tuple([_watched(handlers) for handlers in value])
        _set_item(self, name, value)


_set_item = dict.__setitem__


class _Watched(dict[Any, Any]):
    """Starlette's handlers by exception or status; looking for one means that something was raised, whoever answers."""

    original: Any

    def __contains__(self, kind: object) -> bool:
        if (operation := _current.get()) is not None:
            operation.raised = True
        return super().__contains__(kind)

    def get(self, kind: Any, default: Any = None) -> Any:
        return self[kind] if kind in self else default  # noqa: SIM401 - dict.get would not pass by __contains__


_known: dict[int, _Watched] = {}


def _watched(handlers: Any) -> _Watched:
    """One app has one set of handlers: watched once, not once per request."""
    known = _known.get(id(handlers))
    if known is None or known.original is not handlers or len(known) != len(handlers):
        if len(_known) > 100:  # apps that make their handlers anew each time
            _known.clear()
        known = _known[id(handlers)] = _Watched(handlers)
        known.original = handlers  # keeps it alive, and so its id its own
    return known


class _Listening:
    """In place of the app that an ExceptionMiddleware calls: the router, or what stands before it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation: Operation | None = scope.get(SCOPE_KEY)
        if operation is None:
            await self.app(scope, receive, send)
            return
        if not operation.running:
            operation.passes += 1
            if operation.refused:  # an earlier one, and what was raised for it
                operation.refused, operation.refused_as, operation.raised = False, None, False
        operation.said = None  # by an earlier call: there is middleware that tries again
        operation.running += 1
        task = asyncio.current_task()

        def listen(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and (status := message["status"]) >= 300:
                speaker = speaker_of(status, task)
                if speaker in _ROUTERS:
                    operation.refused, operation.refused_as = True, (status,)  # no endpoint has seen the request
                elif speaker is not None:
                    operation.said = status
            return send(message)

        try:
            await self.app(scope, receive, listen)
        finally:
            operation.running -= 1


def _listen_inside(middleware: Any) -> None:
    known = sys.modules.get("starlette.middleware.exceptions")
    if known is None or not isinstance(middleware, known.ExceptionMiddleware):
        return
    if not isinstance(middleware.app, _Listening):
        middleware.app = _Listening(middleware.app)


_ROUTERS = {("starlette.routing", "Router.app"), ("fastapi.routing", "APIRouter.app")}
_SPEAKERS = {
    *_ROUTERS,
    ("starlette.routing", "request_response.<locals>.app.<locals>.app"),
    ("starlette.endpoints", "HTTPEndpoint.dispatch"),
    ("fastapi.routing", "request_response.<locals>.app.<locals>.app"),
    ("litestar.routes.http", "HTTPRoute.handle"),
}
"""Where frameworks call a handler and then send its response, which all of them call ``response``."""


def speaker_of(status: int, task: asyncio.Task[Any] | None = None) -> tuple[str, str] | None:
    """Who is sending a response with this status just now; None where it is nobody of whom we know.

    By the stack: only somebody who awaits the sending of *this* response stands in it, and middleware that answers for
    a handler does so after the handler's call, or beside it. Streams are sent by a task of their own: then it is the
    stack of ``task``, which called the handler and waits for them.
    """
    for frame in chain(_stack(), _stack_of(task)):
        speaker = (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname)
        if speaker in _SPEAKERS and getattr(frame.f_locals.get("response"), "status_code", None) == status:
            return speaker
    return None


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stack_of(task: asyncio.Task[Any] | None) -> Iterator[FrameType]:
    coroutine: Any = None if task is None or task is asyncio.current_task() else task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame
        coroutine = coroutine.cr_await


def never_routed(scope: Scope) -> bool:
    """Starlette's router looked at this very scope, and no endpoint took the request."""
    router = scope.get("router")
    if router is None or getattr(router, "default", None) != getattr(router, "not_found", None):
        return False  # another framework, a copied scope, or a fallback app: we cannot tell
    if "endpoint" not in scope:
        return True
    methods = getattr(scope.get("route"), "methods", None) or (scope["method"],)
    return scope["method"] not in methods
