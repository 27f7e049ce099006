"""One protected ASGI request: reads it, and asks the store for its key, as ``exchange.py`` says."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable

from oncekey.core.decision import Execute
from oncekey.core.problems import Answer, Situation
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import _current
from oncekey.engine.request import Request, allowed
from oncekey.errors import NotAuthenticated, NotAuthorized, OperatorError
from oncekey.web.asgi_scope import Message, Receive, Scope, Send
from oncekey.web.exchange import Exchange
from oncekey.web.handling import App, Endpoints, Handling, deliver, messages
from oncekey.web.responses import answer_headers, body_length

LARGE_BODY_BYTES = 64 * 1024
_READ = frozenset({b"idempotency-key", b"content-type", b"content-length", b"transfer-encoding"})
_DROPPED = (
    "The body did not arrive, as can happen to a request that has an Upgrade header: send it without that header (in "
    "Java, choose HTTP_1_1). This request was not executed. Whether an earlier request with this key was executed was "
    "not checked."
)


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


class AsgiShell:
    """One protected request, up to the decision about its key."""

    chosen_lines: tuple[tuple[bytes, bytes], ...] = ()
    """The lines of the headers that are part of the fingerprint."""

    def __init__(
        self,
        app: App,
        once: OnceKey,
        route: Route,
        scope: Scope,
        receive: Receive,
        send: Send,
        endpoints: Endpoints | None,
    ) -> None:
        self.exchange = Exchange(once, route)
        self.app = app
        self.endpoints = endpoints
        self.once = once
        self.scope = scope
        self.receive = receive
        self.send = send

    async def run(self) -> None:
        exchange, once = self.exchange, self.once
        keys, content_type, length = self._read_headers()
        if not keys and not exchange.policy.required:
            await unprotected(self.app, self.scope, self.receive, self.send)
            return
        try:
            if (tenant := once.single_tenant) is None or once.authorize is not None:
                tenant = await self._tenant(authorize=bool(keys))
        except (NotAuthenticated, NotAuthorized) as error:
            await self._answer(exchange.refuse_caller(error))
            return
        refused = exchange.admit(keys, length)
        if refused is not None:
            await self._answer(refused)
            return
        message = await self.receive()
        if message["type"] == "http.request" and not message.get("more_body"):  # nearly always
            body: bytes | None = message.get("body", b"")
        else:
            body = await self._read_body(message)
        if body is None:
            return  # the client disconnected before it had sent the body
        refused = self._refused_body(body, length)
        if refused is not None:
            await self._answer(refused)
            return
        if len(body) > LARGE_BODY_BYTES:
            # Hashing a large document takes milliseconds, and a hostile one more: do not block the event loop.
            await asyncio.to_thread(self._reserve, tenant, content_type, body)
        else:
            self._reserve(tenant, content_type, body)
        engine = once.engine
        try:
            decision = await engine.run(exchange.begin(), exchange.policy.begin_seconds)
        except OperatorError:
            await self._answer(exchange.unavailable())
            return
        if not isinstance(decision, Execute):
            await self._answer(exchange.answer_to(decision))
            return
        covered = self.endpoints is not None and self.endpoints.cover()
        operation = exchange.execute(decision, covered=covered, loop=asyncio.get_running_loop())
        await Handling(
            self.app, self.once, self.scope, self.receive, self.send,
            operation=operation, wanted=exchange.wanted, body=body, key_header=keys[0].strip(),
            endpoints=self.endpoints,
        ).run()  # fmt: skip

    def _read_headers(self) -> tuple[list[bytes], str | None, int | None]:
        keys: list[bytes] = []
        content_type: str | None = None
        length: int | None = None
        chunked = False
        chosen = self.exchange.policy.recipe.headers
        for name, value in self.scope["headers"]:
            if name in chosen:
                self.chosen_lines += ((name, value),)
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
        return keys, content_type, None if chunked else length

    async def _tenant(self, *, authorize: bool) -> str:
        """The tenant of the request. Also asks ``authorize``, before the key is looked up."""
        once, scope = self.once, self.scope
        request = Request(scope["method"].upper(), scope["path"], scope, scope["headers"])
        tenant: str | Awaitable[str] = once.single_tenant or once.scope(request)  # type: ignore[operator]
        if inspect.isawaitable(tenant):
            tenant = await tenant
        if authorize and once.authorize is not None:
            answer = once.authorize(request, self.exchange.route.operation)
            allowed(await answer if inspect.isawaitable(answer) else answer)
        return tenant

    async def _read_body(self, message: Message) -> bytes | None:
        """A body in several messages, of which this is the first; None: the client disconnected before its end.

        Reading stops at the policy's limit, so a body that is too large is returned in part.
        """
        limit = self.exchange.policy.max_request_bytes
        chunks: list[bytes] = []
        size = 0
        while message["type"] != "http.disconnect":
            chunk: bytes = message.get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
            if size > limit or not message.get("more_body"):
                return b"".join(chunks)
            message = await self.receive()
        return None

    def _refused_body(self, body: bytes, length: int | None) -> Answer | None:
        if len(body) > self.exchange.policy.max_request_bytes:
            return self.exchange.refuse(Situation.BODY_TOO_LARGE)
        if (length is not None and len(body) != length) or (not body and self._may_have_been_dropped()):
            return self.exchange.refuse(Situation.BODY_INCOMPLETE, _DROPPED if self._has(b"upgrade") else None)
        return None

    def _has(self, header: bytes) -> bool:
        return any(name == header for name, _ in self.scope["headers"])

    def _may_have_been_dropped(self) -> bool:
        """Whether the server may have dropped the body. uvicorn with httptools drops the body of a request with an
        Upgrade header, which Java's HttpClient sends (``Upgrade: h2c``). A chunked body has no length to compare."""
        return self._has(b"transfer-encoding") and self._has(b"upgrade")

    def _reserve(self, tenant: str, content_type: str | None, body: bytes) -> None:
        scope = self.scope
        raw_path: bytes | None = scope.get("raw_path")
        path: str = raw_path.decode("latin-1") if raw_path else scope["path"]
        parts = (scope["method"].upper(), path, scope.get("query_string", b""), content_type, body, self._lines)
        self.exchange.reserve(tenant, parts, self.chosen_lines)

    def _lines(self, names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
        """The lines of these headers, for a row with another recipe than the route's."""
        return [line for line in self.scope["headers"] if line[0] in names]

    def _answer(self, answer: Answer) -> Awaitable[None]:
        headers = answer_headers(answer, self.exchange.key_header, self.exchange.record)
        return deliver(self.send, *messages(answer.status, headers, answer.body))
