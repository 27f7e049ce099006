"""The ASGI middleware: pure ASGI, one object per request, nothing but messages in and out.

Three rules shape it:

* **Store before send.** The response is held back until the store has it; then, and only then, it goes out.
* **A client that leaves changes nothing.** The handler runs in a task of its own and never sees a disconnect before its
  response is stored, so neither the work nor the storing can be cancelled by a closed laptop.
* **Never a bypass.** What cannot be protected (no key, body too large, store down) is refused, and the app not called.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable

from oncekey.core.decision import Execute
from oncekey.core.problems import Answer, Situation
from oncekey.core.record import Record, Reservation
from oncekey.core.routes import Route
from oncekey.core.states import Event
from oncekey.engine import enlisted
from oncekey.engine.keeper import Unfinished
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.engine.request import Request
from oncekey.errors import ConfigurationError, NotAuthenticated, OperatorError, SchemaError
from oncekey.upkeep.service import Upkeep
from oncekey.web import tuning
from oncekey.web.scopes import (
    SCOPE_KEY,
    InnerScope,
    Message,
    Receive,
    Scope,
    Send,
    header_map,
    is_event_stream,
    never_routed,
    route_path,
)
from oncekey.web.wire import (
    UNAVAILABLE_RETRY_SECONDS,
    Headers,
    Move,
    answer_headers,
    answer_instead,
    answer_to,
    first_headers,
    raised,
    read_key,
    refusal,
    returned,
)

_log = logging.getLogger("oncekey")

App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGE_BODY_BYTES = 64 * 1024

_READ = frozenset({b"idempotency-key", b"content-type", b"accept-encoding"})

# Ways around the body that we have to see; without them servers and frameworks send it as messages.
_BYPASSES = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class IdempotencyMiddleware:
    """``app.add_middleware(IdempotencyMiddleware, once=once)``.

    ``tune``: when the server has started, set Python's garbage collector and switch interval (``web/tuning.py``).
    ``upkeep``: True, or an Upkeep of your own: sweeper, reaper and reconciler run in this process, from its start
    to its end. Needs a server that speaks the lifespan protocol, as uvicorn does.
    """

    def __init__(self, app: App, once: OnceKey, *, tune: bool = True, upkeep: bool | Upkeep = False) -> None:
        self.app = app
        self.once = once
        self.tune = tune
        self.upkeep = Upkeep(once) if upkeep is True else upkeep or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            route = self.once.routes.match(scope["method"].upper(), route_path(scope))
            if route is not None and SCOPE_KEY not in scope:  # else another of us stands further out
                await _Exchange(self.app, self.once, route, scope, receive, send).run()
                return
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse to start on a wrong schema; let go of everything at the end."""
        first = await receive()
        try:
            await asyncio.to_thread(self.once.start)
        except (SchemaError, ConfigurationError) as error:
            _log.error("%s", error)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        except OperatorError as error:
            _log.error("the store is not reachable at start; requests get 503 until it is: %s", error)
        waiting = [first]

        async def receive_all() -> Message:
            message = waiting.pop() if waiting else await receive()
            if message["type"] == "lifespan.shutdown" and self.upkeep is not None:
                await self.upkeep.astop()  # before the app closes what its resolvers use
            return message

        async def send_all(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                if self.upkeep is not None:
                    self.upkeep.start()
                if self.tune:
                    tuning.settle()
            elif message["type"] == "lifespan.shutdown.complete":
                await self.once.aclose()
            await send(message)

        await self.app(scope, receive_all, send_all)


class _Exchange:
    """One protected request."""

    wanted: Reservation
    operation: Operation
    task: asyncio.Task[None]
    body: bytes
    key_header: bytes | None = None
    inner: Scope
    compressible = False
    body_read = False
    # of the handler's response
    start: Message | None = None
    size = 0
    streaming = False
    concluded = False
    settled = False
    stored: asyncio.Event | None = None
    move: Move
    done: asyncio.Future[None] | None = None
    """Waited for while the handler runs. Over before it: a timeout further out, or a client that left."""
    cut_off = False
    """The app gave up, by a timeout of its own, while we stored what it had said."""
    told = False
    """And the client was told."""
    held: list[Message] | None = None
    """The response, while it waits for the app's own commit (``enlist(commit="caller")``)."""

    def __init__(self, app: App, once: OnceKey, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        self.app = app
        self.once = once
        self.route = route
        self.policy = route.policy
        self.scope = scope
        self.receive = receive
        self.send = send
        self.chunks: list[bytes] = []

    # -- before the handler --------------------------------------------------------------------------------------

    async def run(self) -> None:
        keys, content_type = self._read_headers()
        if not keys and not self.policy.required:
            await self.app(self.scope, self.receive, self.send)
            return
        try:
            tenant = self.once.single_tenant or await self._tenant()
        except NotAuthenticated as error:
            await self._refuse(Situation.NOT_AUTHENTICATED, detail=str(error) or None)
            return
        key = read_key(keys, self.policy, self.once)
        if isinstance(key, Answer):
            await self._answer(key, None)
            return
        self.key_header = keys[0].strip()
        body = await self._read_body()
        if body is None:
            return
        if len(body) > LARGE_BODY_BYTES:
            # Reading a large document takes milliseconds, and a hostile one more: not on everybody's event loop.
            self.wanted = await asyncio.to_thread(self._reservation, tenant, key, content_type, body)
        else:
            self.wanted = self._reservation(tenant, key, content_type, body)
        engine = self.once.engine
        try:
            decision = await engine.run(engine.begin(self.wanted, self.policy), self.policy.begin_seconds)
        except OperatorError:
            await self._refuse(Situation.STORE_UNAVAILABLE, retry_after=UNAVAILABLE_RETRY_SECONDS)
            return
        if isinstance(decision, Execute):
            await self._execute(decision.record, tenant, body)
        else:
            await self._answer(answer_to(decision, self.policy, self.once), decision.record)

    def _reservation(self, tenant: str, key: str, content_type: str | None, body: bytes) -> Reservation:
        scope = self.scope
        raw_path: bytes | None = scope.get("raw_path")
        return self.once.reservation(
            self.route,
            tenant=tenant,
            key=key,
            owner=self.once.engine.owners.new(),
            method=scope["method"].upper(),
            path=raw_path.decode("latin-1") if raw_path else scope["path"],
            query=scope.get("query_string", b""),
            content_type=content_type,
            body=body,
        )

    def _read_headers(self) -> tuple[list[bytes], str | None]:
        keys: list[bytes] = []
        content_type: str | None = None
        for name, value in self.scope["headers"]:
            if name in _READ:  # one look for most of them
                if name == b"idempotency-key":
                    keys.append(value)
                elif name == b"content-type":  # all of them: who reads the request may go by any
                    text = value.decode("latin-1")
                    content_type = text if content_type is None else f"{content_type}, {text}"
                else:
                    self.compressible = True
        return keys, content_type

    async def _tenant(self) -> str:
        scope = self.scope
        request = Request(scope["method"].upper(), scope["path"], scope, lambda: header_map(scope["headers"]))
        tenant = self.once.scope(request)  # type: ignore[operator]  # SINGLE_TENANT: see run()
        if inspect.isawaitable(tenant):
            tenant = await tenant
        return tenant

    async def _read_body(self) -> bytes | None:
        """The whole body; None when it was refused, or when the client left before it had sent it."""
        limit = self.policy.max_request_bytes
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(chunk := message.get("body", b""))
            size += len(chunk)
            if size > limit:
                await self._refuse(Situation.BODY_TOO_LARGE)
                return None
            if not message.get("more_body"):
                return b"".join(chunks)

    # -- the handler ---------------------------------------------------------------------------------------------

    async def _execute(self, record: Record, tenant: str, body: bytes) -> None:
        engine = self.once.engine
        loop = asyncio.get_running_loop()
        self.operation = Operation(record, self.policy, tenant, engine, loop)
        self.body = body
        done: asyncio.Future[None] = loop.create_future()
        self.done = done
        token = _current.set(self.operation)
        try:
            task = loop.create_task(self._handle(done))
        finally:
            _current.reset(token)
        self.task = self.operation.task = task
        engine.tasks.add(task)  # until _handle is done: the loop itself keeps only a weak reference
        engine.keeper.watch(self.operation)  # while the task lives
        # Not the task itself: whoever cancels this coroutine (a disconnect) cancels the future, and the task goes on.
        await done

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
            if not done.done():  # whatever happened, nobody waits for ever
                done.set_exception(RuntimeError("the handler was cancelled"))
            if self.operation.enlisted is not None:
                self.operation.enlisted.release()  # however it ended, others may write again
            self.once.engine.tasks.discard(self.task)

    async def _call_app(self) -> None:
        try:
            self.inner = self._inner_scope()
            await self.app(self.inner, self._inner_receive, self._inner_send)
        except BaseException as error:
            if self.concluded:
                if self.held is not None:
                    await self._settle(self.held)
                raise  # a background task failed after the response was stored: that stands
            move, answer = raised(self.operation, error, self.once)
            record = await self._finish(move)
            if answer is None:
                raise
            if not isinstance(record, Answer) and not self.streaming:
                await self._answer(answer, record)
        else:
            if self.concluded:
                if self.held is not None:
                    await self._settle(self.held)
                return
            # The app came back without the end of its response: whatever it did, it did not say.
            await self._finish(raised(self.operation, EOFError(), self.once)[0])

    def _inner_scope(self) -> Scope:
        """The app's view of the request: our mark in it, no way around the body, and no compression (we store
        identity bytes; compress in front of us)."""
        scope = InnerScope(self.scope, oncekey=self.operation)
        if self.compressible:
            scope["headers"] = [item for item in self.scope["headers"] if item[0] != b"accept-encoding"]
        if extensions := scope.get("extensions"):
            scope["extensions"] = {name: value for name, value in extensions.items() if name not in _BYPASSES}
        return scope

    async def _inner_receive(self) -> Message:
        if not self.body_read:
            self.body_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        if not self.settled:
            # No disconnect before the response is stored: apps stop working when they see one.
            self.stored = self.stored or asyncio.Event()
            await self.stored.wait()
        return await self.receive()

    async def _inner_send(self, message: Message) -> None:
        kind = message["type"]
        if self.cut_off:
            if kind == "http.response.start" and not self.told:
                self.told = True
                await self._instead(refusal(self.once, Situation.NOT_STORED, retry_after=1.0), self.operation.record)
        elif kind == "http.response.start":
            headers = message.get("headers", ())  # an Iterable, says ASGI, and they are read more than once
            self.start = message if isinstance(headers, list) else {**message, "headers": list(headers)}
            if (trace := sys.exc_info()[2]) is not None and trace is not self.operation.around:
                # Sent from within an ``except``: a framework answers for what the handler raised. A trace that has not
                # grown since the app was called is of something else.
                self.operation.raised = True
        elif kind == "http.response.body" and self.start is not None and not self.concluded:
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
            # Too large to store, or made to be seen as it comes: it passes through, and leaves a tombstone. The last
            # message still waits for the store, so a client that has seen the end can rely on it.
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
        if status in (307, 404, 405) and never_routed(self.inner):
            self.operation.refused = True
        record = await self._finish(returned(self.operation, status, raw_headers, body))
        if isinstance(record, Answer):
            if self.streaming:
                raise RuntimeError("the response could not be stored: its end is withheld, so that the client retries")
            return
        if self.streaming or body is None:
            return
        headers = first_headers(self.operation, status, raw_headers, len(body), self.key_header, record)
        await self._pass_on(*_messages(status, headers, body))

    async def _finish(self, move: Move) -> Record | Answer | None:
        """Carry out the owner's move. An Answer means that it failed, and what the client was told instead."""
        self.concluded = True
        engine, operation = self.once.engine, self.operation
        plain = operation.enlisted is None
        try:
            if plain:
                flow = engine.finish(operation, move.event, move.response, move.reason)
                finished = await engine.run(flow, self.policy.begin_seconds)
            else:
                item = Unfinished(operation, move.event, move.response, move.reason)
                finished = await enlisted.run(engine, item, self.policy.begin_seconds)
        except OperatorError:
            # It ran, and the store does not know yet. The keeper goes on trying; the client has to ask again.
            engine.keeper.adopt(Unfinished(operation, move.event, move.response, move.reason))
            return await self._instead(refusal(self.once, Situation.NOT_STORED, retry_after=1.0), operation.record)
        except asyncio.CancelledError:
            # From inside: a timeout of the app around its own sending. The outcome must not be lost for it.
            self.cut_off = True
            if plain:
                engine.keeper.adopt(Unfinished(operation, move.event, move.response, move.reason))
            raise
        finally:
            self.settled = True
            if self.stored is not None:
                self.stored.set()
        if operation.enlisted is not None:  # written, and the app has still to commit it
            self.move, self.held = move, []
            return finished.record
        engine.keeper.unwatch(operation)
        if finished.stored:
            return finished.record if move.event is not Event.DISCARD else None  # an unused key expires never
        answer = answer_instead(finished, self.operation, self.wanted, self.once)
        return await self._instead(answer, finished.record)

    async def _settle(self, held: list[Message]) -> None:
        """The app has returned, so it has committed or never will: send what was held back, or what the key says."""
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

    async def _refuse(
        self, situation: Situation, *, detail: str | None = None, retry_after: float | None = None
    ) -> None:
        await self._answer(refusal(self.once, situation, detail=detail, retry_after=retry_after), None)

    def _answer(self, answer: Answer, record: Record | None) -> Awaitable[None]:
        return self._pass_on(*_messages(answer.status, answer_headers(answer, self.key_header, record), answer.body))

    async def _pass_on(self, *messages: Message) -> None:
        if self.held is not None:
            self.held += messages
            return
        if self.done is not None and self.done.done():
            return  # whoever called us has ended: nobody listens any more, and the handler must not learn of it
        try:
            for message in messages:
                await self.send(message)
        except OSError:
            # The client has gone. The record does not care, and the handler must not learn of it.
            _log.debug("the client left before its response was sent")


def _messages(status: int, headers: Headers, body: bytes) -> tuple[Message, Message]:
    return (
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body, "more_body": False},
    )
