"""The app's part of a protected ASGI request: calls the app in a task of its own, stores its end, and sends it.

From this call on, the work may have happened. So every end of the app (a response, an exception, a return without a
response, a timeout of its own) becomes a move of the key.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable
from typing import Final

from oncekey.core.evidence import SPEAKING_ERRORS
from oncekey.core.judgment import Move
from oncekey.core.problems import Answer
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.routes import Route
from oncekey.core.states import Effects, Event
from oncekey.core.swaps import End
from oncekey.engine.batching.ticket import whole
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.engine.transactions import finishers
from oncekey.errors import OperatorError
from oncekey.web.asgi_scope import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    copy_route,
    deliver,
    inner_scope,
    messages,
    pass_on,
)
from oncekey.web.endpoints import Endpoints
from oncekey.web.exchange import CUT_OFF, ENDED, HELD, RUNNING, STORING, Exchange
from oncekey.web.responses import BODILESS, answer_headers, http_date, kept_and_sent

_log = logging.getLogger("oncekey")

_COMPLETE: Final = Event.COMPLETE
_TRANSACTIONAL: Final = Effects.TRANSACTIONAL
_RESPONSE = ("http.response.start", "http.response.body")


class AsgiCall(Exchange):
    """One call of the app, from the reservation of its key to the end of its response."""

    stage = RUNNING
    inner: Scope | None = None
    route_shown = False
    body_read = False
    storing_over: asyncio.Event | None = None
    """Set when the storing is over, for an app that waits in ``receive``."""
    # of the app's response
    start: Message | None = None
    chunks: list[bytes] | None = None
    size = 0
    held: tuple[Message, ...] = ()
    """The response, while it waits for the app's return."""

    def __init__(
        self,
        app: App,
        once: OnceKey,
        route: Route,
        wanted: Reservation,
        operation: Operation,
        key_header: bytes | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: bytes,
        endpoints: Endpoints | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.app = app
        self.once = once
        self.engine = engine = once.engine
        self.route = route
        self.policy = route.policy
        self.wanted = wanted
        self.operation = operation
        self.key_header = key_header
        self.scope = scope
        self.receive = receive
        self.send = send
        self.body = body
        self.endpoints = endpoints
        self.loop = loop
        self.done: asyncio.Future[None] = loop.create_future()
        """The server's call awaits it while the app runs, and not the task: a server that cancels its call (a
        disconnect, an outer timeout) cancels only this future."""
        self.context = context = contextvars.copy_context()
        context.run(_current.set, operation)
        self.task = operation.task = loop.create_task(self._handle(self.done), context=context)
        engine.tasks.add(self.task)  # until _handle is done: the loop itself keeps only a weak reference
        engine.keeper.watch(operation)  # while the task lives

    def show_outside(self) -> None:
        """The server's call ends: show outer middleware what the app set, as it would see it without oncekey."""
        self._show_route()
        for variable, value in self.context.items():
            if variable is not _current and variable.get(None) is not value:
                variable.set(value)

    async def _handle(self, done: asyncio.Future[None]) -> None:
        """The handler's task: call the app, and end its request in every case."""
        try:
            try:
                self.inner = inner = inner_scope(self.scope, self.operation)
                await self.app(inner, self._inner_receive, self._inner_send)
            except BaseException as error:
                if not await self._app_raised(error):
                    raise
            else:
                if self.stage is not ENDED:
                    await self._app_returned()
        except BaseException as error:
            if done.done():
                if isinstance(error, Exception):
                    _log.error("a handler failed after its client had left", exc_info=error)
            else:
                done.set_exception(error if isinstance(error, Exception) else RuntimeError("the handler was cancelled"))
            if not isinstance(error, Exception):
                raise
        else:
            if not done.done():
                done.set_result(None)
        finally:
            if not done.done():  # in every case ``run`` must return
                done.set_exception(RuntimeError("the handler was cancelled"))
            if self.operation.enlisted is not None:
                self.operation.enlisted.release()  # in every case other requests must be able to write
            self.engine.tasks.discard(self.task)

    async def _app_returned(self) -> None:
        if self.stage is RUNNING:
            # The app returned without the end of its response, so its outcome is not known.
            self.raised(EOFError())
            await self._store_all()
            await self._replace()
        elif self.stage is HELD:
            await self._settle()

    async def _app_raised(self, error: BaseException) -> bool:
        """True: oncekey has answered this exception."""
        if self.stage is RUNNING and isinstance(error, Exception):
            await self._answer_by_app(error)
        if self.stage is not RUNNING:
            await self._settle()
            return False  # the response is already stored: a background task failed; the server logs it
        answer = self.raised(error)
        await self._store_all()
        self.instead = self.instead or answer
        await self._replace()
        return answer is not None

    async def _answer_by_app(self, error: Exception) -> None:
        """If the app has a handler for every exception, its response is judged and stored like any other.

        The framework would call that handler outside of this middleware, and could send a success that is not stored.
        """
        if self.endpoints is None or self.inner is None or self.streams or isinstance(error, SPEAKING_ERRORS):
            return
        response = await self.endpoints.answer_to_error(self.inner, error)
        if response is not None:
            status, send_response = response
            evidence = self.operation.evidence
            if not evidence.calls and status < 400:  # a dependency raised: do not judge it as middleware that answered
                evidence.entered()
                evidence.raised_with(error, None)
            await send_response(self.inner, self._inner_receive, self._inner_send)

    def _show_route(self) -> None:
        inner = self.inner
        if inner is None or self.route_shown:
            return
        self.route_shown = True
        copy_route(inner, self.scope)

    async def _inner_receive(self) -> Message:
        if not self.body_read:
            self.body_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        if self.stage in (RUNNING, STORING):
            # Hide a disconnect until the response is stored: an app that sees one stops its work.
            self.storing_over = self.storing_over or asyncio.Event()
            await self.storing_over.wait()
        if self.stage is HELD:
            return {"type": "http.disconnect"}  # the response waits for the app's return; no other message will come
        return await self.receive()

    # -- the app's response --------------------------------------------------------------------------------------

    async def _inner_send(self, message: Message) -> None:
        """The flat way: a start, and then the whole body in one message, which is stored and then sent."""
        kind = message["type"]
        start = self.start
        if self.stage is not RUNNING or self.streams:
            await self._leave_flat_way(kind, message)
            return
        if kind == "http.response.start":
            self.chunks, self.size = None, 0  # this response replaces one that was begun
            headers = message.get("headers", ())  # ASGI allows any iterable, and we read it more than once
            self.start = message if isinstance(headers, list) else {**message, "headers": list(headers)}
            return
        if kind != "http.response.body" or start is None or message.get("more_body"):
            await self._leave_flat_way(kind, message)
            return
        body: bytes = message.get("body", b"")
        if self.chunks is not None:
            body = b"".join((*self.chunks, body))
        status: int = start["status"]
        operation, policy, engine = self.operation, self.policy, self.engine
        evidence = operation.evidence
        if (
            not 200 <= status < 400
            or evidence.returned is None
            or evidence.returned >= 400
            or evidence.cause is not None
            or not operation.is_plain
            or policy.effects_kind is _TRANSACTIONAL
            or len(body) > policy.max_response_bytes
            or engine.closed
        ):
            await self._conclude(start, body)
            return
        kept, sent = kept_and_sent(start.get("headers", ()), policy)
        response, wanted = StoredResponse(status, tuple(kept), body), self.wanted
        end = End(wanted.scope, wanted.key, wanted.owner, response, operation)
        self.stage = STORING
        try:
            moved: float | Record | None = await engine.router.ask(end, self.loop, policy.begin_seconds)
        except BaseException as error:
            self.move, self.judged_status = Move(_COMPLETE, response, None), status
            self._storing_failed(error)
            if not isinstance(error, OperatorError):
                raise
            await self._replace()
            return
        if moved is None:  # not this owner's any more, or held by another transaction
            self.stage = RUNNING
            await self._conclude(start, body)
            return
        self.stage = ENDED
        if self.storing_over is not None:
            self.storing_over.set()
        engine.keeper.unwatch(operation)
        if engine.waiters or engine.emitter.wants_each():
            engine._finished(_COMPLETE, whole(end, moved), response, None)
        if status not in BODILESS:
            sent.append((b"content-length", b"%d" % len(body)))
        if self.key_header is not None:
            sent.append((b"idempotency-key", self.key_header))
        expires_at = moved.expires_at if isinstance(moved, Record) else moved + wanted.retention_seconds
        sent.append((b"idempotency-expires", http_date(int(expires_at))))
        self._show_route()
        if not self.done.done():  # otherwise the server's call has ended; hide that from the app
            await deliver(self.send, status, sent, body)

    async def _leave_flat_way(self, kind: str, message: Message) -> None:
        """Every message that is not of a whole response: a part of a body, what follows after the end was judged, and
        what is no part of a response."""
        start = self.start
        if self.stage is CUT_OFF:
            if kind == "http.response.start":
                self.answer_cut_off()
                await self._replace()
        elif self.stage is not RUNNING and kind in _RESPONSE:
            pass  # only the stored response is sent, so drop a second one
        elif kind == "http.response.start":
            raise RuntimeError("a second response was started, and a part of the first is with the client already")
        elif kind == "http.response.body" and start is not None and not self.streams:
            await self._collect(start, message.get("body", b""))
        elif kind == "http.response.body" and start is not None:
            if not message.get("more_body"):
                await self._conclude(start, None)
            await self._pass_on(message)
        else:
            await self._pass_on(message)

    async def _collect(self, start: Message, chunk: bytes) -> None:
        """A part of the body. If the response cannot be stored, it passes through from here on."""
        if self.chunks is None:
            self.chunks = []
        self.chunks.append(chunk)
        self.size += len(chunk)
        headers = start.get("headers", ())
        if self.cannot_store(self.size, headers):
            sent = self.stream(start["status"], headers)
            await self._pass_on({"type": "http.response.start", "status": start["status"], "headers": sent})
            await self._pass_on({"type": "http.response.body", "body": b"".join(self.chunks), "more_body": True})
            self.chunks = None

    async def _conclude(self, start: Message, body: bytes | None) -> None:
        """The response is complete: store it, then send it. ``body`` None: it was streamed."""
        status: int = start["status"]
        headers = start.get("headers", ())
        self._check_route()
        if self.answered(status, headers, body):
            await self._store()
        elif self.storing_over is not None:
            self.storing_over.set()
        if body is None:
            self.check_stream()
        elif self.instead is None:
            await self._pass_on(*messages(status, self.first_headers(status, headers, len(body)), body))
        elif self.stage is not HELD:
            await self._replace()

    def _check_route(self) -> None:
        """The endpoint of a route that was added after the wrapping does not report: 0 calls prove nothing for it."""
        evidence = self.operation.evidence
        if evidence.covered and not evidence.calls and self.endpoints is not None and self.inner is not None:
            evidence.covered = self.endpoints.knows_route(self.inner)

    # -- storing -------------------------------------------------------------------------------------------------

    async def _store(self) -> None:
        engine = self.engine
        seconds = self.policy.begin_seconds
        plain = self.operation.enlisted is None
        self.start_storing()
        try:
            if plain:
                finished = await engine.run(self.finish(), seconds)
            else:
                finished = await finishers.run(engine, self.unfinished(), seconds)
            self.finished(finished)
        except BaseException as error:
            self._storing_failed(error, adopt=plain)
            if not isinstance(error, OperatorError):
                raise
        finally:
            if self.storing_over is not None:
                self.storing_over.set()

    def _storing_failed(self, error: BaseException, *, adopt: bool = True) -> None:
        try:
            if isinstance(error, OperatorError):
                self.not_stored()
            elif isinstance(error, asyncio.CancelledError):
                # The app's own timeout around its sending cancelled this. The outcome must not be lost.
                self.cut_off(adopt=adopt)
        finally:
            if self.stage is STORING:
                self.abandon()
            if self.storing_over is not None:
                self.storing_over.set()

    async def _store_all(self) -> None:
        """``_store`` after the app has ended. A transaction that the app had to commit has ended too."""
        await self._store()
        while self.stage is HELD:
            await self._store()

    async def _settle(self) -> None:
        """The app has returned, so it has committed or never will: send the held response, or what the key says."""
        if self.stage is HELD:
            await self._store_all()
            if self.instead is None:
                await self._pass_on(*self.held)
            else:
                await self._replace()

    # -- sending -------------------------------------------------------------------------------------------------

    async def _replace(self) -> None:
        """Send ``instead``, if there is one and the app's response has not begun to stream."""
        if self.instead is not None and not self.streams:
            await self._answer(self.instead)

    def _answer(self, answer: Answer) -> Awaitable[None]:
        headers = answer_headers(answer, self.key_header, self.record)
        return self._pass_on(*messages(answer.status, headers, answer.body))

    async def _pass_on(self, *parts: Message) -> None:
        self._show_route()
        if self.stage is HELD:
            self.held += parts
        elif not self.done.done():  # otherwise the server's call has ended; hide that from the app
            await pass_on(self.send, *parts)
