"""The shell for ASGI: reads a protected request and asks the store for its key, as ``exchange.py`` says.

It takes any request. The ordinary ones take the flat way of ``asgi.py``, which comes here for all others. If the
request gets the key, ``asgi_call.py`` calls the app.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable

from oncekey.core.decision import Execute
from oncekey.core.problems import BODY_DROPPED, Answer, Situation
from oncekey.core.record import Found
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import _current
from oncekey.engine.request import Request, allowed
from oncekey.errors import NotAuthenticated, NotAuthorized, OperatorError
from oncekey.web import admission
from oncekey.web.asgi_call import AsgiCall
from oncekey.web.asgi_scope import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    deliver,
    has_header,
    may_have_been_dropped,
    parts_of,
    read_body,
    read_headers,
)
from oncekey.web.endpoints import Endpoints
from oncekey.web.exchange import Exchange
from oncekey.web.responses import answer_headers

LARGE_BODY_BYTES = 64 * 1024


async def protect(
    app: App,
    once: OnceKey,
    route: Route,
    scope: Scope,
    receive: Receive,
    send: Send,
    endpoints: Endpoints | None,
    *,
    tenant: str | None = None,
    first: Message | None = None,
) -> None:
    """Return when the response has been sent. If the caller is cancelled, the app continues.

    ``tenant``: the caller was asked for already. ``first``: the first message of the body, if it was received already.
    """
    exchange = Exchange(once, route)
    policy = route.policy
    keys, content_type, length, lines = read_headers(scope, policy.recipe.headers)
    if not keys and not policy.required:
        await unprotected(app, scope, receive, send)
        return
    if policy.sender is not None:
        tenant = policy.sender_scope
    elif tenant is None:
        try:
            tenant = await tenant_of(once, route, scope, authorize=bool(keys) or policy.key_from is not None)
        except (NotAuthenticated, NotAuthorized) as error:
            await answer(exchange, exchange.refuse_caller(error), send)
            return
    refused = exchange.admit(keys, length)
    if refused is not None:
        await answer(exchange, refused, send)
        return
    message = first or await receive()
    if message["type"] == "http.request" and not message.get("more_body"):  # nearly always
        body: bytes | None = message.get("body", b"")
    else:
        body = await read_body(message, receive, policy.max_request_bytes)
    if body is None:
        return  # the client disconnected before it had sent the body
    if len(body) != length:
        refused = _refused_body(exchange, scope, body, length)
        if refused is not None:
            await answer(exchange, refused, send)
            return
    if policy.guarded and (refused := await _check(exchange, scope, body)) is not None:
        await answer(exchange, refused, send)
        return
    parts = parts_of(scope, content_type, body)
    if len(body) > LARGE_BODY_BYTES:
        # Hashing a large document takes milliseconds, and a hostile one more: do not block the event loop.
        await asyncio.to_thread(exchange.reserve, tenant, parts, lines)
    else:
        exchange.reserve(tenant, parts, lines)
    await decide(app, exchange, scope, receive, send, endpoints, body)


async def decide(
    app: App,
    exchange: Exchange,
    scope: Scope,
    receive: Receive,
    send: Send,
    endpoints: Endpoints | None,
    body: bytes,
    first: Found | None = None,
) -> None:
    """Ask for the key, and do what is decided. ``first``: what the store has answered already."""
    once, policy = exchange.once, exchange.policy
    try:
        decision = await once.engine.run(exchange.begin(first), policy.begin_seconds)
    except OperatorError:
        await answer(exchange, exchange.unavailable(), send)
        return
    if not isinstance(decision, Execute):
        await answer(exchange, exchange.answer_to(decision), send)
        return
    loop = asyncio.get_running_loop()
    covered = endpoints is not None and endpoints.cover()
    operation = exchange.execute(decision, covered=covered, loop=loop)
    call = AsgiCall(
        app, once, exchange.route, exchange.wanted, operation, exchange.key_header, scope, receive, send, body,
        endpoints, loop,
    )  # fmt: skip
    # Await a future, not the task: a server that cancels this coroutine (a disconnect) cancels only the future.
    try:
        await call.done
    finally:
        call.show_outside()


async def tenant_of(once: OnceKey, route: Route, scope: Scope, *, authorize: bool) -> str:
    """The tenant of the request. Also asks ``authorize``, before the key is looked up."""
    if once.single_tenant is not None and once.authorize is None:
        return once.single_tenant
    request = Request(scope["method"].upper(), scope["path"], scope, scope["headers"])
    tenant: str | Awaitable[str] = once.single_tenant or once.scope(request)  # type: ignore[operator]
    if inspect.isawaitable(tenant):
        tenant = await tenant
    if authorize and once.authorize is not None:
        verdict = once.authorize(request, route.operation)
        allowed(await verdict if inspect.isawaitable(verdict) else verdict)
    return tenant


async def _check(exchange: Exchange, scope: Scope, body: bytes) -> Answer | None:
    request = Request(scope["method"].upper(), scope["path"], scope, scope["headers"])
    if len(body) > LARGE_BODY_BYTES:
        refused = await asyncio.to_thread(admission.check, exchange, request, body)
    else:
        refused = admission.check(exchange, request, body)
    if refused is None and (bind := exchange.policy.bind) is not None:
        try:
            bound_to = bind(request)
            exchange.bound_to = await bound_to if inspect.isawaitable(bound_to) else bound_to
        except (NotAuthenticated, NotAuthorized) as error:
            return exchange.refuse_caller(error)
    return refused


def _refused_body(exchange: Exchange, scope: Scope, body: bytes, length: int | None) -> Answer | None:
    """The answer to a body that has not the length that it is said to have; None: a body of any length was announced,
    and this one is complete and small enough."""
    if len(body) > exchange.policy.max_request_bytes:
        return exchange.refuse(Situation.BODY_TOO_LARGE)
    if (length is not None and len(body) != length) or (not body and may_have_been_dropped(scope)):
        return exchange.refuse(Situation.BODY_INCOMPLETE, BODY_DROPPED if has_header(scope, b"upgrade") else None)
    return None


def answer(exchange: Exchange, said: Answer, send: Send) -> Awaitable[None]:
    headers = answer_headers(said, exchange.key_header, exchange.record)
    return deliver(send, said.status, headers, said.body)


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
