"""One protected request inside of Django, from the reservation of its key to the end of its response.

``exchange.py`` decides what becomes of it, as in every framework. :class:`Call` reads the request and judges the
response; :class:`SyncCall` waits in the thread of a WSGI server. ``async_calls.py`` has the other one.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from oncekey.core.decision import Decision, Execute
from oncekey.core.problems import Answer
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.engine.request import allowed
from oncekey.errors import NoOperation, NotAuthenticated, NotAuthorized, OperatorError
from oncekey.web import admission
from oncekey.web.blocking_end import BlockingEnd
from oncekey.web.django.app_functions import logged
from oncekey.web.django.messages import (
    MARK,
    answer_of_app,
    headers_of,
    parts_of,
    plain_request,
    read_body,
    response_of,
    set_headers,
    uncompressed,
)
from oncekey.web.django.set_aside import set_aside
from oncekey.web.exchange import READING, RUNNING, Exchange
from oncekey.web.responses import body_length
from oncekey.web.wsgi_bodies import AppBody, Streamed
from oncekey.web.wsgi_environ import header_lines

GetResponse = Callable[[HttpRequest], Any]


def too_late() -> NoOperation:
    return NoOperation(
        "middleware has answered this request before its view was entered, so the view is not called: a retry of the "
        "request may run. Leave time for the threads of that middleware"
    )


def _is_thread(number: int) -> bool:
    return number == threading.get_ident()


class Call:
    """What sync and async requests share. Nothing here waits."""

    answer: Answer | None = None
    """oncekey's own answer, if the view found it (``begin_in_view``)."""
    body: bytes | None = None
    inside = False
    """The middleware and the view below oncekey run."""
    in_its_thread: Callable[[], bool] | None = None
    """Tells whether this thread ends the request."""

    def __init__(self, once: OnceKey, route: Route, request: HttpRequest, method: str) -> None:
        self.once = once
        self.exchange = Exchange(once, route)
        self.policy = route.policy
        self.request = request
        self.method = method
        self.raw_key: str | None = request.META.get("HTTP_IDEMPOTENCY_KEY")
        setattr(request, MARK, self)

    @property
    def waiting(self) -> bool:
        """The key was not asked for yet, or this request did not get it."""
        return self.exchange.stage is READING

    def read(self) -> Answer | None:
        """Read the body, once. Returns the answer that refuses it."""
        if self.body is not None:
            return None
        body = read_body(self.request, self.exchange)
        if isinstance(body, Answer):
            return body
        self.body = body
        return None

    def admit(self) -> Answer | None:
        """Check the key and the body. Returns the answer that refuses them."""
        length = body_length(self.request.META.get("CONTENT_LENGTH"))
        refused = self.exchange.admit(self._keys, length) or self.read()
        if refused is None and self.policy.guarded:
            refused = admission.check(self.exchange, plain_request(self.request, self.method), self.body or b"")
        return refused

    def read_for_view(self) -> Answer | None:
        """Read the body before the view authenticates its caller. A view may read the body itself."""
        refused = self.read()
        if refused is not None:
            self.exchange.admit(self._keys, None)  # only so that the answer repeats the key
        return refused

    @property
    def _keys(self) -> list[bytes]:
        return [] if self.raw_key is None else [self.raw_key.encode("latin-1", "replace")]

    def reserve(self, tenant: str) -> None:
        parts = parts_of(self.request, self.method, self.body or b"")
        self.exchange.reserve(tenant, parts, header_lines(self.request.META, self.policy.recipe.headers))

    @property
    def asks_app(self) -> bool:
        """Whether the app's scope or authorize function must be called. The sender of a webhook has a scope of its
        own."""
        once = self.once
        return self.policy.sender is None and (once.single_tenant is None or once.authorize is not None)

    def logs(self, which: str) -> AbstractContextManager[None]:
        """Around a call of the app's own function."""
        return logged(self.once, self.exchange.route.operation, which)

    @property
    def asks_to_authorize(self) -> bool:
        return self.once.authorize is not None and (self.raw_key is not None or self.policy.key_from is not None)

    @property
    def known_tenant(self) -> str:
        """The tenant, if the app need not be asked."""
        policy = self.policy
        return (self.once.single_tenant if policy.sender is None else policy.sender_scope) or ""

    # -- the blocking way, also for a view that begins its request itself ----------------------------------------

    def begin_blocking(self) -> Answer | None:
        """Ask for the key. None: this request has it, and ``execute`` follows. Otherwise oncekey's answer."""
        exchange = self.exchange
        try:
            tenant = self._tenant()
        except (NotAuthenticated, NotAuthorized) as error:
            return exchange.refuse_caller(error)
        if (refused := self.admit()) is not None:
            return refused
        if self.policy.bind is not None:
            try:
                with self.logs("bind"):
                    exchange.bound_to = answer_of_app(self.request, self.policy.bind(self.request), "bind")
            except (NotAuthenticated, NotAuthorized) as error:
                return exchange.refuse_caller(error)
        self.reserve(tenant)
        try:
            with set_aside(self.once.engine):
                decision = self.once.engine.run_blocking(exchange.begin(), self.policy.begin_seconds)
        except OperatorError:
            return exchange.unavailable()
        return self.decided(decision)

    def decided(self, decision: Decision, loop: Any = None) -> Answer | None:
        if not isinstance(decision, Execute):
            return self.exchange.answer_to(decision)
        self.exchange.execute(decision, covered=True, loop=loop)
        return None

    def begin_in_view(self) -> bool:
        """As ``begin_blocking``, inside of a view that authenticates its caller itself. False: ``answer`` is sent."""
        if not self.waiting:
            return True  # middleware calls the view once more
        self.answer = self.begin_blocking()
        if self.answer is not None:
            return False
        self.started()
        if not self.inside:  # its lease ends the key
            raise too_late()
        return True

    def started(self) -> None:
        """The request has its key: from here on, ``current()`` is its operation."""
        operation = self.exchange.operation
        operation.in_its_thread = self.in_its_thread
        self.once.engine.keeper.watch(operation)
        self.once.engine.enter(operation)

    # -- views, in any thread ------------------------------------------------------------------------------------

    @property
    def is_elsewhere(self) -> bool:
        """Whether middleware calls the view in another thread than that of the request."""
        return self.in_its_thread is not None and not self.in_its_thread()

    def enter_view(self) -> Operation | None:
        """Report that the view is entered, and return its operation; None: the view asks for its key itself.

        Middleware with a timeout may answer before a thread of its own enters the view. Then the key is settled, or
        unused, and a retry may run: the view must not. So ``inside`` is read after the report, and is
        cleared before the reports are judged.
        """
        operation = None if self.waiting else self.exchange.operation
        if operation is not None:
            operation.evidence.entered()
        if self.inside:
            return operation
        error = too_late()
        if operation is not None:
            operation.evidence.raised_with(error, None)
        raise error

    def _tenant(self) -> str:
        once, request = self.once, self.request
        if not self.asks_app:
            return self.known_tenant
        with self.logs("scope"):
            tenant: str = once.single_tenant or answer_of_app(request, once.scope(request), "scope")  # type: ignore[operator, arg-type]
        if self.asks_to_authorize:
            authorize: Any = once.authorize
            with self.logs("authorize"):
                allowed(answer_of_app(request, authorize(request, self.exchange.route.operation), "authorize"))
        return tenant

    @contextmanager
    def below(self) -> Iterator[None]:
        """Around what runs below oncekey."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    # -- responses -----------------------------------------------------------------------------------------------

    def respond(self, answer: Answer) -> HttpResponseBase:
        return response_of(answer, self.exchange)

    def sent(self, response: HttpResponseBase, size: int | None) -> HttpResponseBase:
        """The app's response with oncekey's headers; or what the client gets in its place."""
        exchange = self.exchange
        if exchange.instead is not None:
            response.close()
            return self.respond(exchange.instead)
        status = response.status_code
        if size is not None:
            set_headers(response, exchange.first_headers(status, headers_of(response), size))
        return response


class SyncCall(BlockingEnd, Call):
    """A request in the thread of a WSGI server. It blocks on the lanes."""

    def run(self, get_response: GetResponse) -> HttpResponseBase:
        self.in_its_thread = partial(_is_thread, threading.get_ident())
        if (refused := self.begin_blocking()) is not None:
            return self.respond(refused)
        before = _current.get()
        self.started()
        return self._run(get_response, before)

    def run_until_view(self, get_response: GetResponse) -> HttpResponseBase:
        """The view begins the request, after it has authenticated its caller (``oncekey.web.drf``)."""
        self.in_its_thread = partial(_is_thread, threading.get_ident())
        if (refused := self.read_for_view()) is not None:
            return self.respond(refused)
        return self._run(get_response, _current.get())

    def _run(self, get_response: GetResponse, before: Any) -> HttpResponseBase:
        try:
            with uncompressed(self.request), self.below():
                response: HttpResponseBase = get_response(self.request)
            return self._ended(response)
        except BaseException as error:
            if self.waiting:
                raise
            answer = self.failed(error)
            self.settle()
            if answer is None:
                raise
            return self.respond(self.exchange.instead or answer)
        finally:
            _current.set(before)

    def _ended(self, response: HttpResponseBase) -> HttpResponseBase:
        if self.answer is not None:
            response.close()
            return self.respond(self.answer)
        if self.exchange.stage is not RUNNING:  # refused before the key was asked for, by authentication
            return response
        if response.streaming:
            return self._streamed(response)
        body: bytes = response.content  # type: ignore[attr-defined]
        self._conclude(response, body)
        return self.sent(response, len(body))

    def _streamed(self, response: Any) -> HttpResponseBase:
        exchange, headers = self.exchange, headers_of(response)
        self._status, self._headers = response.status_code, headers
        response.file_to_stream = None  # the server's file wrapper would bypass the middleware, which must see the body
        pieces = AppBody(iter(response), contextvars.copy_context(), [])
        chunks, size = [], 0
        for chunk in pieces:
            chunks.append(chunk)
            size += len(chunk)
            if exchange.cannot_store(size, headers):
                set_headers(response, exchange.stream(response.status_code, headers))
                response.streaming_content = Streamed(self, chunks, pieces)  # type: ignore[arg-type]
                return response  # type: ignore[no-any-return]
        response.streaming_content = [body := b"".join(chunks)]
        self._conclude(response, body)
        return self.sent(response, len(body))

    def _conclude(self, response: HttpResponseBase, body: bytes) -> None:
        self._status, self._headers = response.status_code, headers_of(response)
        self.conclude(body)
        self.settle()

    # -- storing, also for ``Streamed`` --------------------------------------------------------------------------

    def conclude(self, body: bytes | None) -> None:
        """The response is complete: store it. ``body`` None: it was streamed."""
        if self.exchange.answered(self._status, self._headers, body):
            self.store()
