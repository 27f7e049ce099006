"""What stands in an ASGI scope and its messages: reading them. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from oncekey.core.routes import Route, Routes

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SCOPE_KEY = "oncekey"
"""Where the Operation stands in the scope that the app sees, for integrations further in."""


def route_of(scope: Scope, routes: Routes) -> Route | None:
    """The route of a request, by the path as the app's own routes see it: servers put the prefix that a proxy took
    away in front."""
    path: str = scope["path"]
    method: str = scope["method"].upper()
    if root := scope.get("root_path"):
        # The second is as Litestar reads it.
        path = routes.of_mounted(method, route_path(scope), path.removeprefix(root) or "/")
    return routes.match(method, path)


def route_path(scope: Scope) -> str:
    """As Starlette reads it: what stands behind the prefix, if that ends before a slash."""
    path: str = scope["path"]
    root: str = scope.get("root_path") or ""
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("/", ""):
        return path[len(root) :]
    return path


def is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )
