"""The ASGI middleware, without a framework: which requests are protected, and the app's start and end.

``asgi_shell.py`` reads a protected request and ``asgi_call.py`` calls the app; ``exchange.py`` decides what becomes of
it. Together they keep three rules:

* **Store before send.** A response is sent only after the store has it.
* **A disconnect changes nothing.** The handler runs in a task of its own and does not see a disconnect before its
  response is stored. So a client that disconnects cancels neither the work nor the storing.
* **Never a bypass.** A request that cannot be protected (no key, body too large, store down) is refused, and the app is
  not called.
"""

from __future__ import annotations

import asyncio
import logging

from oncekey.core.declarations import SAFE_METHODS
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError, OperatorError, SchemaError
from oncekey.upkeep.in_app import UpkeepChoice, chosen, never_started
from oncekey.upkeep.service import Upkeep
from oncekey.web import tuning
from oncekey.web.asgi_scope import SCOPE_KEY, App, Message, Receive, Scope, Send, route_of
from oncekey.web.asgi_shell import protect, unprotected
from oncekey.web.declared import Only, check_declarations, checked_only
from oncekey.web.endpoints import Endpoints, starlette_endpoints
from oncekey.web.event_loop import require_asyncio
from oncekey.web.responses import checked

_log = logging.getLogger("oncekey")


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
                await protect(self.app, self.once, route, scope, receive, send, self.endpoints)
                return
            if SCOPE_KEY not in scope:
                await unprotected(self.app, scope, receive, send)
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
