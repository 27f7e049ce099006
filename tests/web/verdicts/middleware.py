"""Middleware that stands inside of ours and answers in the endpoint's place, or changes what it answered.

``Case.around`` names one: ``answer 403``, ``turn into 500``, ``catch 400``, ``timeout 504``, ``timeout 504, copied
scope``, ``abandon 504``, ``retry once``, ``fresh context``. Nothing here asserts.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.web.verdicts.case_runner import SECONDS, CaseRunner


def named(around: str) -> tuple[str, int, bool]:
    """``timeout 504, copied scope`` as (timeout, 504, True); nothing as ("", 0, False)."""
    words, _, copied = around.partition(", ")
    verb, _, status = words.rpartition(" ")
    return (verb, int(status), bool(copied)) if status.isdecimal() else (words, 0, bool(copied))


class Asgi:
    """Plain ASGI middleware."""

    def __init__(self, app: Any, runner: CaseRunner) -> None:
        self.app = app
        self.runner = runner
        self.verb, self.status, self.copied = named(runner.case.around)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        inner = dict(scope) if self.copied else scope
        own = JSONResponse({"by": "middleware"}, self.status or 200)
        if self.verb == "turn into":
            await self.app(inner, receive, _discard)
        elif self.verb == "catch":
            try:
                await self.app(inner, receive, send)
            except Exception:
                await own(scope, receive, send)
            return
        elif self.verb == "timeout":
            await self._until_entered(inner, receive, send, cancel=True)
        elif self.verb == "abandon":
            running = await self._until_entered(inner, receive, send, cancel=False)
            self.runner.go.set()
            await own(scope, receive, send)
            await asyncio.wait([running], timeout=SECONDS)
            return
        elif self.verb == "retry once":
            await self._retry(inner, receive, send)
            return
        elif self.verb == "fresh context":
            calling = self.app(inner, receive, send)
            await asyncio.get_running_loop().create_task(calling, context=contextvars.Context())
            return
        await own(scope, receive, send)

    async def _until_entered(self, scope: Any, receive: Any, send: Any, *, cancel: bool) -> asyncio.Task[None]:
        """As ``asyncio.wait_for`` does when the time is over; here that is when the endpoint was entered."""
        self.runner.entered.clear()
        self.runner.go.clear()
        running = asyncio.ensure_future(self.app(scope, receive, send))
        await asyncio.wait_for(self.runner.entered.wait(), SECONDS)
        if cancel:
            running.cancel()
            await asyncio.wait([running], timeout=SECONDS)
        return running

    async def _retry(self, scope: Any, receive: Any, send: Any) -> None:
        request = await receive()

        def from_the_start() -> Any:
            left = [request]

            async def again() -> Any:
                return left.pop() if left else await receive()

            return again

        try:
            await self.app(dict(scope), from_the_start(), send)
        except RuntimeError:
            await self.app(dict(scope), from_the_start(), send)


async def _discard(message: Any) -> None:
    del message


class Base(BaseHTTPMiddleware):
    """The same by Starlette's own base class, for what can be said with it."""

    VERBS = ("answer", "turn into", "catch", "timeout")

    def __init__(self, app: Any, runner: CaseRunner) -> None:
        super().__init__(app)
        self.runner = runner
        self.verb, self.status, _ = named(runner.case.around)

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        own = JSONResponse({"by": "middleware"}, self.status)
        if self.verb == "turn into":
            await call_next(request)
        elif self.verb == "catch":
            try:
                passed: Response = await call_next(request)
            except Exception:
                return own
            return passed
        elif self.verb == "timeout":
            self.runner.entered.clear()
            self.runner.go.clear()
            calling = asyncio.ensure_future(call_next(request))
            await asyncio.wait_for(self.runner.entered.wait(), SECONDS)
            calling.cancel()
            await asyncio.wait([calling], timeout=SECONDS)
            self.runner.go.set()  # cancelling call_next does not cancel the app: the endpoint goes on, and returns late
        return own


class Wsgi:
    """WSGI middleware."""

    def __init__(self, app: Any, runner: CaseRunner) -> None:
        self.app = app
        self.runner = runner
        self.verb, self.status, _ = named(runner.case.around)

    def __call__(self, environ: Any, start_response: Any) -> Any:
        if self.verb == "turn into":
            iterable = self.app(environ, lambda *started: lambda piece: None)
            for _ in iterable:
                pass
            if hasattr(iterable, "close"):
                iterable.close()
        elif self.verb == "catch":
            try:
                return self.app(environ, start_response)
            except Exception:
                pass
        elif self.verb == "retry once":
            try:
                return self.app(environ, start_response)
            except RuntimeError:
                return self.app(environ, start_response)
        start_response(f"{self.status} By middleware", [("Content-Type", "application/json")])
        return [b'{"by":"middleware"}']
