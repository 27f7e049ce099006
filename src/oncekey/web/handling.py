"""A protected ASGI request that owns its key: calls the app, stores its response, and then sends it.

``asgi.py`` reads the request and asks the store before that. From here on the work may have happened, so every end of
the app (a response, an exception, a return without a response, a timeout of its own) becomes a move of the key.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from oncekey.core.evidence import SPEAKING_ERRORS
from oncekey.core.problems import Answer, Situation
from oncekey.core.record import Record, Reservation
from oncekey.core.states import Event
from oncekey.engine.keeper import Unfinished
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.engine.transactions import completion
from oncekey.errors import OperatorError
from oncekey.web.asgi_scope import SCOPE_KEY, Message, Receive, Scope, Send, is_event_stream
from oncekey.web.declared import Handler, Only
from oncekey.web.endings import Move, answer_instead, answered, raised
from oncekey.web.responses import Headers, answer_headers, first_headers, refusal

_log = logging.getLogger("oncekey")

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_RESPONSE = ("http.response.start", "http.response.body")

_ROUTED = ("route", "endpoint", "path_params", "router")
"""What a router writes into its ASGI scope. Outer middleware, such as metrics, reads it from the outer scope."""

# Extensions that bypass body messages, which oncekey must see. Without them, frameworks send the body as messages.
_BYPASSES = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class Endpoints(Protocol):
    """The endpoints behind the middleware, as a framework's module finds and wraps them."""

    def cover(self) -> bool:
        """Wrap new endpoints. True: all endpoints are wrapped, so a request without a report entered none."""

    def knows_route(self, scope: Scope) -> bool:
        """Whether the route that matched this request was wrapped."""

    def handler(self, scope: Scope) -> Handler | None:
        """The handler that the app's router will find for this request."""

    def check(self, scope: Scope, once: OnceKey, only: Only | None) -> None:
        """Check what the handlers declare (``check_declarations``)."""

    async def answer_to_error(self, scope: Scope, error: Exception) -> tuple[int, App] | None:
        """The response of the app's handler for every exception: its status, and an app that sends it. None: the app
        has no such handler."""


class Handling:
    """One call of the app, from the reservation of its key to the end of its response."""

    task: asyncio.Task[None]
    inner: Scope | None = None
    route_shown = False
    body_read = False
    # of the app's response
    start: Message | None = None
    size = 0
    streaming = False
    concluded = False
    settled = False
    stored: asyncio.Event | None = None
    move: Move
    cut_off = False
    """The app's own timeout cancelled the sending while oncekey stored the response."""
    told = False
    """After ``cut_off``: the client got the answer "not stored"."""
    held: list[Message] | None = None
    """The response, while it waits for the app's return: the app must still commit (``enlist(commit="caller")``), or
    middleware answered while the handler still runs."""

    def __init__(
        self,
        app: App,
        once: OnceKey,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        operation: Operation,
        wanted: Reservation,
        body: bytes,
        key_header: bytes,
        endpoints: Endpoints | None,
    ) -> None:
        self.app = app
        self.once = once
        self.policy = operation.policy
        self.scope = scope
        self.receive = receive
        self.send = send
        self.operation = operation
        self.wanted = wanted
        self.body = body
        self.key_header = key_header
        self.endpoints = endpoints
        self.chunks: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """``run`` awaits it while the app runs. An outer timeout or a disconnect ends it before the app ends."""

    async def run(self) -> None:
        """Return when the response has been sent. If the caller is cancelled, the app continues."""
        engine = self.once.engine
        context = contextvars.copy_context()
        context.run(_current.set, self.operation)
        task = asyncio.get_running_loop().create_task(self._handle(self.done), context=context)
        self.task = self.operation.task = task
        engine.tasks.add(task)  # until _handle is done: the loop itself keeps only a weak reference
        engine.keeper.watch(self.operation)  # while the task lives
        # Await a future, not the task: a server that cancels this coroutine (a disconnect) cancels only the future.
        try:
            await self.done
        finally:
            self._show_route()
            _adopt(context)

    async def _handle(self, done: asyncio.Future[None]) -> None:
        try:
            await self._call_app()
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
            self.once.engine.tasks.discard(self.task)

    async def _call_app(self) -> None:
        try:
            self.inner = inner = self._inner_scope()
            await self.app(inner, self._inner_receive, self._inner_send)
        except BaseException as error:
            if not self.concluded and isinstance(error, Exception):
                await self._answer_by_app(error)
            if self.concluded:
                if self.held is not None:
                    await self._settle(self.held)
                raise  # the response is already stored: a background task failed; the server logs it
            move, answer = raised(self.operation, error, self.once)
            record = await self._finish_ended(move)
            if answer is None:
                raise
            if not isinstance(record, Answer) and not self.streaming:
                await self._answer(answer, record)
        else:
            if self.concluded:
                if self.held is not None:
                    await self._settle(self.held)
                return
            # The app returned without the end of its response, so its outcome is not known.
            await self._finish_ended(raised(self.operation, EOFError(), self.once)[0])

    async def _answer_by_app(self, error: Exception) -> None:
        """If the app has a handler for every exception, its response is judged and stored like any other.

        The framework would call that handler outside of this middleware, and could send a success that is not stored.
        """
        if self.endpoints is None or self.streaming or self.inner is None or isinstance(error, SPEAKING_ERRORS):
            return
        response = await self.endpoints.answer_to_error(self.inner, error)
        if response is not None:
            status, send_response = response
            evidence = self.operation.evidence
            if not evidence.calls and status < 400:  # a dependency raised: do not judge it as middleware that answered
                evidence.entered()
                evidence.raised_with(error, None)
            await send_response(self.inner, self._inner_receive, self._inner_send)

    def _inner_scope(self) -> Scope:
        """The app's ASGI scope: with the operation, without extensions that bypass the body, and without
        accept-encoding, because bodies are stored uncompressed (compress outside of this middleware)."""
        scope = dict(self.scope)
        scope[SCOPE_KEY] = self.operation
        scope["headers"] = [item for item in self.scope["headers"] if item[0] != b"accept-encoding"]
        if extensions := scope.get("extensions"):
            scope["extensions"] = {name: value for name, value in extensions.items() if name not in _BYPASSES}
        return scope

    def _show_route(self) -> None:
        inner = self.inner
        if inner is None or self.route_shown:
            return
        self.route_shown = True
        for name in _ROUTED:
            if name in inner:
                self.scope[name] = inner[name]

    async def _inner_receive(self) -> Message:
        if not self.body_read:
            self.body_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        if not self.settled and self.held is None:
            # Hide a disconnect until the response is stored: an app that sees one stops its work.
            self.stored = self.stored or asyncio.Event()
            await self.stored.wait()
        if self.held is not None:
            return {"type": "http.disconnect"}  # the response waits for the app's return; no other message will come
        return await self.receive()

    async def _inner_send(self, message: Message) -> None:
        kind = message["type"]
        if self.cut_off:
            if kind == "http.response.start" and not self.told:
                self.told = True
                await self._instead(refusal(self.once, Situation.NOT_STORED, retry_after=1.0), self.operation.record)
        elif self.concluded and kind in _RESPONSE:
            pass  # only the stored response is sent, so drop a second one
        elif kind == "http.response.start":
            if self.streaming:
                raise RuntimeError("a second response was started, and a part of the first is with the client already")
            self.chunks, self.size = [], 0  # this response replaces one that was begun
            headers = message.get("headers", ())  # ASGI allows any iterable, and we read it more than once
            self.start = message if isinstance(headers, list) else {**message, "headers": list(headers)}
        elif kind == "http.response.body" and self.start is not None:
            await self._body(message, self.start)
        else:
            await self._pass_on(message)

    async def _body(self, message: Message, start: Message) -> None:
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if self.streaming:
            if not more:
                await self._conclude(start, None)
            await self._pass_on({"type": "http.response.body", "body": body, "more_body": more})
            return
        self.size += len(body)
        if body or not self.chunks:
            self.chunks.append(body)
        if not more:
            await self._conclude(start, self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks))
        elif self.size > self.policy.max_response_bytes or is_event_stream(start):
            # Too large to store, or an event stream: it passes through, and the key becomes a tombstone. The last
            # message still waits for the store, so a client that has seen the end knows that the key is completed.
            self.streaming = True
            record = self.operation.record
            headers = first_headers(
                self.operation, start["status"], start.get("headers", ()), None, self.key_header, record
            )
            await self._pass_on({"type": "http.response.start", "status": start["status"], "headers": headers})
            await self._pass_on({"type": "http.response.body", "body": b"".join(self.chunks), "more_body": True})
            self.chunks = []

    # -- after the handler ---------------------------------------------------------------------------------------

    async def _conclude(self, start: Message, body: bytes | None) -> None:
        """The response is complete: store it, then send it."""
        status: int = start["status"]
        raw_headers = start.get("headers", ())
        self._check_route()
        move, instead = answered(self.operation, status, raw_headers, body, self.once)
        record: Record | Answer | None = None
        if self.operation.enlisted is not None and self.operation.evidence.running:
            # Middleware answered while the endpoint still runs with its transaction open. After a rollback now, the
            # endpoint could begin another transaction and commit it. So the answer waits for the app's return.
            self.concluded, self.move, self.held = True, move, []
            if self.stored is not None:
                self.stored.set()
        else:
            record = await self._finish(move)
        if isinstance(record, Answer) or (instead is not None and self.streaming):
            if self.streaming:
                raise RuntimeError("the response could not be stored: its end is withheld, so that the client retries")
            return
        if instead is not None:
            await self._answer(instead, record)
            return
        if self.streaming or body is None:
            return
        headers = first_headers(self.operation, status, raw_headers, len(body), self.key_header, record)
        await self._pass_on(*messages(status, headers, body))

    def _check_route(self) -> None:
        """The endpoint of a route that was added after the wrapping does not report: 0 calls prove nothing for it."""
        evidence = self.operation.evidence
        if evidence.covered and not evidence.calls and self.endpoints is not None and self.inner is not None:
            evidence.covered = self.endpoints.knows_route(self.inner)

    async def _finish(self, move: Move) -> Record | Answer | None:
        """Make the owner's move. An Answer means that it failed: the client got that answer."""
        self.concluded = True
        engine, operation = self.once.engine, self.operation
        plain = operation.enlisted is None
        try:
            if plain:
                flow = engine.finish(operation, move.event, move.response, move.reason)
                finished = await engine.run(flow, self.policy.begin_seconds)
            else:
                item = Unfinished(operation, move.event, move.response, move.reason)
                finished = await completion.run(engine, item, self.policy.begin_seconds)
        except OperatorError:
            # The handler ran, and the store does not have the result. The keeper retries; the client must ask again.
            engine.adopt(Unfinished(operation, move.event, move.response, move.reason))
            return await self._instead(refusal(self.once, Situation.NOT_STORED, retry_after=1.0), operation.record)
        except asyncio.CancelledError:
            # The app's own timeout around its sending cancelled this. The outcome must not be lost.
            self.cut_off = True
            if plain:
                engine.keeper.adopt(Unfinished(operation, move.event, move.response, move.reason))
            raise
        finally:
            self.settled = True
            if self.stored is not None:
                self.stored.set()
        if operation.enlisted is not None:  # written, and the app must still commit it
            self.move, self.held = move, []
            return finished.record
        engine.keeper.unwatch(operation)
        if finished.stored:
            return finished.record if move.event is not Event.DISCARD else None  # an unused key has no expiry to show
        answer = answer_instead(finished, self.operation, self.wanted, self.once)
        return await self._instead(answer, finished.record)

    async def _finish_ended(self, move: Move) -> Record | Answer | None:
        """``_finish`` after the app has ended. A transaction that the app had to commit has ended too."""
        record = await self._finish(move)
        if self.held is not None:
            self.held = None
            record = await self._finish(move)
        return record

    async def _settle(self, held: list[Message]) -> None:
        """The app has returned, so it has committed or never will: send the held response, or what the key says."""
        self.held = None
        answer = await self._finish(self.move)
        if not isinstance(answer, Answer):
            for message in held:
                await self._pass_on(message)

    async def _instead(self, answer: Answer, record: Record | None) -> Answer:
        if not self.streaming:
            await self._answer(answer, record)
        return answer

    # -- sending -------------------------------------------------------------------------------------------------

    def _answer(self, answer: Answer, record: Record | None) -> Awaitable[None]:
        return self._pass_on(*messages(answer.status, answer_headers(answer, self.key_header, record), answer.body))

    async def _pass_on(self, *parts: Message) -> None:
        self._show_route()
        if self.held is not None:
            self.held += parts
        elif not self.done.done():  # otherwise the server's call has ended; hide that from the app
            await deliver(self.send, *parts)


def _adopt(context: contextvars.Context) -> None:
    """Copy context variables that the handler set, so that outer middleware reads them, as it would without oncekey."""
    for variable, value in context.items():
        if variable is not _current and variable.get(None) is not value:
            variable.set(value)


async def deliver(send: Send, *parts: Message) -> None:
    try:
        for message in parts:
            await send(message)
    except OSError:
        # The client is gone. The response is stored, and the app must not see the error.
        _log.debug("the client left before its response was sent")


def messages(status: int, headers: Headers, body: bytes) -> tuple[Message, Message]:
    return (
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body, "more_body": False},
    )
