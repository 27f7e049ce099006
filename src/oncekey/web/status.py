"""Shows over HTTP what became of a key: a small app to mount beside the protected one.

::

    app.mount("/idempotency", status_app(once))                    # ASGI: Starlette, FastAPI
    DispatcherMiddleware(app.wsgi_app, {"/idempotency": status_wsgi(once)})     # WSGI: Flask and others

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
  A key that is bound to another caller of the tenant (``Policy(bind=…)``) is a 404 too.

``OnceKey(authorize=…)`` is asked twice. Before the look-up it gets the operation in the question, or otherwise the
name of this endpoint (``GET /idempotency``); a refusal is a 403. After the look-up it gets the operation of the key; a
refusal is a 404, as for a key that was never seen.

For a route with ``key_per="endpoint"``, the question names the operation: ``?operation=POST%20/payments``, or
``status_app(once, operation="POST /payments")``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qs, quote

from oncekey.core import binding
from oncekey.core.decision import Claim, Replay, Unknown, decide
from oncekey.core.guards import Bind
from oncekey.core.header import BadKey, parse_key
from oncekey.core.problems import WHICH_KEY, Answer, Situation
from oncekey.core.record import Record, Reservation
from oncekey.core.states import FINAL, Event, State
from oncekey.engine.flows import Call, Flow
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.engine.request import Request, allowed, not_async
from oncekey.errors import ConfigurationError, NotAuthenticated, NotAuthorized, OperatorError
from oncekey.limits import RatesDown
from oncekey.web import wsgi_environ
from oncekey.web.asgi_scope import Receive, Scope, Send, route_path
from oncekey.web.responses import answer_headers, busy_seconds, refusal, replay, status_location, unknown

__all__ = ["StatusApp", "StatusWsgi", "status_app", "status_path", "status_wsgi"]

MAX_KEY_LENGTH = 255
MAX_OPERATION_LENGTH = 400
_NOT_ALLOWED = Answer(405, ((b"allow", b"GET, HEAD"), (b"cache-control", b"no-store"), (b"content-length", b"0")), b"")
TOO_MANY_MISSES = "This caller has asked for more keys that do not exist than this API allows in this time."
_CACHING = frozenset({b"cache-control", b"expires", b"etag", b"last-modified"})

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


def status_app(once: OnceKey, *, operation: str | None = None) -> StatusApp:
    """An ASGI app to mount under a prefix. ``operation``: the route of the keys, if it has ``key_per="endpoint"``."""
    return StatusApp(once, operation)


def status_wsgi(once: OnceKey, *, operation: str | None = None) -> StatusWsgi:
    """The WSGI app, like :func:`status_app`."""
    return StatusWsgi(once, operation)


def status_path(prefix: str, operation: Operation) -> str:
    """The path of this request's status, for the ``Location`` of a 202. ``prefix``: where the status app is mounted."""
    return status_location(prefix, operation.key, operation.name if operation.policy.key_per == "endpoint" else None)


class _Asked:
    """One question. ``StatusApp`` and ``StatusWsgi`` read and send; this class answers."""

    def __init__(self, once: OnceKey, request: Request, here: str, root: str, operation: str | None) -> None:
        self.once = once
        self.request = request
        self.method = request.method
        self.here = here
        self.operation = operation
        self.authorized = operation or f"GET {root or '/'}"
        """The operation that ``authorize`` gets before the look-up."""
        self.key: str | None = None
        self.record: Record | None = None
        self.refused: Answer | None = None
        """Why the row was not looked up."""

    def read_key(self, path: str) -> Answer | None:
        """Find the key in the path, or otherwise in the header. Returns an Answer if there is none."""
        raw = self.request.headers.get("idempotency-key")
        self.key = path.removeprefix("/")
        if not self.key:
            try:
                self.key = parse_key([] if raw is None else [raw.encode("latin-1")])
            except BadKey as error:
                if error.rule == "missing":
                    return refusal(self.once, Situation.KEY_MISSING, detail=WHICH_KEY)
                return refusal(self.once, Situation.KEY_MALFORMED, detail=str(error))
        named = self.operation or ""
        known = self.key.isascii() and self.key.isprintable() and len(self.key) <= MAX_KEY_LENGTH
        if not known or not (named.isprintable() and len(named) <= MAX_OPERATION_LENGTH):
            self.key = None  # no request can have such a key, so do not look for it
            return refusal(self.once, Situation.STATUS_NOT_FOUND)
        return None

    def look(self, tenant: str) -> Flow[Record | None]:
        """Read the row, unless this caller has asked for too many keys that do not exist."""
        limiter = self.once.limiter
        if limiter.lookups is not None:
            try:
                wait: float | None = yield Call(partial(limiter.lookup, tenant, missed=False))
            except RatesDown:
                self.refused = refusal(self.once, Situation.STORE_UNAVAILABLE)
                return None
            if wait is not None:
                self.refused = refusal(self.once, Situation.LIMITED, detail=TOO_MANY_MISSES, retry_after=wait)
                return None
        record: Record | None = yield (self.once.key_scope(tenant, self.operation), self.key or "")
        return record

    def counts_miss(self, answer: Answer) -> bool:
        """Whether this look-up found nothing for its caller, and such look-ups are limited."""
        return self.once.limiter.lookups is not None and self.refused is None and answer.status == 404

    def miss(self, tenant: str) -> Flow[None]:
        """Count it. If the storage of limits is down, the answer stays what it is: the next question is refused."""
        with suppress(RatesDown):
            yield Call(partial(self.once.limiter.lookup, tenant, missed=True))

    def binds(self, record: Record) -> Bind | None:
        """The function that says to what this caller's keys are bound; None: this key is not bound."""
        if binding.binding_of(record.fingerprint_recipe) is None:
            return None
        bind = self.once.policy_of(record.operation).bind
        if bind is None:
            raise NotAuthorized("the key is bound, and its route no longer says to what")
        return bind

    def bound(self, record: Record, bound_to: str) -> Record | None:
        """The row, if it is bound to this caller. Otherwise None, as for a key that was never seen."""
        hashes = binding.hashes(self.once.bind_secrets, record.scope, record.key, bound_to)
        return record if binding.is_bound_to(record.fingerprint_recipe, hashes) else None

    def answer(self, record: Record | None) -> Answer:
        """The answer for this row."""
        if self.refused is not None:
            return self.refused
        answer = self._meaning(record)
        if answer.status in (404, 410):
            self.record = None
        return answer

    def _meaning(self, record: Record | None) -> Answer:
        if record is None:
            return refusal(self.once, Situation.STATUS_NOT_FOUND)
        self.record = record
        match decide(record, _the_same_again(record)):
            case Replay():
                return _uncached(replay(record, self.once))
            case Unknown() | Claim(_, Event.DOUBT):
                self.record = replace(record, state=State.UNKNOWN)  # as a retry would make it
                return unknown(self.once, record.key)
            case Claim(_, Event.RESERVE):
                finished = record.state is State.EXPIRED or record.state in FINAL
                return refusal(self.once, Situation.STATUS_EXPIRED if finished else Situation.STATUS_NOT_FOUND)
            case Claim():
                return refusal(self.once, Situation.STATUS_RETRYABLE)
        policy = self.once.policy_of(record.operation)
        wait = busy_seconds(policy, self.once.engine.overdue_lease(record, policy))
        situation = Situation.DEFERRED if record.state is State.PENDING else Situation.ACCEPTED
        return refusal(self.once, situation, retry_after=wait, location=self.here)

    def wire(self, answer: Answer) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body of the answer."""
        # Echo the key only if the look-up found it for this caller.
        key = _as_header(self.key) if self.record is not None and self.key is not None else None
        headers = answer_headers(answer, key, self.record)
        return answer.status, headers, b"" if self.method == "HEAD" else answer.body


def _the_same_again(record: Record) -> Reservation:
    """A retry of the request that made this row."""
    return Reservation(
        record.scope,
        record.key,
        record.operation,
        record.fingerprint,
        record.fingerprint_version,
        record.effects,
        "",
        0.0,
        record.retention_seconds,
        record.fingerprint_recipe,
    )


def _uncached(answer: Answer) -> Answer:
    """Without caching headers: they were for the response to a POST, and the answer to this GET changes."""
    headers = [item for item in answer.headers if item[0] not in _CACHING]
    return Answer(answer.status, (*headers, (b"cache-control", b"no-store")), answer.body)


def _as_header(key: str) -> bytes:
    """The key as a client may send it: bare if possible, otherwise quoted."""
    try:
        if parse_key([key.encode("ascii")]) == key:
            return key.encode("ascii")
    except BadKey:
        pass
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.encode("ascii")


def _turned_away(once: OnceKey, error: NotAuthenticated | NotAuthorized) -> Answer:
    known = isinstance(error, NotAuthorized)
    situation = Situation.NOT_AUTHORIZED if known else Situation.NOT_AUTHENTICATED
    return refusal(once, situation, detail=str(error) or None)


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
        asked = _Asked(self.once, request, here, scope.get("root_path", ""), operation)
        status, headers, body = asked.wire(await self._answer(asked, scope))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _answer(self, asked: _Asked, scope: Scope) -> Answer:
        if asked.method not in ("GET", "HEAD"):
            return _NOT_ALLOWED
        once = self.once
        try:
            tenant = once.single_tenant or once.scope(asked.request)  # type: ignore[operator]
            if inspect.isawaitable(tenant):
                tenant = await tenant
            await self._authorize(asked, asked.authorized)
        except (NotAuthenticated, NotAuthorized) as error:
            return _turned_away(once, error)
        if (refused := asked.read_key(route_path(scope))) is not None:
            return refused
        try:
            record = await once.engine.run(asked.look(tenant), once.default_policy.begin_seconds)
        except OperatorError:
            return refusal(once, Situation.STORE_UNAVAILABLE)
        try:
            if record is not None and record.operation != asked.authorized:
                await self._authorize(asked, record.operation)
            if record is not None and (bind := asked.binds(record)) is not None:
                bound_to = bind(asked.request)
                record = asked.bound(record, await bound_to if inspect.isawaitable(bound_to) else bound_to)
        except (NotAuthenticated, NotAuthorized):
            record = None
        answer = asked.answer(record)
        if asked.counts_miss(answer):
            await once.engine.run(asked.miss(tenant), once.default_policy.begin_seconds)
        return answer

    async def _authorize(self, asked: _Asked, operation: str) -> None:
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
        operation = self.operation or _operation(query.encode("latin-1"))
        root: str = environ.get("SCRIPT_NAME", "")
        request = Request(environ["REQUEST_METHOD"], root + path, environ, wsgi_environ.all_headers(environ))
        asked = _Asked(self.once, request, here, root, operation)
        status, headers, body = asked.wire(self._answer(asked, path))
        decoded = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in headers]
        start_response(wsgi_environ.status_line(status), decoded)
        return [body]

    def _answer(self, asked: _Asked, path: str) -> Answer:
        if asked.method not in ("GET", "HEAD"):
            return _NOT_ALLOWED
        once = self.once
        try:
            tenant = once.single_tenant or not_async(once.scope(asked.request), "scope")  # type: ignore[operator]
            self._authorize(asked, asked.authorized)
        except (NotAuthenticated, NotAuthorized) as error:
            return _turned_away(once, error)
        if (refused := asked.read_key(path)) is not None:
            return refused
        try:
            record = once.engine.run_blocking(asked.look(tenant), once.default_policy.begin_seconds)
        except OperatorError:
            return refusal(once, Situation.STORE_UNAVAILABLE)
        try:
            if record is not None and record.operation != asked.authorized:
                self._authorize(asked, record.operation)
            if record is not None and (bind := asked.binds(record)) is not None:
                record = asked.bound(record, not_async(bind(asked.request), "bind"))
        except (NotAuthenticated, NotAuthorized):
            record = None
        answer = asked.answer(record)
        if asked.counts_miss(answer):
            once.engine.run_blocking(asked.miss(tenant), once.default_policy.begin_seconds)
        return answer

    def _authorize(self, asked: _Asked, operation: str) -> None:
        if self.once.authorize is not None:
            allowed(not_async(self.once.authorize(asked.request, operation), "authorize"))


def _operation(query: bytes) -> str | None:
    asked = parse_qs(query.decode("latin-1"), errors="replace").get("operation")
    return asked[0] if asked else None
