"""A client that leaves changes nothing: at whatever point, the work is done once and stored, or was never begun.

ASGI is driven by hand: servers cancel (hypercorn, timeouts in front of us), send ``http.disconnect``, or raise from
``send``; each is a test of its own. Each message of each kind of handler is ``tests/faults/disconnects.py``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from oncekey import Policy
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import Event, State
from oncekey.core.swaps import Swap
from oncekey.engine.batching.ticket import AsyncTicket
from oncekey.errors import StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.web.asgi import IdempotencyMiddleware
from tests.web.apps import SECONDS, Api, Gate, World, paid, soon, until
from tests.web.asgi_server import AsgiServer

MakeApi = Callable[..., Api]
BODY = b'{"amount":1000,"currency":"EUR"}'
JSON = {"content-type": "application/json"}


@pytest.fixture
def framework() -> str:
    """It makes no difference here."""
    return "starlette"


@pytest.fixture(params=["flat", "general"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of a request: the general one is taken where no length is announced."""
    monkeypatch.setattr(AsgiServer, "announces_length", request.param == "flat")


class Held(MemoryStore):
    """A store in whose verbs a test can hold the lane."""

    def __init__(self) -> None:
        super().__init__()
        self.hold_reserve = self.hold_swap = False
        self.entered = threading.Event()
        self.go = threading.Event()
        self.fail_swaps = 0
        self.reserved = 0

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        if self.hold_reserve:
            self.hold_reserve = False
            self._wait()
        found = super().reserve(batch)
        self.reserved += 1
        return found

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        if self.hold_swap and any(change.event is not Event.RENEW for change in batch):
            self.hold_swap = False
            self._wait()
        if self.fail_swaps:
            self.fail_swaps -= 1
            raise StoreUnavailable("gone for a moment")
        return super().swap(batch)

    def _wait(self) -> None:
        self.entered.set()
        assert self.go.wait(SECONDS)

    def row(self, key: str = "k-1") -> Record | None:
        return self.read([("single-tenant", key)])[0]


async def retry(api: Api) -> Any:
    return await api.post(content=BODY, headers=JSON)


def held(gate: Gate) -> Callable[[Request, int], Any]:
    async def respond(request: Request, run: int) -> Response:
        await gate.wait()
        return paid(request, run)

    return respond


async def stored(world: World) -> None:
    await until(lambda: (record := world.record("k-1")) and record.state is State.COMPLETED, "the key is completed")


# ---------------------------------------------------------------- while the handler runs


async def test_cancelled_from_outside_stored_and_replayed(make_api: MakeApi, world: World) -> None:
    """Hazard 3: a cancellation of our coroutine cancels neither the handler nor the storing."""
    gate = Gate()
    api = make_api(held(gate))
    server = AsgiServer(api.app)
    task = server.start()
    await soon(gate.entered.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await retry(api)).status_code == 409  # it goes on
    gate.go.set()
    await stored(world)
    answer = await retry(api)
    assert (answer.status_code, answer.content) == (201, b'{"id":"pay_1"}')
    assert api.runs == 1


async def test_the_disconnect_message_is_not_seen_before_the_response_is_stored(
    make_api: MakeApi, world: World
) -> None:
    """An app that looks whether its client is there finds it there: it would stop half-way otherwise."""
    looked: list[bool] = []

    async def respond(request: Request, run: int) -> Response:
        await request.body()
        server.disconnect()
        looked.append(await request.is_disconnected())
        looked.append(await request.is_disconnected())
        return paid(request, run)

    api = make_api(respond)
    server = AsgiServer(api.app)
    await soon(server.start())
    assert looked == [False, False]
    await stored(world)
    assert (await retry(api)).content == b'{"id":"pay_1"}'
    assert api.runs == 1


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_a_streaming_response_outlives_its_client(make_api: MakeApi, world: World, spec_version: str) -> None:
    """StreamingResponse stops at a disconnect, by message (2.3) or by OSError (2.4): it sees neither, and is stored."""
    gate = Gate()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one,"
        await gate.wait()
        yield b"two"

    api = make_api(lambda request, run: StreamingResponse(pieces(), 201))
    server = AsgiServer(api.app, spec_version=spec_version)
    task = server.start()
    await soon(gate.entered.wait())
    server.disconnect()
    server.broken = True
    gate.go.set()
    await soon(task)
    assert server.sent == []
    await stored(world)
    answer = await retry(api)
    assert (answer.status_code, answer.content) == (201, b"one,two")
    assert api.runs == 1


async def test_a_large_stream_goes_on_to_its_tombstone(make_api: MakeApi, world: World) -> None:
    """What is passed through as it comes is completed too, although the client has left."""
    gate = Gate()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 2000
        await gate.wait()
        yield b"y" * 2000

    api = make_api(lambda request, run: StreamingResponse(pieces(), 201), policy=Policy(max_response_bytes=1000))
    server = AsgiServer(api.app, spec_version="2.4")
    task = server.start()
    await soon(gate.entered.wait())
    assert len(server.body) == 2000
    server.broken = True
    server.disconnect()
    gate.go.set()
    await soon(task)
    await stored(world)
    assert "not kept" in (await retry(api)).json()["detail"]
    assert api.runs == 1


async def test_background_tasks_run_although_the_client_has_gone(make_api: MakeApi) -> None:
    """Sending fails, and the handler does not learn of it: its receipt is still printed."""
    printed: list[int] = []

    def respond(request: Request, run: int) -> Response:
        server.broken = True
        return JSONResponse({}, 201, background=BackgroundTask(printed.append, run))

    api = make_api(respond)
    server = AsgiServer(api.app)
    await soon(server.start())
    assert printed == [1]


# ---------------------------------------------------------------- before the handler


async def test_a_client_that_leaves_before_its_body_is_complete_has_asked_nothing(
    make_api: MakeApi, world: World
) -> None:
    """Half a body is no request: no row, no run, no answer."""
    api = make_api()
    server = AsgiServer(api.app)
    server.incoming.get_nowait()
    server.incoming.put_nowait({"type": "http.request", "body": BODY[:10], "more_body": True})
    server.disconnect()
    await soon(server.start())
    assert (server.sent, api.runs, world.rows()) == ([], 0, 0)


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_cancelled_while_the_store_works_leaves_no_reservation(make_api: MakeApi) -> None:
    """The row that arrives for a caller that has left is given back, and the key can be used at once."""
    store = Held()
    api = make_api(store=store)
    store.hold_reserve = True
    task = AsgiServer(api.app).start()
    await until(store.entered.is_set, "the lane asks the store")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.go.set()
    await until(lambda: store.reserved == 1 and not store._rows, "the reservation is given back")
    assert (await retry(api)).status_code == 201
    assert api.runs == 1


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_cancelled_at_the_moment_of_the_reservation_leaves_none(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of the store is handed over, and the cancellation comes before our coroutine has run on."""
    store = Held()
    api = make_api(store=store)
    deliver = AsyncTicket.deliver

    def deliver_and_cancel(ticket: AsyncTicket) -> bool:
        taken = deliver(ticket)
        task.cancel()
        return taken

    monkeypatch.setattr(AsyncTicket, "deliver", deliver_and_cancel)
    task = AsgiServer(api.app).start()
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.undo()
    assert api.runs == 0
    await until(lambda: not store._rows, "the reservation is given back", 3.0)
    assert (await retry(api)).status_code == 201


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_cancelled_at_the_moment_of_a_retry_leaves_it_retryable(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a key that was claimed by a later attempt: it goes back to where a retry may run."""
    store = Held()
    api = make_api(lambda request, run: JSONResponse({"run": run}, 429 if run == 1 else 201), store=store)
    assert (await retry(api)).status_code == 429
    deliver = AsyncTicket.deliver

    def deliver_and_cancel(ticket: AsyncTicket) -> bool:
        taken = deliver(ticket)
        if isinstance(ticket.work, Swap) and ticket.work.event is Event.RETRY:
            task.cancel()
        return taken

    monkeypatch.setattr(AsyncTicket, "deliver", deliver_and_cancel)
    task = AsgiServer(api.app).start()
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.undo()
    assert api.runs == 1
    await until(lambda: (row := store.row()) and row.state is State.FAILED_RETRYABLE, "the key is given back", 3.0)
    assert (await retry(api)).json() == {"run": 2}


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_cancelled_while_waiting_for_the_first_leaves_nothing(make_api: MakeApi) -> None:
    """A waiter that goes takes its place in the queue with it."""
    gate = Gate()
    api = make_api(held(gate), policy=Policy(in_flight="wait"))
    first = api.start(content=BODY, headers=JSON)
    await soon(gate.entered.wait())
    waiter = AsgiServer(api.app).start()
    await until(lambda: api.once.engine.waiters, "it waits")
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not api.once.engine.waiters
    gate.go.set()
    assert (await first).status_code == 201
    assert api.runs == 1


# ---------------------------------------------------------------- while the response is stored


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_no_disconnect_is_seen_while_the_response_is_being_stored(make_api: MakeApi) -> None:
    """The window between the app's last message and the store's answer belongs to the storing as well."""
    store = Held()
    api = make_api(store=store)
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def answer() -> None:
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})

        answering = asyncio.create_task(answer())
        await until(store.entered.is_set, "the response is being stored")
        listening = asyncio.create_task(receive())
        await asyncio.wait([listening], timeout=0.2)
        seen.append(listening.done())
        store.go.set()
        await answering
        seen.append((await soon(listening))["type"])

    store.hold_swap = True
    server = AsgiServer(IdempotencyMiddleware(app, once=api.once))
    server.disconnect()
    await soon(server.start())
    assert seen == [False, "http.disconnect"]
    assert server.body == b"done"


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_cancelled_from_inside_while_storing_does_not_lose_the_outcome(make_api: MakeApi) -> None:
    """An app's own time-out strikes while its response is being stored, and the store fails in that moment too: the
    outcome is kept and stored later. Otherwise the key would be renewed for ever, and never be anything."""
    store = Held()
    api = make_api(store=store, policy=Policy(lease=timedelta(seconds=0.3)))
    runs: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)

        async def answer() -> None:
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})

        answering = asyncio.create_task(answer())
        await until(store.entered.is_set, "the response is being stored")
        answering.cancel()
        store.fail_swaps = 2  # the lane asks twice
        store.go.set()
        await answering

    store.hold_swap = True
    protected = IdempotencyMiddleware(app, once=api.once)
    await asyncio.gather(AsgiServer(protected).start(), return_exceptions=True)
    await until(lambda: (row := store.row()) and row.state is not State.IN_PROGRESS, "the key is settled", 3.0)
    server = AsgiServer(protected)
    await soon(server.start())
    assert (server.status, server.body) == (201, b"done")
    assert runs == [1]


# ---------------------------------------------------------------- the end of the process


async def test_shutdown_waits_for_handlers_and_stores_them(make_api: MakeApi, world: World) -> None:
    """A handler whose client has gone is given time at the end, and its answer is stored."""
    gate = Gate()
    api = make_api(held(gate))
    task = AsgiServer(api.app).start()
    await soon(gate.entered.wait())
    task.cancel()
    closing = asyncio.create_task(api.once.aclose())
    await asyncio.wait([closing], timeout=0.05)
    assert not closing.done()
    gate.go.set()
    assert await soon(closing)
    record = world.record("k-1")
    assert record is not None
    assert record.state is State.COMPLETED


async def test_lifespan_ends_with_everything_stored(make_api: MakeApi, world: World) -> None:
    """The app's own shutdown comes first, then ours. Used after that, it opens again (test_shutdown.py)."""
    api = make_api()
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    lifespan = asyncio.create_task(api.app({"type": "lifespan", "asgi": {}, "state": {}}, incoming.get, send))
    incoming.put_nowait({"type": "lifespan.startup"})
    await until(lambda: sent, "it has started")
    assert (await api.post()).status_code == 201
    incoming.put_nowait({"type": "lifespan.shutdown"})
    await soon(lifespan)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert api.once.engine.closed
    assert (await api.post()).headers["idempotency-replayed"] == "true"
    assert api.runs == 1
