"""The app's part of a protected ASGI request: calls the app in its own task, stores how it ended, sends the response.

From this call on, the work may have happened. So every end of the app (a response, an exception, a return without a
response, a timeout of its own) becomes a move of the key.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Final

from oncekey.core.judgment import Move
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.routes import Route
from oncekey.core.states import Effects, Event
from oncekey.core.swaps import End
from oncekey.engine.batching.ticket import whole
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.errors import OperatorError
from oncekey.web.asgi_response import AsgiResponse
from oncekey.web.asgi_scope import App, Message, Receive, Scope, Send, client_left, copy_route, inner_scope
from oncekey.web.endpoints import Endpoints
from oncekey.web.exchange import ENDED, HELD, RUNNING, STORING
from oncekey.web.responses import BODILESS, content_length, expires, kept_and_sent

_log = logging.getLogger("oncekey")

_COMPLETE: Final = Event.COMPLETE
_TRANSACTIONAL: Final = Effects.TRANSACTIONAL


class AsgiCall(AsgiResponse):
    """One call of the app, from the reservation of its key to the end of its response."""

    stage = RUNNING
    encodings = True
    """The request may have an ``Accept-Encoding``, which the app must not see."""
    reports = True
    """The log or the app's hook may take the event that the key is completed."""
    body_read = False

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
        self.context = context = contextvars.copy_context()
        context.run(engine.enter, operation)
        self.task = operation.task = loop.create_task(self._handle(self.done), context=context)
        engine.tasks.add(self.task)  # until _handle is done: the loop itself keeps only a weak reference
        engine.keeper.watch(operation)  # while the task lives

    def show_outside(self) -> None:
        """The server's call ends: show outer middleware what the app set, as it would see it without oncekey."""
        if not self.route_shown:
            self._show_route()
        if len(self.context) > 1:  # more than the operation
            for variable, value in self.context.items():
                if variable is not _current and variable.get(None) is not value:
                    variable.set(value)

    async def _handle(self, done: asyncio.Future[None]) -> None:
        """The handler's task: call the app, and end its request in every case."""
        try:
            try:
                self.inner = inner = inner_scope(self.scope, self.operation, encodings=self.encodings)
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
        evidence = self.operation.evidence
        if self.endpoints is None or self.inner is None or self.streams or evidence.speaks(error):
            return
        response = await self.endpoints.answer_to_error(self.inner, error)
        if response is not None:
            status, send_response = response
            if not evidence.calls and status < 400:  # a dependency raised: do not judge it as middleware that answered
                evidence.entered()
                evidence.raised_with(error, None)
            await send_response(self.inner, self._inner_receive, self._inner_send)

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
        if engine.waiters or self.reports:
            engine._finished(_COMPLETE, whole(end, moved), response, None)
        if status not in BODILESS:
            sent.append(content_length(len(body)))
        if self.key_header is not None:
            sent.append((b"idempotency-key", self.key_header))
        expires_at = moved.expires_at if isinstance(moved, Record) else moved + wanted.retention_seconds
        sent.append(expires(int(expires_at)))
        if self.inner is not None and not self.route_shown:
            self.route_shown = True
            copy_route(self.inner, self.scope)
        if self.done.done():
            return  # the server's call has ended; hide that from the app
        try:
            await self.send({"type": "http.response.start", "status": status, "headers": sent})
            await self.send({"type": "http.response.body", "body": body, "more_body": False})
        except OSError:
            client_left()
