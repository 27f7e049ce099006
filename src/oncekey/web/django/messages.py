"""Reads Django's requests, and writes its responses, as ``asgi_scope.py`` and ``wsgi_environ.py`` do without Django."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import Any

from asgiref.sync import async_to_sync
from django.core.handlers.wsgi import LimitedStream
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase

from oncekey.core.problems import Answer, Situation
from oncekey.core.recipe import Parts
from oncekey.core.routes import Route, Routes
from oncekey.engine.request import Request, not_async
from oncekey.errors import ConfigurationError
from oncekey.web.asgi_scope import SCOPE_KEY, has_header, may_have_been_dropped, route_of
from oncekey.web.exchange import Exchange
from oncekey.web.responses import Headers, answer_headers, body_length
from oncekey.web.wsgi_environ import all_headers, decoded, header_lines, path_of
from oncekey.web.wsgi_shell import ENVIRON_KEY

MARK = "_oncekey_call"
"""The attribute of a request that is protected."""


def passed_us(request: HttpRequest) -> bool:
    """Whether this request is inside of another middleware of ours, further out. A request that middleware sends once
    more, after that one has answered it, is not."""
    call = getattr(request, MARK, None)
    if call is not None:
        return bool(call.inside)
    return ENVIRON_KEY in request.META or SCOPE_KEY in (_scope(request) or ())


def route_by_path(request: HttpRequest, method: str, routes: Routes) -> Route | None:
    scope = _scope(request)
    if scope is not None:
        return route_of(scope, routes)
    path = path_of(request.META)
    if request.META.get("SCRIPT_NAME"):
        path = routes.of_mounted(method, path, decoded(request.META.get("PATH_INFO", "")) or "/")
    return routes.match(method, path)


def is_asgi(request: HttpRequest) -> bool:
    return _scope(request) is not None


def _scope(request: HttpRequest) -> Any:
    """The ASGI scope; None: this is a WSGI request."""
    return getattr(request, "scope", None)


def read_body(request: HttpRequest, exchange: Exchange) -> bytes | Answer:
    """The whole body, or the answer that refuses it: it is larger than the policy allows, or incomplete."""
    limit, scope = exchange.policy.max_request_bytes, _scope(request)
    length = body_length(request.META.get("CONTENT_LENGTH"))
    chunked = scope is not None and has_header(scope, b"transfer-encoding")
    if length is not None and length > limit and not chunked:
        return exchange.refuse(Situation.BODY_TOO_LARGE)
    try:
        body = _all_of(request, limit)
    except UnreadablePostError:
        return exchange.refuse(Situation.BODY_INCOMPLETE)
    if len(body) > limit:
        return exchange.refuse(Situation.BODY_TOO_LARGE)
    if length is not None and not chunked and len(body) < length:
        return exchange.refuse(Situation.BODY_INCOMPLETE)
    if scope is not None and not body and may_have_been_dropped(scope):
        return exchange.refuse(Situation.BODY_INCOMPLETE)
    return body


def _all_of(request: HttpRequest, limit: int) -> bytes:
    """Read the body, and keep it where Django, and everything after us, reads it.

    An upload is not read by ``request.body``: that refuses it over ``DATA_UPLOAD_MAX_MEMORY_SIZE``, which Django does
    not count for files. There the policy's own limit applies.
    """
    if hasattr(request, "_body"):
        return request.body
    if getattr(request, "_read_started", False):
        raise ConfigurationError(
            "a middleware before oncekey has read the body of this request, so oncekey cannot compare it: put "
            "'oncekey.web.django.OnceKeyMiddleware' above that middleware in MIDDLEWARE, or let that middleware read "
            "request.body first"
        )
    chunked = _is_chunked_wsgi(request)
    if chunked:  # Django would read nothing, so that all such bodies were the same
        request._stream = LimitedStream(request.META["wsgi.input"], limit + 1)  # type: ignore[assignment]
    if request.content_type == "multipart/form-data":
        body = request.read(limit + 1)
        request._body = body
        request._stream = BytesIO(body)
    if chunked:
        request.META["CONTENT_LENGTH"] = str(len(request.body))  # parsers of forms and of REST framework ask for it
        request.__dict__.pop("headers", None)  # Django's cached copy
    return request.body


def _is_chunked_wsgi(request: HttpRequest) -> bool:
    """Whether the body has no length, and the server says that it can be read to its end."""
    meta = request.META
    return not is_asgi(request) and not meta.get("CONTENT_LENGTH") and bool(meta.get("wsgi.input_terminated"))


def plain_request(request: HttpRequest, method: str) -> Request:
    """The request as functions get it that know no framework."""
    return Request(method, request.path, _scope(request) or request.META, all_headers(request.META))


def parts_of(request: HttpRequest, method: str, body: bytes) -> Parts:
    """What the fingerprint is made of."""
    scope, content_type = _scope(request), request.META.get("CONTENT_TYPE") or None
    lines = partial(header_lines, request.META)
    if scope is not None:
        raw_path = scope.get("raw_path")
        path = raw_path.decode("latin-1") if raw_path else scope["path"]
        return method, path, scope.get("query_string", b""), content_type, body, lines
    query = request.META.get("QUERY_STRING", "").encode("latin-1", "replace")
    return method, path_of(request.META), query, content_type, body, lines


@contextmanager
def uncompressed(request: HttpRequest) -> Iterator[None]:
    """Bodies are stored uncompressed, so the app does not see what encodings the client takes. ``GZipMiddleware``
    further out sees it again."""
    encodings = request.META.pop("HTTP_ACCEPT_ENCODING", None)
    request.__dict__.pop("headers", None)  # Django's cached copy
    try:
        yield
    finally:
        if encodings is not None:
            request.META["HTTP_ACCEPT_ENCODING"] = encodings
            request.__dict__.pop("headers", None)


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def answer_of_app(request: HttpRequest, answer: Any, which: str) -> Any:
    """The answer of the app's function. A sync view under ASGI, such as one of REST framework, is in a thread: an
    async function is awaited in the event loop of its request."""
    if is_asgi(request) and inspect.isawaitable(answer):
        return async_to_sync(_awaited)(answer)
    return not_async(answer, which)


# -- responses ---------------------------------------------------------------------------------------------------------


def headers_of(response: HttpResponseBase) -> Headers:
    """The headers without cookies, which are never stored."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]


def set_headers(response: HttpResponseBase, headers: Headers) -> None:
    """Give a response these headers, and no others but its cookies."""
    for old in [old for old, _ in response.items()]:
        del response[old]
    for line, value in headers:
        name, text = line.decode("latin-1"), value.decode("latin-1")
        response[name] = f"{response[name]}, {text}" if name in response else text


def response_of(answer: Answer, exchange: Exchange) -> HttpResponse:
    """oncekey's own answer."""
    response = HttpResponse(answer.body, status=answer.status)
    set_headers(response, answer_headers(answer, exchange.key_header, exchange.record))
    return response
