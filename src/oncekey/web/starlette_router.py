"""Finds the handler that a Starlette or FastAPI app will call for a request, by the app's own router.

It asks each route whether it matches, in the order of the router, as the router itself does. So a declaration at a
handler applies to that handler, also if other routes match the same path.
"""

from __future__ import annotations

import sys
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Host, Match, Mount, Route, Router, WebSocketRoute
from starlette.types import Scope

from oncekey.core.routes import plain
from oncekey.web.declared import Handler

_REMEMBERED = 1_000
"""How many paths the cache holds. Clients choose paths, so the cache needs a limit."""
_PATH_ONLY = (Route.matches, Mount.matches, WebSocketRoute.matches)


class RouterLookup:
    """The routers of an app. A new one is made after routes were added."""

    def __init__(self) -> None:
        self._routes: dict[int, list[Any]] = {}
        self._found: dict[tuple[str, str, str], Handler | None] = {}
        self._by_path_only = True

    def learn(self, router: Router) -> list[Any]:
        """The routes of a router. Newer FastAPI keeps an included router as one route, and its routes as contexts."""
        contexts = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", None)
        found = router.routes if contexts is None else contexts(router.routes)
        routes = [getattr(route, "_effective_route", route) for route in found]
        self._routes[id(router)] = routes
        self._by_path_only = self._by_path_only and all(map(_goes_by_path, routes))
        return routes

    def handler(self, app: Starlette | Router, scope: Scope) -> Handler | None:
        if not self._by_path_only:
            return self._find(app, scope, "")
        at = (scope["method"], scope["path"], scope.get("root_path", ""))
        if at in self._found:
            return self._found[at]
        handler = self._find(app, scope, "")
        if len(self._found) < _REMEMBERED:
            self._found[at] = handler
        return handler

    def _find(self, app: Starlette | Router, scope: Scope, prefix: str) -> Handler | None:
        router = app.router if isinstance(app, Starlette) else app
        for route in self._routes.get(id(router), ()):
            match, child = route.matches(scope)
            if match is not Match.FULL:
                continue
            path = prefix + (getattr(route, "path", None) or "")
            if isinstance(route, Mount | Host):
                inner = app_behind(route.app)
                return None if inner is None else self._find(inner, {**scope, **child}, path)
            endpoint = getattr(route, "endpoint", None)
            return None if endpoint is None else Handler(endpoint, plain(path))
        return None


def _goes_by_path(route: Any) -> bool:
    """Whether the route matches by method and path only, not by a host or another header."""
    kind = getattr(route, "original_route", route)  # of FastAPI's contexts
    matches = type(kind).matches
    return matches in _PATH_ONLY or (matches.__module__ == "fastapi.routing" and not isinstance(kind, Host))


def app_behind(app: Any) -> Any:
    """The app or router behind a chain of middleware, which keeps the next layer as ``app``; None: there is none."""
    while app is not None and not isinstance(app, Starlette | Router):
        app = getattr(app, "app", None)
    return app
