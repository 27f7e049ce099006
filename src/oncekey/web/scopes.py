"""What stands in an ASGI scope: reading the outer one, and making the one that the app sees.

Owns what we know of Starlette's ways with a scope. Pure: messages are ``asgi.py``'s and ``handling.py``'s.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from oncekey.engine.operation import _current

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SCOPE_KEY = "oncekey"
"""Where the Operation stands in the scope that the app sees, for integrations further in."""

_STARLETTE_HANDLERS = "starlette.exception_handlers"


def route_path(scope: Scope) -> str:
    """The path as the app's routes see it: servers put the prefix that a proxy took away in front."""
    path: str = scope["path"]
    root: str | None = scope.get("root_path")
    if not root:
        return path
    root = root.rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def never_routed(scope: Scope) -> bool:
    """Starlette's router looked at this very scope, and no endpoint took the request."""
    router = scope.get("router")
    if router is None or getattr(router, "default", None) != getattr(router, "not_found", None):
        return False  # another framework, a copied scope, or a fallback app: we cannot tell
    if "endpoint" not in scope:
        return True
    methods = getattr(scope.get("route"), "methods", None) or (scope["method"],)
    return scope["method"] not in methods


class InnerScope(dict[str, Any]):
    """A scope that notices when Starlette installs its exception handlers, to learn when one of them is used.

    They turn what a handler raised into a response inside of us, where it looks like a returned one.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name == _STARLETTE_HANDLERS:
            operation = self[SCOPE_KEY]
            operation.tells_apart = True
            operation.around = sys.exc_info()[2]
            value = tuple([_watched(handlers) for handlers in value])
        _set_item(self, name, value)


_set_item = dict.__setitem__


class _Watched(dict[Any, Any]):
    """Starlette's handlers by exception or status; looking for one means that something was raised, whoever answers."""

    original: Any

    def __contains__(self, kind: object) -> bool:
        if (operation := _current.get()) is not None:
            operation.raised = True
        return super().__contains__(kind)

    def get(self, kind: Any, default: Any = None) -> Any:
        return self[kind] if kind in self else default  # noqa: SIM401 - dict.get would not pass by __contains__


_known: dict[int, _Watched] = {}


def _watched(handlers: Any) -> _Watched:
    """One app has one set of handlers: watched once, not once per request."""
    known = _known.get(id(handlers))
    if known is None or known.original is not handlers or len(known) != len(handlers):
        if len(_known) > 100:  # apps that make their handlers anew each time
            _known.clear()
        known = _known[id(handlers)] = _Watched(handlers)
        known.original = handlers  # keeps it alive, and so its id its own
    return known


def is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


def header_map(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in raw:
        text = name.decode("latin-1")
        headers[text] = f"{headers[text]}, {value.decode('latin-1')}" if text in headers else value.decode("latin-1")
    return headers
