"""One protected request under ASGI: the app runs in a task of its own, and a disconnect changes nothing.

Django cancels a request whose client disconnects. The task of the app is not cancelled by that, and Django waits for
it: the view and the storing end as if the client were still there.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.http import HttpResponse
from django.http.response import HttpResponseBase

from oncekey.core.problems import Answer
from oncekey.engine.operation import _current
from oncekey.engine.request import allowed
from oncekey.engine.transactions import finishers
from oncekey.engine.transactions.adapters.django_checks import thread_of_request
from oncekey.errors import NotAuthenticated, NotAuthorized, OperatorError
from oncekey.web.asgi_shell import LARGE_BODY_BYTES
from oncekey.web.django.calls import Call, GetResponse
from oncekey.web.django.messages import headers_of, set_headers, uncompressed
from oncekey.web.endpoints import is_coroutine_function
from oncekey.web.exchange import HELD, RUNNING, STORING
from oncekey.web.responses import Headers

_log = logging.getLogger("oncekey")

_END = object()


class AsyncCall(Call):
    """A request in an event loop."""

    in_view = False
    """The view begins the request, after it has authenticated its caller (``oncekey.web.drf``)."""

    async def run(self, get_response: GetResponse) -> HttpResponseBase:
        refused = self.read_for_view() if self.in_view else await self._begin()
        if refused is not None:
            return self.respond(refused)
        loop, engine = asyncio.get_running_loop(), self.once.engine
        self._context = context = contextvars.copy_context()
        task = loop.create_task(self._handle(get_response), context=context)
        if not self.in_view:
            self.exchange.operation.task = task  # type: ignore[assignment]
        engine.tasks.add(task)  # type: ignore[arg-type]
        task.add_done_callback(engine.tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])  # Django ends the request next: it must not close what the view uses
            _log_failure(task)
            raise
        finally:
            self._show_outside()

    def _show_outside(self) -> None:
        """Show outer middleware the context variables that the app set, as it would see them without oncekey."""
        for variable, value in self._context.items():
            if variable is not _current and variable.get(None) is not value:
                variable.set(value)

    async def _begin(self) -> Answer | None:
        exchange = self.exchange
        try:
            tenant = await self._tenant_async()
        except (NotAuthenticated, NotAuthorized) as error:
            return exchange.refuse_caller(error)
        if (refused := self.admit()) is not None:
            return refused
        if self.policy.bind is not None:
            try:
                with self.logs("bind"):
                    exchange.bound_to = await self._ask(self.policy.bind, self.request)
            except (NotAuthenticated, NotAuthorized) as error:
                return exchange.refuse_caller(error)
        if len(self.body or b"") > LARGE_BODY_BYTES:  # hashing it takes milliseconds: do not block the event loop
            await asyncio.to_thread(self.reserve, tenant)
        else:
            self.reserve(tenant)
        try:
            decision = await self.once.engine.run(exchange.begin(), self.policy.begin_seconds)
        except OperatorError:
            return exchange.unavailable()
        return self.decided(decision, asyncio.get_running_loop())

    async def _tenant_async(self) -> str:
        once = self.once
        if not self.asks_app:
            return self.known_tenant
        with self.logs("scope"):
            tenant: str = once.single_tenant or await self._ask(once.scope, self.request)
        if self.asks_to_authorize:
            with self.logs("authorize"):
                allowed(await self._ask(once.authorize, self.request, self.exchange.route.operation))
        return tenant

    async def _ask(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the app. A plain one may use the database, so it runs in the request's thread."""
        if is_coroutine_function(function):
            return await function(*arguments)
        answer = await sync_to_async(function)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    # -- the app's task ------------------------------------------------------------------------------------------

    async def _handle(self, get_response: GetResponse) -> HttpResponseBase:
        try:
            # Only without Django's own: the sync code of this request has a thread, and a connection, to itself.
            async with ThreadSensitiveContext():
                self.in_its_thread = thread_of_request()
                if not self.in_view:
                    self.started()
                try:
                    with uncompressed(self.request), self.below():
                        response: HttpResponseBase = await get_response(self.request)
                    return await self._ended(response)
                except BaseException as error:
                    return await self._raised(error)
        finally:
            enlisted = None if self.waiting else self.exchange.operation.enlisted
            if enlisted is not None:
                enlisted.release()  # in every case other requests must be able to write

    async def _raised(self, error: BaseException) -> HttpResponseBase:
        if not self.waiting:
            answer = await self.failed(error)
            await self.settle()
            if answer is not None:
                return self.respond(self.exchange.instead or answer)
        if isinstance(error, Exception):
            raise error
        raise RuntimeError("the handler was cancelled") from error

    async def _ended(self, response: HttpResponseBase) -> HttpResponseBase:
        if self.answer is not None:
            response.close()
            return self.respond(self.answer)
        if self.exchange.stage is not RUNNING:  # refused before the key was asked for, by authentication
            return response
        if response.streaming:
            return await self._streamed(response)
        body: bytes = response.content  # type: ignore[attr-defined]
        await self.conclude(response.status_code, headers_of(response), body)
        return self.sent(response, len(body))

    async def _streamed(self, response: Any) -> HttpResponseBase:
        exchange, headers = self.exchange, headers_of(response)
        response.file_to_stream = None
        pieces, chunks, size = _pieces(response), list[bytes](), 0
        async for chunk in pieces:
            chunks.append(chunk)
            size += len(chunk)
            if exchange.cannot_store(size, headers):
                set_headers(response, exchange.stream(response.status_code, headers))
                response.streaming_content = _Stream(_Pump(self, response.status_code, headers, chunks, pieces))
                return response  # type: ignore[no-any-return]
        body = b"".join(chunks)
        response.streaming_content = _one(body)
        await self.conclude(response.status_code, headers, body)
        return self.sent(response, len(body))

    async def conclude(self, status: int, headers: Headers, body: bytes | None) -> None:
        """The response is complete: store it. ``body`` None: it was streamed."""
        if self.exchange.answered(status, headers, body):
            await self._store()
        await self.settle()

    async def failed(self, error: BaseException) -> Answer | None:
        if self.exchange.stage is not RUNNING:
            return None
        answer = self.exchange.raised(error)
        await self._store()
        return answer

    async def settle(self) -> None:
        while self.exchange.stage is HELD:
            await self._store()

    async def _store(self) -> None:
        exchange, engine, seconds = self.exchange, self.once.engine, self.policy.begin_seconds
        plain = exchange.operation.enlisted is None
        exchange.start_storing()
        try:
            if plain:
                finished = await engine.run(exchange.finish(), seconds)
            else:
                finished = await finishers.run(engine, exchange.unfinished(), seconds)
            exchange.finished(finished)
        except OperatorError:
            exchange.not_stored()
        except asyncio.CancelledError:  # ``max_run`` is over, or a timeout of the app: the outcome must not be lost
            exchange.cut_off(adopt=plain)
            exchange.answer_cut_off()
        finally:
            if exchange.stage is STORING:
                exchange.abandon()
                engine.keeper.unwatch(exchange.operation)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a handler failed after its client had left", exc_info=error)


def _pieces(response: Any) -> AsyncIterator[bytes]:
    """The body of a streaming response, piece by piece. It does not hold the response: if Django drops that, its client
    is gone (``_Stream``)."""
    to_bytes = HttpResponse(charset=response.charset).make_bytes
    return _read(response._iterator, response.is_async, to_bytes)


async def _read(pieces: Any, is_async: bool, to_bytes: Callable[[Any], bytes]) -> AsyncIterator[bytes]:
    if is_async:
        async for piece in pieces:
            yield to_bytes(piece)
        return
    # A plain iterator is read in the request's thread.
    while (piece := await sync_to_async(lambda: next(pieces, _END))()) is not _END:
        yield to_bytes(piece)


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


class _Stream:
    """The content of a response that passes through. Django closes it, or drops it: then the client is gone."""

    def __init__(self, pump: _Pump) -> None:
        self._pump = pump

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pump.pieces()

    def close(self) -> None:
        """Called in any thread."""
        with suppress(RuntimeError):  # the loop is closed, and the pump's task with it
            self._pump.loop.call_soon_threadsafe(self._pump.leave)

    __del__ = close


class _Pump:
    """Reads the app's pieces in a task of its own. The last one waits for the store. If the client leaves, the handler
    still runs to its end."""

    def __init__(
        self, call: AsyncCall, status: int, headers: Headers, chunks: list[bytes], rest: AsyncIterator[bytes]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._call = call
        self._response = status, headers
        self._chunks = chunks
        self._rest = rest
        self._queue: asyncio.Queue[Any] = asyncio.Queue(1)
        self._gone = False
        engine = call.once.engine
        self._task = self.loop.create_task(self._work())  # in the context of the app, where ``current()`` works
        # The task before it is done, and holds the response: the keeper must not take the request for ended.
        call.exchange.operation.task = self._task
        engine.tasks.add(self._task)
        self._task.add_done_callback(engine.tasks.discard)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._gone:
            _log_failure(task)

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            while (piece := await self._queue.get()) is not _END:
                yield piece
            await self._task  # raises what the app raised
        finally:
            self.leave()
            await asyncio.wait([self._task])

    def leave(self) -> None:
        """The client takes no more pieces."""
        self._gone = True
        while not self._queue.empty():
            self._queue.get_nowait()

    async def _work(self) -> None:
        call = self._call
        try:
            last = self._chunks.pop()
            for chunk in self._chunks:
                await self._pass(chunk)
            async for chunk in self._rest:
                await self._pass(last)
                last = chunk
            if call.exchange.stage is RUNNING:
                await call.conclude(*self._response, None)
            call.exchange.check_stream()
            await self._pass(last)
        except BaseException as error:
            await call.failed(error)
            await call.settle()
            raise
        finally:
            await self._pass(_END)

    async def _pass(self, piece: Any) -> None:
        if not self._gone:
            await self._queue.put(piece)
