"""The WSGI middleware: the same exchange as in ASGI, in the server's thread.

It is synchronous: it blocks on the lanes, without an event loop. Here too a response is stored before it is sent: the
middleware consumes the app's iterable, stores the response, and then passes it on. ``flask.py`` finishes earlier,
inside the framework.
"""

from __future__ import annotations

from collections.abc import Iterable

from oncekey.core.declarations import SAFE_METHODS
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.upkeep.in_app import LazyUpkeep, UpkeepChoice
from oncekey.web.declared import Only, check_declarations, checked_only
from oncekey.web.endpoints import WsgiEndpoints
from oncekey.web.responses import checked
from oncekey.web.wsgi_environ import Environ, decoded, method_of, path_of
from oncekey.web.wsgi_shell import ENVIRON_KEY, App, Dress, StartResponse, WsgiShell, unprotected


class IdempotencyMiddleware:
    """``app = IdempotencyMiddleware(app, once=once)``.

    ``upkeep``: whether sweeper, reaper and reconciler run in this process, from its first protected request to
    ``once.close()`` or its end: True, False, an Upkeep of your own, or ``"auto"``: on an embedded store (SQLite,
    memory).
    ``dress``: adds the headers that the framework adds to its responses to oncekey's own answers.
    ``only="declared"``: protect what ``routes`` declares, and with ``protect()`` of a framework what ``@once.policy``
    declares; requests to other routes pass unchanged.
    ``endpoints``: the app's endpoints, as the framework's integration finds and wraps them.
    """

    def __init__(
        self,
        app: App,
        once: OnceKey,
        *,
        upkeep: UpkeepChoice = "auto",
        dress: Dress | None = None,
        only: Only | None = None,
        endpoints: WsgiEndpoints | None = None,
    ) -> None:
        self.app = app
        self.only = checked_only(only)
        self.endpoints = endpoints
        self._checked = False
        self.dress = dress
        self.once = checked(once)
        self.routes = once.routes if only is None else once.routes.only_listed()
        self._upkeep = LazyUpkeep(once, upkeep)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if not self._checked:
            check_declarations(self, self.once, self.only)  # WSGI has no start-up event, so before the first request
            self._checked = True
        path = path_of(environ)
        # An environ with the mark has passed another IdempotencyMiddleware further out.
        route = None if ENVIRON_KEY in environ else self._route(environ, path)
        if route is not None:
            self._upkeep.start()
            return WsgiShell(self, route, environ, start_response, path).run()
        if ENVIRON_KEY in environ:
            return self.app(environ, start_response)
        return unprotected(self.app, environ, start_response)

    def _route(self, environ: Environ, path: str) -> Route | None:
        method, routes = method_of(environ), self.routes
        if self.once.declarations.exist and self.endpoints is not None and method not in SAFE_METHODS:
            handler = self.endpoints.handler(environ)
            declaration = None if handler is None else self.once.declarations.of(handler.endpoint, method)
            if handler is not None and declaration is not None:
                return declaration.route(method, handler.path)
        if environ.get("SCRIPT_NAME"):
            path = routes.of_mounted(method, path, decoded(environ.get("PATH_INFO", "")) or "/")
        return routes.match(method, path)
