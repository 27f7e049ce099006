"""The app's response to a protected ASGI request, on the general way: in pieces, streamed, held, replaced, cut off.

``asgi_call.py`` calls the app, and takes the flat way with an ordinary response. Every other one comes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from oncekey.core.problems import Answer
from oncekey.engine.engine import Engine
from oncekey.engine.transactions import finishers
from oncekey.errors import OperatorError
from oncekey.web.asgi_scope import Message, Scope, Send, copy_route, messages, pass_on
from oncekey.web.endpoints import Endpoints
from oncekey.web.exchange import CUT_OFF, HELD, RUNNING, STORING, Exchange
from oncekey.web.responses import answer_headers

_RESPONSE = ("http.response.start", "http.response.body")


class AsgiResponse(Exchange):
    """What the app answers, and what becomes of it."""

    engine: Engine
    scope: Scope
    send: Send
    endpoints: Endpoints | None
    done: asyncio.Future[None]
    """The server's call awaits it while the app runs, and not the task: a server that cancels its call (a disconnect,
    an outer timeout) cancels only this future."""
    inner: Scope | None = None
    route_shown = False
    storing_over: asyncio.Event | None = None
    """Set when the storing is over, for an app that waits in ``receive``."""
    start: Message | None = None
    chunks: list[bytes] | None = None
    size = 0
    held: tuple[Message, ...] = ()
    """The response, while it waits for the app's return."""

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

    def _show_route(self) -> None:
        inner = self.inner
        if inner is None or self.route_shown:
            return
        self.route_shown = True
        copy_route(inner, self.scope)
