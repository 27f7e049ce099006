"""The shell for ASGI: reads a protected request and asks the store for its key, as ``exchange.py`` says.

If the request gets the key, ``asgi_call.py`` calls the app.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable

from oncekey.core.decision import Execute
from oncekey.core.problems import BODY_DROPPED, Answer, Situation
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import _current
from oncekey.engine.request import Request, allowed
from oncekey.errors import NotAuthenticated, NotAuthorized, OperatorError
from oncekey.web.asgi_call import AsgiCall
from oncekey.web.asgi_scope import (
    App,
    Receive,
    Scope,
    Send,
    deliver,
    has_header,
    may_have_been_dropped,
    messages,
    parts_of,
    read_body,
    read_headers,
)
from oncekey.web.endpoints import Endpoints
from oncekey.web.exchange import Exchange
from oncekey.web.responses import answer_headers

LARGE_BODY_BYTES = 64 * 1024


async def protect(
    app: App, once: OnceKey, route: Route, scope: Scope, receive: Receive, send: Send, endpoints: Endpoints | None
) -> None:
    """Return when the response has been sent. If the caller is cancelled, the app continues."""
    exchange = Exchange(once, route)
    policy = route.policy
    keys, content_type, length, lines = read_headers(scope, policy.recipe.headers)
    if not keys and not policy.required:
        await unprotected(app, scope, receive, send)
        return
    try:
        if (tenant := once.single_tenant) is None or once.authorize is not None:
            tenant = await _tenant(once, route, scope, authorize=bool(keys))
    except (NotAuthenticated, NotAuthorized) as error:
        await _answer(exchange, exchange.refuse_caller(error), send)
        return
    refused = exchange.admit(keys, length)
    if refused is not None:
        await _answer(exchange, refused, send)
        return
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):  # nearly always
        body: bytes | None = message.get("body", b"")
    else:
        body = await read_body(message, receive, policy.max_request_bytes)
    if body is None:
        return  # the client disconnected before it had sent the body
    if len(body) != length:
        refused = _refused_body(exchange, scope, body, length)
        if refused is not None:
            await _answer(exchange, refused, send)
            return
    parts = parts_of(scope, content_type, body)
    if len(body) > LARGE_BODY_BYTES:
        # Hashing a large document takes milliseconds, and a hostile one more: do not block the event loop.
        await asyncio.to_thread(exchange.reserve, tenant, parts, lines)
    else:
        exchange.reserve(tenant, parts, lines)
    try:
        decision = await once.engine.run(exchange.begin(), policy.begin_seconds)
    except OperatorError:
        await _answer(exchange, exchange.unavailable(), send)
        return
    if not isinstance(decision, Execute):
        await _answer(exchange, exchange.answer_to(decision), send)
        return
    loop = asyncio.get_running_loop()
    exchange.execute(decision, covered=endpoints is not None and endpoints.cover(), loop=loop)
    call = AsgiCall(app, exchange, scope, receive, send, body, endpoints, loop)
    # Await a future, not the task: a server that cancels this coroutine (a disconnect) cancels only the future.
    try:
        await call.done
    finally:
        call.show_outside()


async def _tenant(once: OnceKey, route: Route, scope: Scope, *, authorize: bool) -> str:
    """The tenant of the request. Also asks ``authorize``, before the key is looked up."""
    request = Request(scope["method"].upper(), scope["path"], scope, scope["headers"])
    tenant: str | Awaitable[str] = once.single_tenant or once.scope(request)  # type: ignore[operator]
    if inspect.isawaitable(tenant):
        tenant = await tenant
    if authorize and once.authorize is not None:
        answer = once.authorize(request, route.operation)
        allowed(await answer if inspect.isawaitable(answer) else answer)
    return tenant


def _refused_body(exchange: Exchange, scope: Scope, body: bytes, length: int | None) -> Answer | None:
    """The answer to a body that has not the length that it is said to have; None: a body of any length was announced,
    and this one is complete and small enough."""
    if len(body) > exchange.policy.max_request_bytes:
        return exchange.refuse(Situation.BODY_TOO_LARGE)
    if (length is not None and len(body) != length) or (not body and may_have_been_dropped(scope)):
        return exchange.refuse(Situation.BODY_INCOMPLETE, BODY_DROPPED if has_header(scope, b"upgrade") else None)
    return None


def _answer(exchange: Exchange, answer: Answer, send: Send) -> Awaitable[None]:
    headers = answer_headers(answer, exchange.key_header, exchange.record)
    return deliver(send, *messages(answer.status, headers, answer.body))


async def unprotected(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Call the app without an operation. If a handler calls its own app, hide the handler's operation."""
    if _current.get() is None:
        await app(scope, receive, send)
        return
    token = _current.set(None)
    try:
        await app(scope, receive, send)
    finally:
        _current.reset(token)
