"""Shows over HTTP what became of a key: a small app to mount beside the protected one.

::

    app.mount("/idempotency", status_app(once))                    # ASGI: Starlette, FastAPI
    DispatcherMiddleware(app.wsgi_app, {"/idempotency": status_wsgi(once)})     # WSGI: Flask and others

In Django it is a view (``oncekey.web.django.status``).

``GET /idempotency/{key}`` answers for the caller's own keys. The key is percent-encoded, without the quotes of the
header. A client that must keep the key out of access logs sends it as the ``Idempotency-Key`` header of
``GET /idempotency/`` instead.

The answer is what a retry of the same request would get, without a retry; a question changes nothing:

* 202 + Retry-After while a handler works on it, or a job of the outbox will settle it;
* the stored response when it is done, marked as a replay;
* 409 if its outcome is unknown, and another 409 if it ended without a result: nothing will happen until the client
  sends the request again;
* 410 if the result is no longer kept and the row still exists; 404 for a key that was never seen, is forgotten, or
  belongs to another tenant. These last three are the same look-up, so neither text nor time distinguishes them (I6).
  A key that is bound to another caller of the tenant (``Policy(bind=…)``) is a 404 too. With ``bind`` or ``authorize``,
  every 404 takes a multiple of 20 ms (``pace.py``).

``OnceKey(authorize=…)`` is asked twice. Before the look-up it gets the operation in the question, or otherwise the
name of this endpoint (``GET /idempotency``); a refusal is a 403. After the look-up it gets the operation of the key; a
refusal is a 404, as for a key that was never seen.

For a route with ``key_per="endpoint"``, the question names the operation: ``?operation=POST%20/payments``, or
``status_app(once, operation="POST /payments")``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, quote

from oncekey.core.problems import Answer, Situation
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.engine.request import Request, allowed, not_async
from oncekey.errors import ConfigurationError, NotAuthenticated, NotAuthorized, OperatorError
from oncekey.web import pace, wsgi_environ
from oncekey.web.asgi_scope import Receive, Scope, Send, route_path
from oncekey.web.responses import (
    Headers,
    refusal,
    refused_caller,
    status_location,
)
from oncekey.web.status_question import Question
from oncekey.web.wsgi_shell import StartResponse

__all__ = ["StatusApp", "StatusWsgi", "status_app", "status_path", "status_wsgi"]

_NOT_ALLOWED = Answer(405, ((b"allow", b"GET, HEAD"), (b"cache-control", b"no-store"), (b"content-length", b"0")), b"")


def status_app(once: OnceKey, *, operation: str | None = None) -> StatusApp:
    """An ASGI app to mount under a prefix. ``operation``: the route of the keys, if it has ``key_per="endpoint"``."""
    return StatusApp(once, operation)


def status_wsgi(once: OnceKey, *, operation: str | None = None) -> StatusWsgi:
    """The WSGI app, like :func:`status_app`."""
    return StatusWsgi(once, operation)


def status_path(prefix: str, operation: Operation) -> str:
    """The path of this request's status, for the ``Location`` of a 202. ``prefix``: where the status app is mounted."""
    return status_location(prefix, operation.key, operation.name if operation.policy.key_per == "endpoint" else None)


class StatusApp:
    """The ASGI app."""

    def __init__(self, once: OnceKey, operation: str | None = None) -> None:
        self.once = once
        self.operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive  # a question has no body
        if scope["type"] != "http":
            raise ConfigurationError("the status app answers HTTP requests only")
        query: bytes = scope.get("query_string", b"")
        raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode("ascii")
        here = raw_path.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        operation = self.operation or _operation(query)
        request = Request(scope["method"], scope["path"], scope, scope["headers"])
        asked = Question(self.once, request, here, scope.get("root_path", ""), operation)
        status, headers, body = asked.wire(await self._answer(asked, scope))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _answer(self, asked: Question, scope: Scope) -> Answer:
        if asked.method not in ("GET", "HEAD"):
            return _NOT_ALLOWED
        once = self.once
        try:
            tenant = once.single_tenant or once.scope(asked.request)  # type: ignore[operator]
            if inspect.isawaitable(tenant):
                tenant = await tenant
            await self._authorize(asked, asked.authorized)
        except (NotAuthenticated, NotAuthorized) as error:
            return refused_caller(once, asked.authorized, error)
        if (refused := asked.read_key(route_path(scope))) is not None:
            return refused
        with asked.in_flight(tenant):
            answer = await self._looked_up(asked, tenant)
        if asked.missed(answer) and pace.applies(once):
            await pace.pause(asked.begun)
        return answer

    async def _looked_up(self, asked: Question, tenant: str) -> Answer:
        engine, seconds = self.once.engine, self.once.default_policy.begin_seconds
        try:
            record = await engine.run(asked.look(tenant), seconds)
        except OperatorError:
            return refusal(self.once, Situation.STORE_UNAVAILABLE)
        try:
            if record is not None and record.operation != asked.authorized:
                await self._authorize(asked, record.operation)
            if record is not None and (bind := asked.binds(record)) is not None:
                bound_to = bind(asked.request)
                record = asked.bound(record, await bound_to if inspect.isawaitable(bound_to) else bound_to)
        except (NotAuthenticated, NotAuthorized):
            record = None
        answer = asked.answer(record)
        await engine.run(asked.miss(answer, tenant), seconds)
        return answer

    async def _authorize(self, asked: Question, operation: str) -> None:
        if self.once.authorize is not None:
            answer = self.once.authorize(asked.request, operation)
            allowed(await answer if inspect.isawaitable(answer) else answer)


class StatusWsgi:
    """The WSGI app."""

    def __init__(self, once: OnceKey, operation: str | None = None) -> None:
        self.once = once
        self.operation = operation

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        query: str = environ.get("QUERY_STRING", "")
        path: str = environ.get("PATH_INFO", "")  # the server percent-decodes it; UTF-8 is decoded as latin-1
        here = quote((environ.get("SCRIPT_NAME", "") + path).encode("latin-1")) + (f"?{query}" if query else "")
        root: str = environ.get("SCRIPT_NAME", "")
        request = Request(environ["REQUEST_METHOD"], root + path, environ, wsgi_environ.all_headers(environ))
        status, headers, body = self.ask(request, path, here, root, query.encode("latin-1"))
        decoded = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in headers]
        start_response(wsgi_environ.status_line(status), decoded)
        return [body]

    def ask(self, request: Any, path: str, here: str, root: str, query: bytes) -> tuple[int, Headers, bytes]:
        """Status, headers and body of the answer. The app's functions get ``request``."""
        asked = Question(self.once, request, here, root, self.operation or _operation(query))
        return asked.wire(self._answer(asked, path))

    def _answer(self, asked: Question, path: str) -> Answer:
        if asked.method not in ("GET", "HEAD"):
            return _NOT_ALLOWED
        once = self.once
        try:
            tenant = once.single_tenant or self._said(asked, once.scope(asked.request), "scope")  # type: ignore[operator]
            self._authorize(asked, asked.authorized)
        except (NotAuthenticated, NotAuthorized) as error:
            return refused_caller(once, asked.authorized, error)
        if (refused := asked.read_key(path)) is not None:
            return refused
        with asked.in_flight(tenant):
            answer = self._looked_up(asked, tenant)
        if asked.missed(answer) and pace.applies(once):
            pace.pause_blocking(asked.begun)
        return answer

    def _looked_up(self, asked: Question, tenant: str) -> Answer:
        engine, seconds = self.once.engine, self.once.default_policy.begin_seconds
        try:
            record = engine.run_blocking(asked.look(tenant), seconds)
        except OperatorError:
            return refusal(self.once, Situation.STORE_UNAVAILABLE)
        try:
            if record is not None and record.operation != asked.authorized:
                self._authorize(asked, record.operation)
            if record is not None and (bind := asked.binds(record)) is not None:
                record = asked.bound(record, self._said(asked, bind(asked.request), "bind"))
        except (NotAuthenticated, NotAuthorized):
            record = None
        answer = asked.answer(record)
        engine.run_blocking(asked.miss(answer, tenant), seconds)
        return answer

    def _authorize(self, asked: Question, operation: str) -> None:
        if self.once.authorize is not None:
            allowed(self._said(asked, self.once.authorize(asked.request, operation), "authorize"))

    def _said(self, _asked: Question, answer: Any, which: str) -> Any:
        """The answer of the app's function."""
        return not_async(answer, which)


def _operation(query: bytes) -> str | None:
    asked = parse_qs(query.decode("latin-1"), errors="replace").get("operation")
    return asked[0] if asked else None
