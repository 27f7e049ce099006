"""Reads ASGI scopes and messages. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from oncekey.core.routes import Route, Routes

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SCOPE_KEY = "oncekey"
"""The place of the Operation in the app's ASGI scope, for integrations inside of the middleware."""


def route_of(scope: Scope, routes: Routes) -> Route | None:
    """The route of a request, by the path that the app's own routes match: without the prefix ``root_path``, which
    servers put in front."""
    path: str = scope["path"]
    method: str = scope["method"].upper()
    if root := scope.get("root_path"):
        # Litestar reads the path in the second way.
        path = routes.of_mounted(method, route_path(scope), path.removeprefix(root) or "/")
    return routes.match(method, path)


def route_path(scope: Scope) -> str:
    """The path as Starlette reads it: without the prefix, if a slash or nothing follows the prefix."""
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
