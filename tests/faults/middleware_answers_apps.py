"""Apps of every framework whose middleware answers in the handler's place: see ``middleware_answers_handlers.py``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from fastapi import FastAPI
from flask import Flask
from litestar import Litestar, Router, post
from litestar.response import Response as LitestarResponse
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import OnceKey, current
from oncekey.web import fastapi, flask, starlette, wsgi
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.litestar import OnceKeyPlugin
from tests.faults.middleware_answers_handlers import PATIENCE, Framework, Layer, Stage

# -- ASGI --------------------------------------------------------------------------------------------------------------


class AnsweringMiddleware:
    """The middleware of the case, as ASGI has it."""

    def __init__(self, app: Any, stage: Stage, layer: Layer) -> None:
        self.app, self.stage, self.layer = app, stage, layer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.layer == "copied scope":  # of what ASGI itself knows
            scope = {name: value for name, value in scope.items() if "oncekey" not in name}
        case = self.stage.case
        body = await receive()
        call = partial(self._call, scope, body)
        if case.shape == "replaced":
            await call(partial(_send_status, send, case.status) if self.stage.calls == 0 else send)
        elif case.shape == "retry once":
            try:
                await call(send)
            except RuntimeError:
                await self._or_answer(call(send), send)
        elif case.shape == "catch-all":
            await self._or_answer(call(send), send)
        else:
            await self._with_patience(call(send), send)

    async def _call(self, scope: Any, body: Any, send: Any) -> None:
        async def receive() -> Any:
            return body

        await self.app(dict(scope) if self.layer == "copied scope" else scope, receive, send)

    async def _or_answer(self, call: Awaitable[None], send: Any) -> None:
        try:
            await call
        except Exception:
            await _answer(send, self.stage.case.status)

    async def _with_patience(self, call: Any, send: Any) -> None:
        if await over(asyncio.ensure_future(call), self.stage):
            await _answer(send, self.stage.case.status)


async def over(running: asyncio.Future[Any], stage: Stage) -> bool:
    """Wait for the app, or until the patience is over; then it is cancelled, or left running."""
    patience = asyncio.ensure_future(stage.stands.wait())
    await asyncio.wait({running, patience}, return_when=asyncio.FIRST_COMPLETED)
    patience.cancel()
    if running.done():
        return False
    if stage.case.shape == "timeout, cancelled":
        running.cancel()
        await asyncio.wait({running})
    return True


async def _answer(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"in its place"})


async def _send_status(send: Any, status: int, message: MutableMapping[str, Any]) -> None:
    await send({**message, "status": status} if "status" in message else message)


class _AnsweringResponse(Response):
    """Sent, it lets the handler go on: Starlette waits for that before the request is over."""

    def __init__(self, stage: Stage) -> None:
        super().__init__("in its place", stage.case.status)
        self._stage = stage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        self._stage.goes_on.set()


class AnsweringHttpMiddleware(BaseHTTPMiddleware):
    """The same on Starlette's own base class."""

    def __init__(self, app: Any, stage: Stage) -> None:
        super().__init__(app)
        self.stage = stage

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        case = self.stage.case
        instead = _AnsweringResponse(self.stage)
        if case.shape == "replaced":
            first = self.stage.calls == 0
            answer: Response = await call_next(request)
            return instead if first else answer
        if case.shape.startswith("timeout"):
            running = asyncio.ensure_future(call_next(request))
            if await over(running, self.stage):
                return instead
            return await running
        for _ in range(2 if case.shape == "retry once" else 1):
            with suppress(RuntimeError):
                return await call_next(request)
        return instead


async def _raw(stage: Stage, scope: Any, receive: Any, send: Any) -> None:
    await receive()
    status = await stage.handle()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": current().owner.encode()})


def _fastapi(stage: Stage, once: OnceKey, layer: Layer, paths: list[str]) -> Any:
    app = FastAPI()

    async def pay() -> Any:
        return JSONResponse({"run": current().owner}, await stage.handle())

    for path in paths:
        app.post(path)(pay)
    _add(app, stage, layer)
    fastapi.protect(app, once)
    return app


def _starlette(stage: Stage, once: OnceKey, layer: Layer, paths: list[str]) -> Any:
    async def pay(request: Request) -> Response:
        return JSONResponse({"run": current().owner}, await stage.handle())

    app = Starlette(routes=[Route(path, pay, methods=["POST"]) for path in paths])
    _add(app, stage, layer)
    starlette.protect(app, once)
    return app


def _add(app: Starlette, stage: Stage, layer: Layer) -> None:
    if layer == "BaseHTTPMiddleware":
        app.add_middleware(AnsweringHttpMiddleware, stage=stage)
    else:
        app.add_middleware(AnsweringMiddleware, stage=stage, layer=layer)


def _litestar(stage: Stage, once: OnceKey, layer: Layer, paths: list[str]) -> Any:
    @post(paths)
    async def pay() -> LitestarResponse[dict[str, str]]:
        return LitestarResponse({"run": current().owner}, status_code=await stage.handle())

    def middleware_answers(app: Any) -> Any:
        return AnsweringMiddleware(app, stage, layer)

    router = Router("/", route_handlers=[pay], middleware=[middleware_answers])
    return Litestar([router], plugins=[OnceKeyPlugin(once)], logging_config=None, openapi_config=None)


def _asgi(stage: Stage, once: OnceKey, layer: Layer, paths: list[str]) -> Any:
    return IdempotencyMiddleware(AnsweringMiddleware(partial(_raw, stage), stage, layer), once=once)


# -- WSGI --------------------------------------------------------------------------------------------------------------


class AnsweringWsgiMiddleware:
    """The middleware of the case, as WSGI has it. A thread cannot be cancelled, so its timeout leaves it running."""

    def __init__(self, app: Any, stage: Stage, layer: Layer) -> None:
        self.app, self.stage, self.layer = app, stage, layer

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if self.layer == "copied scope":
            environ = {name: value for name, value in environ.items() if "oncekey" not in name}
        case = self.stage.case
        first = self.stage.calls == 0
        answer: Any = None
        if case.shape.startswith("timeout"):
            answer = self._with_patience(environ)
        else:
            for _ in range(2 if case.shape == "retry once" else 1):
                with suppress(RuntimeError):
                    answer = self._whole(environ)
                    break
        if answer is None or (case.shape == "replaced" and first):
            start_response(f"{case.status} In Its Place", [("content-type", "text/plain")])
            return [b"in its place"]
        status, headers, body = answer
        start_response(status, headers)
        return [body]

    def _with_patience(self, environ: dict[str, Any]) -> Any:
        answers: list[Any] = []

        def work() -> None:
            try:
                answers.append(self._whole(environ))
            finally:
                self.stage.stands.set()

        threading.Thread(target=copy_context().run, args=(work,), daemon=True).start()
        assert self.stage.stands.wait(PATIENCE)
        return answers[0] if answers else None

    def _whole(self, environ: dict[str, Any]) -> tuple[str, Any, bytes]:
        started: list[Any] = []

        def start(status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], None]:
            started[:] = [status, headers]
            return lambda _: None

        body = self.app(environ, start)
        try:
            whole = b"".join(body)
        finally:
            if hasattr(body, "close"):
                body.close()
        return started[0], started[1], whole


def _raw_blocking(stage: Stage, environ: Any, start_response: Any) -> Any:
    status = stage.handle_blocking()
    start_response(f"{status} Created", [("content-type", "text/plain")])
    return [current().owner.encode()]


def _flask(stage: Stage, once: OnceKey, layer: Layer, paths: list[str]) -> Any:
    app = Flask("middleware_answers")
    app.config["PROPAGATE_EXCEPTIONS"] = True  # so that there is something to catch

    def pay() -> Any:
        status = stage.handle_blocking()
        return {"run": current().owner}, status

    for path in paths:
        app.add_url_rule(path, path[1:], pay, methods=["POST"])
    app.wsgi_app = AnsweringWsgiMiddleware(app.wsgi_app, stage, layer)  # type: ignore[method-assign]
    return flask.protect(app, once)


def _wsgi(stage: Stage, once: OnceKey, layer: Layer, paths: list[str]) -> Any:
    return wsgi.IdempotencyMiddleware(AnsweringWsgiMiddleware(partial(_raw_blocking, stage), stage, layer), once)


MAKERS: dict[Framework, Callable[[Stage, OnceKey, Layer, list[str]], Any]] = {
    "fastapi": _fastapi,
    "starlette": _starlette,
    "litestar": _litestar,
    "asgi": _asgi,
    "flask": _flask,
    "wsgi": _wsgi,
}
