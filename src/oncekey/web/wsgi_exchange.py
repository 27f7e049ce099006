"""One protected WSGI request, from the reservation of its key to the end of its response.

``wsgi.py`` stands before it: it decides which requests are protected.
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
from oncekey.core.record import Record
from oncekey.core.routes import Route
from oncekey.core.states import Event
from oncekey.engine.keeper import Unfinished
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.engine.request import Request, allowed, not_async
from oncekey.errors import NotAuthenticated, NotAuthorized, OperatorError
from oncekey.web.endings import Move, answer_instead, answered, in_place_of, raised
from oncekey.web.exchange import Exchange as _Exchange
from oncekey.web.responses import (
    UNAVAILABLE_RETRY_SECONDS,
    Headers,
    answer_headers,
    body_length,
    first_headers,
    refusal,
)
from oncekey.web.wsgi_bodies import AppBody, Streamed
from oncekey.web.wsgi_environ import Environ, all_headers, header_lines, method_of, status_line

ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
StartResponse = Callable[..., Callable[[bytes], object]]
App = Callable[[Environ, StartResponse], Iterable[bytes]]
Dress = Callable[[Environ, Answer], Answer]

_NO_SUCCESS = (Event.DOUBT, Event.RELEASE, Event.FAIL)

ENVIRON_KEY = "oncekey.exchange"
"""The place of the exchange in the environ, for integrations inside of the middleware."""

_running: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("oncekey_exchange", default=None)


def exchange_of(environ: Environ) -> Exchange | None:
    """The protected request that runs here; also if middleware passed on a new environ."""
    exchange: Exchange | None = environ.get(ENVIRON_KEY)
    if exchange is None:
        exchange = _running.get()
        if exchange is not None and exchange.operation is not _current.get():
            return None  # a handler calls another app; that request is not part of its operation
    return exchange


class Middleware(Protocol):
    """What an exchange needs to know of its middleware."""

    app: App
    once: OnceKey
    covered: bool
    dress: Dress | None


class Exchange:
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
        self.covered = middleware.covered
        self.dress = middleware.dress
        self.exchange = _Exchange(self.once, route)
        self.policy = route.policy
        self.environ = environ
        self.start_response = start_response
        self.path = path
        self.operation: Operation
        self.concluded = False
        self.judged: tuple[Event, int | None]
        """Set at the end: the move, and the status that decided it; None: the app raised."""
        self.record: Record | None = None
        """Set at the end: the record as the store last returned it."""
        self.instead: Answer | None = None
        """Set at the end: the answer in place of the handler's response, if that was not stored."""
        self.uncommitted: Move | None = None
        """The move, while it is written in a transaction that the app must still commit
        (``enlist(commit="caller")``)."""
        self.started = False
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
            return self.app(environ, self.start_response)
        try:
            if (tenant := once.single_tenant) is None or once.authorize is not None:
                tenant = self._tenant(authorize=raw_key is not None)
        except (NotAuthenticated, NotAuthorized) as error:
            return self._answer(exchange.refuse_caller(error), None)
        length = body_length(environ.get("CONTENT_LENGTH"))
        refused = exchange.admit([] if raw_key is None else [raw_key.encode("latin-1")], length)
        if refused is not None:
            return self._answer(refused, None)
        body = self._read_body(length)
        if isinstance(body, Answer):
            return self._answer(body, None)
        query, content_type = environ.get("QUERY_STRING", "").encode("latin-1"), environ.get("CONTENT_TYPE") or None
        parts = (method_of(environ), self.path, query, content_type, body, partial(header_lines, environ))
        exchange.reserve(tenant, parts, header_lines(environ, self.policy.recipe.headers))
        try:
            decision = once.engine.run_blocking(exchange.begin(), self.policy.begin_seconds)
        except OperatorError:
            return self._answer(exchange.unavailable(), None)
        if not isinstance(decision, Execute):
            return self._answer(exchange.answer_to(decision), exchange.record)
        self.operation = exchange.execute(decision, covered=self.covered)
        return self._execute(body)

    def _tenant(self, *, authorize: bool) -> str:
        """The tenant of the request. Also asks ``authorize``, before the key is looked up."""
        once, environ = self.once, self.environ
        path = self.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # the app may print or send it
        request = Request(method_of(environ), path, environ, all_headers(environ))
        tenant: str = once.single_tenant or not_async(once.scope(request), "scope")  # type: ignore[operator]
        if authorize and once.authorize is not None:
            allowed(not_async(once.authorize(request, self.exchange.route.operation), "authorize"))
        return tenant

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
        self.once.engine.keeper.watch(self.operation)
        environ = dict(self.environ)
        environ.pop("HTTP_ACCEPT_ENCODING", None)  # bodies are stored uncompressed; compress outside of the middleware
        environ.pop("wsgi.file_wrapper", None)  # it would bypass the middleware, which must see the body
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        environ[ENVIRON_KEY] = self
        # The app runs in a context of its own, so that its variables do not leak into the thread's next request.
        context = contextvars.copy_context()
        context.run(_current.set, self.operation)
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
            if not self.operation.evidence.covered:
                self.operation.evidence.entered()
                self.operation.evidence.raised_with(exc_info[1], None)
            if self.started:
                raise exc_info[1].with_traceback(exc_info[2])
        int(status[:3])  # raise now for a malformed status, so that it counts as the app's error
        self.status_line = status
        self.headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        if self.whole_body is not None and not self.concluded and (body := self.whole_body(status)) is not None:
            self.conclude(self.status, self.headers, body)
        return self.written.append

    def _pass(self, parts: AppBody) -> Iterable[bytes]:
        """Consume the response, store it, and pass it on; a response that is too large to store passes through."""
        chunks, size = [], 0
        try:
            for chunk in parts:
                chunks.append(chunk)
                size += len(chunk)
                if self.instead is not None:
                    continue  # ``instead`` is sent, so drop the app's body
                if size > self.policy.max_response_bytes or self._is_event_stream():
                    return self._stream(chunks, parts)
            parts.close()
        except BaseException as error:
            answer = self.failed(error)  # before close(), which may raise too: the key must get its end
            parts.close()
            return self._answer_or_raise(answer, error)
        body = b"".join(chunks)
        if not self.concluded:
            if not self.status_line:
                return self._raised(EOFError("the app did not start a response"))
            self.conclude(self.status, self.headers, body)
        self.settle()
        event, status = self.judged
        if self.instead is None and status != self.status and self.status < 400 and event in _NO_SUCCESS:
            # Inner middleware turned the response into a success after the key had ended differently.
            self.instead = in_place_of(event, self.operation, self.once)
        if self.instead is not None:
            return self._answer(self.instead, self.record)
        headers = first_headers(
            self.operation, self.status, self.headers, len(body), self.exchange.key_header, self.record
        )
        self._send_start(headers)
        return [body]

    def _stream(self, chunks: list[bytes], rest: AppBody) -> Iterable[bytes]:
        record = self.record or self.operation.record
        self._send_start(
            first_headers(self.operation, self.status, self.headers, None, self.exchange.key_header, record)
        )
        return Streamed(self, chunks, rest)

    def _is_event_stream(self) -> bool:
        return any(n.lower() == b"content-type" and v.startswith(b"text/event-stream") for n, v in self.headers)

    @property
    def status(self) -> int:
        return int(self.status_line[:3])

    # -- after the handler ---------------------------------------------------------------------------------------

    def conclude(self, status: int, headers: Headers, body: bytes | None) -> None:
        """The response is complete: store it. Sets ``record`` and ``instead``."""
        move, instead = answered(self.operation, status, headers, body, self.once)
        self.judged = (move.event, status)
        self._finish(move)
        self.instead = self.instead or instead

    def failed(self, error: BaseException) -> Answer | None:
        """The handler raised. Returns oncekey's answer, or None if the exception must reach the server."""
        if self.concluded:
            return None
        move, answer = raised(self.operation, error, self.once)
        self.judged = (move.event, None)
        self._finish(move)
        return answer

    def _raised(self, error: BaseException) -> Iterable[bytes]:
        return self._answer_or_raise(self.failed(error), error)

    def _answer_or_raise(self, answer: Answer | None, error: BaseException) -> Iterable[bytes]:
        self.settle()  # the app has ended, perhaps because its own commit failed
        if answer is None:
            raise error
        return self._answer(self.instead or answer, self.record)

    def _finish(self, move: Move) -> None:
        self.concluded = True
        engine, operation = self.once.engine, self.operation
        try:
            flow = engine.finish(operation, move.event, move.response, move.reason)
            finished = engine.run_blocking(flow, self.policy.begin_seconds)
        except OperatorError:
            # The handler ran, and the store does not have the result. The keeper retries; the client must ask again.
            engine.adopt(Unfinished(operation, move.event, move.response, move.reason))
            self.record = operation.record
            self.instead = refusal(self.once, Situation.NOT_STORED, retry_after=UNAVAILABLE_RETRY_SECONDS)
            return
        except BaseException:
            # No code will end this attempt: let its lease run out, and release the gate for other writers.
            engine.keeper.unwatch(operation)
            if operation.enlisted is not None:
                operation.enlisted.release()
            raise
        if operation.enlisted is not None:
            self.uncommitted, self.record = move, finished.record
            return
        engine.keeper.unwatch(operation)
        if move.event is not Event.DISCARD:  # an unused key has no expiry to show
            self.record = finished.record
        if not finished.stored:
            self.instead = answer_instead(finished, self.operation, self.exchange.wanted, self.once)

    def settle(self) -> None:
        """The app has returned, so it has committed or never will: finish, and set ``instead`` if it has not."""
        move, self.uncommitted = self.uncommitted, None
        if move is not None:
            self._finish(move)

    # -- sending -------------------------------------------------------------------------------------------------

    def _send_start(self, headers: Headers) -> None:
        self.started = True
        self.start_response(self.status_line, [(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers])

    def _answer(self, answer: Answer, record: Record | None) -> Iterable[bytes]:
        if self.dress is not None:
            answer = self.dress(self.environ, answer)
        self.status_line = status_line(answer.status)
        self._send_start(answer_headers(answer, self.exchange.key_header, record))
        return [answer.body]
