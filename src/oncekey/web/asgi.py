"""The ASGI middleware, without a framework.

This module reads a request and asks the store for its key. If the request gets the key, ``handling.py`` calls the app.
Both keep three rules:

* **Store before send.** A response is sent only after the store has it.
* **A disconnect changes nothing.** The handler runs in a task of its own and does not see a disconnect before its
  response is stored. So a client that disconnects cancels neither the work nor the storing.
* **Never a bypass.** A request that cannot be protected (no key, body too large, store down) is refused, and the app is
  not called.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable

from oncekey.core.decision import Execute
from oncekey.core.declarations import SAFE_METHODS
from oncekey.core.kept_request import kept_request
from oncekey.core.problems import Answer, Situation
from oncekey.core.record import Record, Reservation
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.engine.request import Request, allowed
from oncekey.errors import ConfigurationError, NotAuthenticated, NotAuthorized, OperatorError, SchemaError
from oncekey.upkeep.in_app import UpkeepChoice, chosen, never_started
from oncekey.upkeep.service import Upkeep
from oncekey.web import tuning
from oncekey.web.asgi_scope import SCOPE_KEY, Message, Receive, Scope, Send, route_of
from oncekey.web.declared import Only, check_declarations, checked_only
from oncekey.web.endpoints import starlette_endpoints
from oncekey.web.event_loop import require_asyncio
from oncekey.web.handling import App, Endpoints, Handling, deliver, messages
from oncekey.web.responses import (
    UNAVAILABLE_RETRY_SECONDS,
    answer_headers,
    answer_to,
    body_length,
    checked,
    read_key,
    refusal,
)

_log = logging.getLogger("oncekey")

LARGE_BODY_BYTES = 64 * 1024
_READ = frozenset({b"idempotency-key", b"content-type", b"content-length", b"transfer-encoding"})
_DROPPED = (
    "The body did not arrive, as can happen to a request that has an Upgrade header: send it without that header (in "
    "Java, choose HTTP_1_1). This request was not executed. Whether an earlier request with this key was executed was "
    "not checked."
)


class IdempotencyMiddleware:
    """``IdempotencyMiddleware(app, once=once)``, for an ASGI app of a framework that has no ``protect()``.

    It wraps the endpoints of a Starlette or FastAPI app, if that app is passed to it or it was added to that app. The
    endpoints of other apps are not wrapped: see the last rows of the table in ``core/judgment.py``.

    ``only="declared"``: protect what ``routes`` or ``@once.policy`` declares; other routes pass untouched, and those
    that change something are named in the log at start. Without it, all routes of the policy's methods are protected.
    ``tune``: while the server is up, set Python's garbage collector and switch interval (docs/servers.md).
    ``upkeep``: whether sweeper, reaper and reconciler run in this process, from its start to its end: True, False, an
    Upkeep of your own, or ``"auto"``: on an embedded store (SQLite, memory). Needs a server that speaks the lifespan
    protocol, as uvicorn does; the log says so where it does not.
    """

    def __init__(
        self,
        app: App,
        once: OnceKey,
        *,
        tune: bool = True,
        upkeep: UpkeepChoice = "auto",
        only: Only | None = None,
        endpoints: Endpoints | None = None,
    ) -> None:
        self.app = app
        self.endpoints = endpoints
        self._looked_for_endpoints = endpoints is not None
        self.once = checked(once)
        self.tune = tune
        self.only = checked_only(only)
        self.routes = once.routes if only is None else once.routes.only_listed()
        self._prepared = False
        self.upkeep = upkeep
        self._make_upkeep = chosen(once, upkeep)
        self._misses_start = self._make_upkeep is not None
        """Upkeep must run, and neither a lifespan start nor a protected request has come yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not self._prepared:
                require_asyncio()  # again, since a server may not support the lifespan protocol
                self._prepare(scope)
            route = None if SCOPE_KEY in scope else self._route(scope)  # in it: another of us stands further out
            if route is not None:
                if self._misses_start:
                    self._misses_start = False
                    never_started(self.once, self.upkeep)
                await _Exchange(self.app, self.once, route, scope, receive, send, self.endpoints).run()
                return
            if SCOPE_KEY not in scope:
                await _unprotected(self.app, scope, receive, send)
                return
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _prepare(self, scope: Scope) -> None:
        """Before the first request: find the endpoints, and look through what their handlers declare."""
        if not self._looked_for_endpoints:
            self._looked_for_endpoints = True
            self.endpoints = starlette_endpoints(self, scope)
        if self.endpoints is None:
            check_declarations(self, self.once, self.only)
        else:
            self.endpoints.check(scope, self.once, self.only)
        self._prepared = True

    def _route(self, scope: Scope) -> Route | None:
        """What protects this request: the declaration of its handler, or what ``routes`` says of its path."""
        if self.once.declarations.exist and self.endpoints is not None:
            method: str = scope["method"].upper()
            if method not in SAFE_METHODS and (handler := self.endpoints.handler(scope)) is not None:
                declaration = self.once.declarations.of(handler.endpoint, method)
                if declaration is not None:
                    return declaration.route(method, handler.path)
        return route_of(scope, self.routes)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse to start on a wrong schema. At shutdown handlers end first, then the app, then oncekey."""
        first = await receive()
        try:
            require_asyncio()
            self._prepare(scope)
            await asyncio.to_thread(self.once.start)
        except (SchemaError, ConfigurationError) as error:
            _log.error("%s", error)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        except OperatorError as error:
            _log.error("the store is not reachable at start; requests get 503 until it is: %s", error)
        self._misses_start = False
        waiting = [first]
        tuned = False
        upkeep: Upkeep | None = None

        async def stop_upkeep() -> None:
            nonlocal upkeep
            running, upkeep = upkeep, None
            if running is not None:
                await running.astop()

        async def receive_all() -> Message:
            message = waiting.pop() if waiting else await receive()
            if message["type"] == "lifespan.shutdown":
                await self.once.drain()  # before the app closes what its handlers use
                await stop_upkeep()  # before the app closes what its resolvers use
            return message

        async def send_all(message: Message) -> None:
            nonlocal tuned, upkeep
            if message["type"] == "lifespan.startup.complete":
                if self._make_upkeep is not None and upkeep is None:
                    upkeep = self._make_upkeep()
                    upkeep.start()
                if self.tune and not tuned:
                    tuned = True
                    tuning.settle()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await asyncio.to_thread(self.once.close)
            await send(message)

        try:
            await self.app(scope, receive_all, send_all)
        finally:
            await stop_upkeep()  # the app may have ended without a shutdown
            if tuned:
                tuning.restore()


async def _unprotected(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Call the app without an operation. If a handler calls its own app, hide the handler's operation."""
    if _current.get() is None:
        await app(scope, receive, send)
        return
    token = _current.set(None)
    try:
        await app(scope, receive, send)
    finally:
        _current.reset(token)


class _Exchange:
    """One protected request, up to the decision about its key."""

    key_header: bytes | None = None
    chosen_lines: tuple[tuple[bytes, bytes], ...] = ()
    """The lines of the headers that are part of the fingerprint."""

    def __init__(
        self,
        app: App,
        once: OnceKey,
        route: Route,
        scope: Scope,
        receive: Receive,
        send: Send,
        endpoints: Endpoints | None,
    ) -> None:
        self.app = app
        self.endpoints = endpoints
        self.once = once
        self.route = route
        self.policy = route.policy
        self.scope = scope
        self.receive = receive
        self.send = send

    async def run(self) -> None:
        keys, content_type, length = self._read_headers()
        if not keys and not self.policy.required:
            await _unprotected(self.app, self.scope, self.receive, self.send)
            return
        try:
            if (tenant := self.once.single_tenant) is None or self.once.authorize is not None:
                tenant = await self._tenant(authorize=bool(keys))
        except NotAuthenticated as error:
            await self._refuse(Situation.NOT_AUTHENTICATED, detail=str(error) or None)
            return
        except NotAuthorized as error:
            await self._refuse(Situation.NOT_AUTHORIZED, detail=str(error) or None)
            return
        key = read_key(keys, self.policy, self.once)
        if isinstance(key, Answer):
            await self._answer(key, None)
            return
        self.key_header = key_header = keys[0].strip()
        if length is not None and length > self.policy.max_request_bytes:
            await self._refuse(Situation.BODY_TOO_LARGE)  # before the server says 100 Continue
            return
        body = await self._read_body()
        if body is None:
            return
        if (length is not None and len(body) != length) or (not body and self._may_have_been_dropped()):
            await self._refuse(Situation.BODY_INCOMPLETE, detail=_DROPPED if self._has(b"upgrade") else None)
            return
        if len(body) > LARGE_BODY_BYTES:
            # Hashing a large document takes milliseconds, and a hostile one more: do not block the event loop.
            wanted = await asyncio.to_thread(self._reservation, tenant, key, content_type, body)
        else:
            wanted = self._reservation(tenant, key, content_type, body)
        engine = self.once.engine
        try:
            decision = await engine.run(engine.begin(wanted, self.policy), self.policy.begin_seconds)
        except OperatorError:
            await self._refuse(Situation.STORE_UNAVAILABLE, retry_after=UNAVAILABLE_RETRY_SECONDS)
            return
        if isinstance(decision, Execute):
            loop = asyncio.get_running_loop()
            covered = self.endpoints is not None and self.endpoints.cover()
            operation = Operation(decision.record, self.policy, tenant, engine, loop, covered=covered)
            if self.policy.keep_request:
                operation.request = kept_request(wanted.parts, self.policy.recipe.headers)
            await Handling(
                self.app, self.once, self.scope, self.receive, self.send,
                operation=operation, wanted=wanted, body=body, key_header=key_header, endpoints=self.endpoints,
            ).run()  # fmt: skip
        else:
            await self._answer(answer_to(decision, self.policy, self.once), decision.record)

    def _reservation(self, tenant: str, key: str, content_type: str | None, body: bytes) -> Reservation:
        scope = self.scope
        raw_path: bytes | None = scope.get("raw_path")
        path: str = raw_path.decode("latin-1") if raw_path else scope["path"]
        return self.once.reservation(
            self.route,
            tenant=tenant,
            key=key,
            owner=self.once.engine.owners.new(),
            parts=(scope["method"].upper(), path, scope.get("query_string", b""), content_type, body, self._lines),
            lines=self.chosen_lines,
        )

    def _lines(self, names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
        """The lines of these headers, for a row with another recipe than the route's."""
        return [line for line in self.scope["headers"] if line[0] in names]

    def _read_headers(self) -> tuple[list[bytes], str | None, int | None]:
        keys: list[bytes] = []
        content_type: str | None = None
        length: int | None = None
        chunked = False
        chosen = self.policy.recipe.headers
        for name, value in self.scope["headers"]:
            if name in chosen:
                self.chosen_lines += ((name, value),)
            elif name not in _READ:
                continue
            elif name == b"content-length":
                plain = len(value) < 16 and value.isdigit()
                length = int(value) if plain else body_length(value.decode("latin-1"))
            elif name == b"content-type":  # join repeated ones: an app may read any of them
                text = value.decode("latin-1")
                content_type = text if content_type is None else f"{content_type}, {text}"
            elif name == b"idempotency-key":
                keys.append(value)
            else:
                chunked = True
        # RFC 9112: a chunked body has its own end, so ignore a Content-Length.
        return keys, content_type, None if chunked else length

    def _has(self, header: bytes) -> bool:
        return any(name == header for name, _ in self.scope["headers"])

    def _may_have_been_dropped(self) -> bool:
        """Whether the server may have dropped the body. uvicorn with httptools drops the body of a request with an
        Upgrade header, which Java's HttpClient sends (``Upgrade: h2c``). A chunked body has no length to compare."""
        return self._has(b"transfer-encoding") and self._has(b"upgrade")

    async def _tenant(self, *, authorize: bool) -> str:
        """The tenant of the request. Also asks ``authorize``, before the key is looked up."""
        once, scope = self.once, self.scope
        request = Request(scope["method"].upper(), scope["path"], scope, scope["headers"])
        tenant: str | Awaitable[str] = once.single_tenant or once.scope(request)  # type: ignore[operator]
        if inspect.isawaitable(tenant):
            tenant = await tenant
        if authorize and once.authorize is not None:
            answer = once.authorize(request, self.route.operation)
            allowed(await answer if inspect.isawaitable(answer) else answer)
        return tenant

    async def _read_body(self) -> bytes | None:
        """The whole body; None: it was refused, or the client disconnected before it had sent it."""
        limit = self.policy.max_request_bytes
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                return None
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                await self._refuse(Situation.BODY_TOO_LARGE)
                return None
            if not message.get("more_body"):
                return b"".join((*chunks, chunk)) if chunks else chunk  # nearly always one message
            chunks.append(chunk)

    # -- sending -------------------------------------------------------------------------------------------------

    async def _refuse(
        self, situation: Situation, *, detail: str | None = None, retry_after: float | None = None
    ) -> None:
        await self._answer(refusal(self.once, situation, detail=detail, retry_after=retry_after), None)

    def _answer(self, answer: Answer, record: Record | None) -> Awaitable[None]:
        headers = answer_headers(answer, self.key_header, record)
        return deliver(self.send, *messages(answer.status, headers, answer.body))
