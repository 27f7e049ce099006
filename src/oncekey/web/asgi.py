"""The ASGI middleware, without a framework: which requests are protected, and the flat way of an ordinary one.

Three rules hold on every way:

* **Store before send.** A response is sent only after the store has it.
* **A disconnect changes nothing.** The handler runs in a task of its own and does not see a disconnect before its
  response is stored. So a client that disconnects cancels neither the work nor the storing.
* **Never a bypass.** A request that cannot be protected (no key, body too large, store down) is refused, and the app is
  not called.

The **flat way** is the way of nearly every request: one coroutine from the request to the decision
(``IdempotencyMiddleware.__call__``), one task for the handler (``AsgiCall._handle``), and the conclusion in the app's
last ``send`` (``AsgiCall._inner_send``). Everything that is not plain leaves it for the general way, which is written
once for all kinds of servers (``exchange.py``; ``asgi_shell.py`` up to the decision). It leaves at one of these points:

=================  ===================================================================================================
point              what leaves there
=================  ===================================================================================================
the head           no key, several, or a key with escapes, spaces or parameters; a policy that narrows keys, or
                   asks more of a request than its key (``core/guards.py``); no content type; a body of unknown length
                   or over 64 KiB; headers that are part of the fingerprint; a OnceKey that is closed, that has a
                   ``max_active_keys``, or whose store failed the last time
the body           it is not as long as its header says
the store's word   a key that is in flight, unknown, deferred, expired, of another request, or to be retried; a
                   reservation whose answer was lost and asked for again
the response       a status outside of 200 to 399; a handler that used a verb of its operation (enlisted, phased,
                   deferred), that was not seen to return, or that said how it ended; a transactional route; a body in
                   pieces that must stream, or that is too large to store
the storing        the row is no longer this owner's
=================  ===================================================================================================

A store that fails and a caller that is cancelled need no other way. Before the handler, the request is refused or its
reservation given back; after it, the keeper goes on storing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from typing import Any

from oncekey.core.decision import Execute, Replay
from oncekey.core.declarations import SAFE_METHODS
from oncekey.core.fingerprint import FINGERPRINT_VERSION, digest
from oncekey.core.header import COMMON
from oncekey.core.kept_request import kept_request
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.routes import Route
from oncekey.core.sealed import SEALED_RESPONSE
from oncekey.core.states import FINAL
from oncekey.engine.batching.ticket import answered
from oncekey.engine.once import SINGLE_SCOPE, OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import NotAuthenticated, NotAuthorized, OperatorError
from oncekey.upkeep.in_app import UpkeepChoice, chosen, never_started
from oncekey.web import asgi_shell
from oncekey.web.asgi_call import AsgiCall
from oncekey.web.asgi_lifespan import Lifespan
from oncekey.web.asgi_scope import (
    SCOPE_KEY,
    App,
    Message,
    Receive,
    Scope,
    Send,
    client_left,
    parts_of,
    read_body,
    route_of,
)
from oncekey.web.declared import Only, check_declarations, checked_only
from oncekey.web.endpoints import Endpoints, starlette_endpoints
from oncekey.web.event_loop import require_asyncio
from oncekey.web.exchange import Exchange
from oncekey.web.responses import checked, expires, replayed

_KEY, _TYPE, _LENGTH = b"idempotency-key", b"content-type", b"content-length"


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
        """The flat way, from the request to the decision. The module has the points at which a request leaves it."""
        if scope["type"] != "http" or SCOPE_KEY in scope:  # in it: another of us stands further out
            await self._pass_on(scope, receive, send)
            return
        if not self._prepared:
            require_asyncio()  # again, since a server may not support the lifespan protocol
            self._prepare(scope)
        route = self._route(scope)
        if route is None:
            await asgi_shell.unprotected(self.app, scope, receive, send)
            return
        if self._misses_start:
            self._misses_start = False
            never_started(self.once, self.upkeep)

        # the head
        once, policy = self.once, route.policy
        engine, lines = once.engine, scope["headers"]
        head: dict[bytes, bytes] = dict(lines)
        if len(head) != len(lines) and not _once_each(lines):
            await self._leave(route, scope, receive, send)
            return
        raw_key, kind, size = head.get(_KEY, b""), head.get(_TYPE, b""), head.get(_LENGTH, b"")
        spelled = COMMON(raw_key)
        key = (spelled[1] or spelled[2] or b"").decode() if spelled else ""
        if (
            not (kind and size and len(size) < 6 and size.isdigit())
            or not (length := int(size)) <= asgi_shell.LARGE_BODY_BYTES
            or length > policy.max_request_bytes
            or not policy.unusual_headers.isdisjoint(head)
            or not policy.key_min_length <= len(key) <= policy.key_max_length
            or key.isspace()
            or not policy.flat
            or once.max_active_keys is not None
            or not engine.breaker.calm
            or engine.closed
        ):
            await self._leave(route, scope, receive, send)
            return
        tenant = once.single_tenant
        if tenant is None or once.authorize is not None:
            try:
                tenant = await asgi_shell.tenant_of(once, route, scope, authorize=True)
            except (NotAuthenticated, NotAuthorized) as error:
                exchange = self._exchange(route, None)
                await asgi_shell.answer(exchange, exchange.refuse_caller(error), send)
                return

        # the body
        message = await receive()
        body: bytes | None = message.get("body", b"")
        if message["type"] != "http.request" or message.get("more_body"):
            body = await read_body(message, receive, policy.max_request_bytes)
        if body is None:
            return  # the client disconnected before it had sent the body
        if len(body) != length:
            await self._leave(route, scope, receive, send, tenant, {"type": "http.request", "body": body})
            return
        raw_path: bytes | None = scope.get("raw_path")
        path: str = raw_path.decode("latin-1") if raw_path else scope["path"]
        query: bytes = scope.get("query_string", b"")
        recipe, of_tenant = policy.recipe, policy.key_per == "tenant"
        wanted = Reservation(
            tenant
            if tenant is SINGLE_SCOPE and of_tenant
            else once.key_scope(tenant, None if of_tenant else route.operation),
            key,
            route.operation,
            digest(
                scope["method"].upper(),
                path,
                query,
                kind.decode("latin-1"),
                body,
                (),
                recipe.fields,
                FINGERPRINT_VERSION,
            ),
            FINGERPRINT_VERSION,
            policy.effects_kind,
            engine.owners.new(),
            policy.lease_seconds,
            policy.retention_seconds,
            recipe.text,
            policy.quarantine_seconds,
        )
        if once.keyed is not None:
            wanted = once.keyed(wanted)

        # the store's word
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] | None = None
        try:
            future = engine.router.ask(wanted, loop, policy.begin_seconds)
            found: Any = await future
        except asyncio.CancelledError:
            if future is not None and answered(future):  # cancelled when its answer was already there
                engine.router.give_up(wanted, future.result())
            raise
        except OperatorError as error:
            engine.begin_failed(error)
            exchange = self._exchange(route, raw_key)
            await asgi_shell.answer(exchange, exchange.unavailable(), send)
            return
        if type(found) is not float:
            record: Record | None = found.record if type(found) is Found else found
            if record is not None and record.owner == wanted.owner and record.created_at == record.now:
                found = record.now  # a thread lane has inserted it
            elif record is not None and _is_replay(record, wanted):
                if engine.emitter.wants_each():
                    engine.emitter.decided(Replay(record), policy)
                status, headers, content = replayed(record, once)
                headers += ((_KEY, raw_key), expires(int(record.expires_at)))
                try:
                    await send({"type": "http.response.start", "status": status, "headers": headers})
                    await send({"type": "http.response.body", "body": content, "more_body": False})
                except OSError:
                    client_left()
                return
            else:
                exchange = self._exchange(route, raw_key)
                exchange.tenant = tenant
                exchange.wanted = replace(wanted, parts=parts_of(scope, kind.decode("latin-1"), body))
                first = Found(record)
                await asgi_shell.decide(self.app, exchange, scope, receive, send, self.endpoints, body, first)
                return
        if reports := engine.emitter.wants_each():
            engine.emitter.decided(Execute(wanted.record(found)), policy)

        # run the handler, in a task of its own
        endpoints = self.endpoints
        operation = Operation(wanted, policy, tenant, engine, loop, found)
        operation.evidence.covered = endpoints is not None and endpoints.cover()
        if policy.keep_request:
            parts = parts_of(scope, kind.decode("latin-1"), body)
            operation.request = kept_request(parts, recipe.headers)
        call = AsgiCall(self.app, once, route, wanted, operation, raw_key, scope, receive, send, body, endpoints, loop)
        call.encodings, call.reports = b"accept-encoding" in head, reports
        try:
            await call.done
        finally:
            call.show_outside()

    def _leave(
        self,
        route: Route,
        scope: Scope,
        receive: Receive,
        send: Send,
        tenant: str | None = None,
        first: Message | None = None,
    ) -> Awaitable[None]:
        """The general way, for a request whose key the store was not asked for yet. ``tenant`` and ``first``: what is
        known and received already."""
        return asgi_shell.protect(
            self.app, self.once, route, scope, receive, send, self.endpoints, tenant=tenant, first=first
        )

    def _exchange(self, route: Route, raw_key: bytes | None) -> Exchange:
        exchange = Exchange(self.once, route)
        exchange.key_header = raw_key
        return exchange

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What is not a request that oncekey protects here."""
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        lifespan = Lifespan(self.app, self.once, self._make_upkeep, tune=self.tune)
        first = await receive()
        await lifespan.start(lambda: self._prepare(scope), send)
        self._misses_start = False
        await lifespan.run(first, scope, receive, send)

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
        if scope.get("root_path"):
            return route_of(scope, self.routes)
        return self.routes.match(scope["method"].upper(), scope["path"])


def _once_each(lines: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the headers that the flat way reads come at most once. Others may be repeated."""
    names = [name for name, _ in lines if name in (_KEY, _TYPE, _LENGTH)]
    return len(set(names)) == len(names)


def _is_replay(record: Record, wanted: Reservation) -> bool:
    """Whether this row holds the response to this very request: the plain case of ``core.decision.decide``."""
    return (
        record.state in FINAL
        and record.fingerprint == wanted.fingerprint
        and record.fingerprint_version == wanted.fingerprint_version
        and record.fingerprint_recipe == wanted.fingerprint_recipe
        and record.expires_at > record.now
        and ((response := record.response) is None or response.schema_version != SEALED_RESPONSE)
    )
