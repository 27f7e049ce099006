"""The shell for WSGI: one protected request, from the reservation of its key to the end of its response.

``wsgi.py`` decides which requests are protected; ``exchange.py`` decides what becomes of them.
"""

from __future__ import annotations

import contextvars
import io
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Protocol

from oncekey.core.decision import Execute
from oncekey.core.problems import Answer, Situation
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import _current
from oncekey.engine.request import Request, allowed, not_async
from oncekey.errors import NotAuthenticated, NotAuthorized, OperatorError
from oncekey.web import admission
from oncekey.web.blocking_end import BlockingEnd
from oncekey.web.endpoints import WsgiEndpoints
from oncekey.web.exchange import RUNNING, Exchange
from oncekey.web.responses import Headers, answer_headers, body_length
from oncekey.web.wsgi_bodies import AppBody, Streamed
from oncekey.web.wsgi_environ import Environ, all_headers, header_lines, method_of, status_line

ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
StartResponse = Callable[..., Callable[[bytes], object]]
App = Callable[[Environ, StartResponse], Iterable[bytes]]
Dress = Callable[[Environ, Answer], Answer]

ENVIRON_KEY = "oncekey.exchange"
"""The place of the shell in the environ, for integrations inside of the middleware."""

_running: contextvars.ContextVar[WsgiShell | None] = contextvars.ContextVar("oncekey_exchange", default=None)


def shell_of(environ: Environ) -> WsgiShell | None:
    """The protected request that runs here; also if middleware passed on a new environ."""
    shell: WsgiShell | None = environ.get(ENVIRON_KEY)
    if shell is None:
        shell = _running.get()
        if shell is not None and shell.exchange.operation is not _current.get():
            return None  # a handler calls another app; that request is not part of its operation
    return shell


def unprotected(app: App, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    """Call the app without an operation. If a handler calls its own app, hide the handler's operation."""
    if _current.get() is None:
        return app(environ, start_response)
    context = contextvars.copy_context()
    context.run(_current.set, None)
    return AppBody(context.run(app, environ, start_response), context, [])


class Middleware(Protocol):
    """What a shell needs to know of its middleware."""

    app: App
    once: OnceKey
    endpoints: WsgiEndpoints | None
    dress: Dress | None


class WsgiShell(BlockingEnd):
    """One protected request."""

    def __init__(
        self,
        middleware: Middleware,
        route: Route,
        environ: Environ,
        start_response: StartResponse,
        path: str,
    ) -> None:
        self.app = middleware.app
        self.once = middleware.once
        self.endpoints = middleware.endpoints
        self.dress = middleware.dress
        self.exchange = Exchange(self.once, route)
        self.policy = route.policy
        self.environ = environ
        self.start_response = start_response
        self.path = path
        self.response_started = False
        """``start_response`` of the server was called."""
        self.whole_body: Callable[[str], bytes | None] | None = None
        """Set by a framework's integration: returns the whole body for a status line, before the app returns it."""
        # of the handler's response
        self.status_line = ""
        self.headers: Headers = []
        self.written: list[bytes] = []

    # -- before the handler --------------------------------------------------------------------------------------

    def run(self) -> Iterable[bytes]:
        exchange, once, environ = self.exchange, self.once, self.environ
        raw_key = environ.get("HTTP_IDEMPOTENCY_KEY")
        if raw_key is None and not self.policy.required:
            return unprotected(self.app, environ, self.start_response)
        policy = self.policy
        try:
            tenant = once.single_tenant if policy.sender is None else policy.sender_scope
            if tenant is None or (policy.sender is None and once.authorize is not None):
                tenant = self._tenant(authorize=raw_key is not None or policy.key_from is not None)
        except (NotAuthenticated, NotAuthorized) as error:
            return self._answer(exchange.refuse_caller(error))
        length = body_length(environ.get("CONTENT_LENGTH"))
        refused = exchange.admit([] if raw_key is None else [raw_key.encode("latin-1")], length)
        if refused is not None:
            return self._answer(refused)
        body = self._read_body(length)
        if isinstance(body, Answer):
            return self._answer(body)
        if policy.guarded and (refused := self._check(body)) is not None:
            return self._answer(refused)
        query, content_type = environ.get("QUERY_STRING", "").encode("latin-1"), environ.get("CONTENT_TYPE") or None
        parts = (method_of(environ), self.path, query, content_type, body, partial(header_lines, environ))
        exchange.reserve(tenant, parts, header_lines(environ, self.policy.recipe.headers))
        try:
            decision = once.engine.run_blocking(exchange.begin(), self.policy.begin_seconds)
        except OperatorError:
            return self._answer(exchange.unavailable())
        if not isinstance(decision, Execute):
            return self._answer(exchange.answer_to(decision))
        exchange.execute(decision, covered=self.endpoints is not None and self.endpoints.cover())
        return self._execute(body)

    def _tenant(self, *, authorize: bool) -> str:
        """The tenant of the request. Also asks ``authorize``, before the key is looked up."""
        once, request = self.once, self._request()
        tenant: str = once.single_tenant or not_async(once.scope(request), "scope")  # type: ignore[operator]
        if authorize and once.authorize is not None:
            allowed(not_async(once.authorize(request, self.exchange.route.operation), "authorize"))
        return tenant

    def _check(self, body: bytes) -> Answer | None:
        """What a guarded route asks of its request."""
        exchange, request = self.exchange, self._request()
        refused = admission.check(exchange, request, body)
        if refused is None and self.policy.bind is not None:
            try:
                exchange.bound_to = not_async(self.policy.bind(request), "bind")
            except (NotAuthenticated, NotAuthorized) as error:
                return exchange.refuse_caller(error)
        return refused

    def _request(self) -> Request:
        """The request as the app's functions get it."""
        path = self.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # the app may print or send it
        return Request(method_of(self.environ), path, self.environ, all_headers(self.environ))

    def _read_body(self, length: int | None) -> bytes | Answer:
        """The whole body, or the answer that refuses it: it is larger than the policy allows, or incomplete."""
        limit = self.policy.max_request_bytes
        stream = self.environ["wsgi.input"]
        body = b""
        try:
            if length is not None:
                body = stream.read(length)
                if len(body) < length:  # the client disconnected before it had sent the whole request
                    return self.exchange.refuse(Situation.BODY_INCOMPLETE)
            elif self.environ.get("wsgi.input_terminated"):
                body = stream.read(limit + 1)  # chunked
        except OSError:  # malformed chunks, or a broken connection
            return self.exchange.refuse(Situation.BODY_INCOMPLETE)
        return self.exchange.refuse(Situation.BODY_TOO_LARGE) if len(body) > limit else body

    # -- the handler ---------------------------------------------------------------------------------------------

    def _execute(self, body: bytes) -> Iterable[bytes]:
        operation = self.exchange.operation
        self.once.engine.keeper.watch(operation)
        environ = dict(self.environ)
        environ.pop("HTTP_ACCEPT_ENCODING", None)  # bodies are stored uncompressed; compress outside of the middleware
        environ.pop("wsgi.file_wrapper", None)  # it would bypass the middleware, which must see the body
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        environ[ENVIRON_KEY] = self
        # The app runs in a context of its own, so that its variables do not leak into the thread's next request.
        context = contextvars.copy_context()
        context.run(self.once.engine.enter, operation)
        context.run(_running.set, self)
        try:
            iterable = context.run(self.app, environ, self._start)
            body_parts = AppBody(iterable, context, self.written)
        except BaseException as error:
            return self._raised(error)
        return self._pass(body_parts)

    def _start(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None
    ) -> Callable[[bytes], object]:
        if exc_info is not None and exc_info[1] is not None:
            # With exc_info, WSGI replaces the response by an error page. It is too late if the response was started.
            evidence = self.exchange.operation.evidence
            if not evidence.covered:
                evidence.entered()
                evidence.raised_with(exc_info[1], None)
            if self.response_started:
                raise exc_info[1].with_traceback(exc_info[2])
        int(status[:3])  # raise now for a malformed status, so that it counts as the app's error
        self.status_line = status
        self.headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        if self.whole_body is not None and self.exchange.stage is RUNNING:
            body = self.whole_body(status)
            if body is not None:
                self.conclude(body)
        return self.written.append

    def _pass(self, parts: AppBody) -> Iterable[bytes]:
        """Consume the response, store it, and pass it on; a response that is too large to store passes through."""
        exchange = self.exchange
        chunks, size = [], 0
        try:
            for chunk in parts:
                chunks.append(chunk)
                size += len(chunk)
                if exchange.instead is not None:
                    continue  # ``instead`` is sent, so drop the app's body
                if exchange.cannot_store(size, self.headers):
                    return self._leave_flat_way(chunks, parts)
            parts.close()
        except BaseException as error:
            answer = self.failed(error)  # before close(), which may raise too: the key must get its end
            parts.close()
            return self._answer_or_raise(answer, error)
        body = b"".join(chunks)
        if exchange.stage is RUNNING:
            if not self.status_line:
                return self._raised(EOFError("the app did not start a response"))
            self.conclude(body)
        self.settle()
        exchange.changed_to(self.status)
        if exchange.instead is not None:
            return self._answer(exchange.instead)
        self._send_start(exchange.first_headers(self.status, self.headers, len(body)))
        return [body]

    def _leave_flat_way(self, chunks: list[bytes], rest: AppBody) -> Iterable[bytes]:
        """The response passes through, because it cannot be stored."""
        self._send_start(self.exchange.stream(self.status, self.headers))
        return Streamed(self, chunks, rest)

    @property
    def status(self) -> int:
        return int(self.status_line[:3])

    # -- after the handler ---------------------------------------------------------------------------------------

    def conclude(self, body: bytes | None) -> None:
        """The response is complete: store it. ``body`` None: it was streamed."""
        if self.exchange.answered(self.status, self.headers, body):
            self.store()

    def _raised(self, error: BaseException) -> Iterable[bytes]:
        return self._answer_or_raise(self.failed(error), error)

    def _answer_or_raise(self, answer: Answer | None, error: BaseException) -> Iterable[bytes]:
        self.settle()  # the app has ended, perhaps because its own commit failed
        if answer is None:
            raise error
        return self._answer(self.exchange.instead or answer)

    # -- sending -------------------------------------------------------------------------------------------------

    def _send_start(self, headers: Headers) -> None:
        self.response_started = True
        self.start_response(self.status_line, [(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers])

    def _answer(self, answer: Answer) -> Iterable[bytes]:
        if self.dress is not None:
            answer = self.dress(self.environ, answer)
        self.status_line = status_line(answer.status)
        self._send_start(answer_headers(answer, self.exchange.key_header, self.exchange.record))
        return [answer.body]
