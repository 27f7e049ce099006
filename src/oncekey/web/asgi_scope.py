"""Reads and makes ASGI scopes and messages."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from oncekey.core.recipe import Parts
from oncekey.core.routes import Route, Routes
from oncekey.web.responses import Headers, body_length

_log = logging.getLogger("oncekey")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Lines = tuple[tuple[bytes, bytes], ...]

SCOPE_KEY = "oncekey"
"""The place of the Operation in the app's ASGI scope, for integrations inside of the middleware."""

_READ = frozenset({b"idempotency-key", b"content-type", b"content-length", b"transfer-encoding"})

_ROUTED = ("route", "endpoint", "path_params", "router")
"""What a router writes into its ASGI scope. Outer middleware, such as metrics, reads it from the outer scope."""

# Extensions that bypass body messages, which oncekey must see. Without them, frameworks send the body as messages.
_BYPASSES = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


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


# -- what a protected request says -------------------------------------------------------------------------------------


def read_headers(scope: Scope, chosen: frozenset[bytes]) -> tuple[list[bytes], str | None, int | None, Lines]:
    """The lines of Idempotency-Key, the content type, the length of the body, and the lines of ``chosen`` headers."""
    keys: list[bytes] = []
    content_type: str | None = None
    length: int | None = None
    chunked = False
    lines: Lines = ()
    for name, value in scope["headers"]:
        if name in chosen:
            lines += ((name, value),)
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
    return keys, content_type, None if chunked else length, lines


async def read_body(message: Message, receive: Receive, limit: int) -> bytes | None:
    """A body in several messages, of which this is the first; None: the client disconnected before its end.

    Reading stops after ``limit`` bytes, so a body that is too large is returned in part.
    """
    chunks: list[bytes] = []
    size = 0
    while message["type"] != "http.disconnect":
        chunk: bytes = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > limit or not message.get("more_body"):
            return b"".join(chunks)
        message = await receive()
    return None


def has_header(scope: Scope, header: bytes) -> bool:
    return any(name == header for name, _ in scope["headers"])


def may_have_been_dropped(scope: Scope) -> bool:
    """Whether the server may have dropped the body. uvicorn with httptools drops the body of a request with an
    Upgrade header, which Java's HttpClient sends (``Upgrade: h2c``). A chunked body has no length to compare."""
    return has_header(scope, b"transfer-encoding") and has_header(scope, b"upgrade")


def parts_of(scope: Scope, content_type: str | None, body: bytes) -> Parts:
    """What the fingerprint is made of."""
    raw_path: bytes | None = scope.get("raw_path")
    path: str = raw_path.decode("latin-1") if raw_path else scope["path"]

    def lines(names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
        """The lines of these headers, for a row with another recipe than the route's."""
        return [line for line in scope["headers"] if line[0] in names]

    return scope["method"].upper(), path, scope.get("query_string", b""), content_type, body, lines


# -- what the app gets, and what it sends ------------------------------------------------------------------------------


def inner_scope(outer: Scope, operation: object, *, encodings: bool = True) -> Scope:
    """The app's ASGI scope: with the operation, without extensions that bypass the body, and without accept-encoding,
    because bodies are stored uncompressed (compress outside of this middleware). ``encodings`` False: there is none."""
    scope = dict(outer)
    scope[SCOPE_KEY] = operation
    headers = outer["headers"]
    scope["headers"] = [item for item in headers if item[0] != b"accept-encoding"] if encodings else list(headers)
    if extensions := scope.get("extensions"):
        scope["extensions"] = {name: value for name, value in extensions.items() if name not in _BYPASSES}
    return scope


def copy_route(inner: Scope, outer: Scope) -> None:
    """Show outer middleware what a router has written into the app's ASGI scope."""
    for name in _ROUTED:
        if name in inner:
            outer[name] = inner[name]


async def deliver(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole response."""
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
    except OSError:
        client_left()


async def pass_on(send: Send, *parts: Message) -> None:
    try:
        for message in parts:
            await send(message)
    except OSError:
        client_left()


def messages(status: int, headers: Headers, body: bytes) -> tuple[Message, Message]:
    return (
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body, "more_body": False},
    )


def client_left() -> None:
    """The client is gone. The response is stored, and the app must not see the error."""
    _log.debug("the client left before its response was sent")
