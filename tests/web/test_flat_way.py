"""The flat way of an ordinary request, and every point at which another one leaves it for the general way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from oncekey import OutcomeUnknown, Policy, current
from oncekey.core.record import Found, Reservation
from oncekey.core.states import State
from oncekey.engine.engine import Engine
from oncekey.engine.transactions import completion
from oncekey.errors import StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.telemetry import events
from oncekey.web import asgi_shell
from oncekey.web.asgi_call import AsgiCall
from tests.web.apps import Api, Gate, World, paid, soon
from tests.web.asgi_server import AsgiServer

MakeApi = Callable[..., Api]


@pytest.fixture
def framework() -> str:
    """It makes no difference here."""
    return "starlette"


@pytest.fixture
def left_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The points at which requests have left the flat way."""
    points: list[str] = []

    def watch(owner: Any, name: str, point: str) -> None:
        whole = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            points.append(point)
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(asgi_shell, "protect", "before the store")
    watch(asgi_shell, "decide", "the store's word")
    watch(AsgiCall, "_conclude", "the response")
    watch(AsgiCall, "_collect", "a piece of the body")
    watch(Engine, "finish", "a flow")
    watch(completion, "finish", "an enlisted transaction")
    return points


def answer(server: AsgiServer) -> int:
    return int(server.sent[0]["status"])


async def ask(api: Api, **request: Any) -> AsgiServer:
    server = AsgiServer(api.app, **request)
    await soon(server.start())
    return server


async def test_ordinary_request_and_its_replay_stay_on_the_flat_way(make_api: MakeApi, left_at: list[str]) -> None:
    api = make_api()
    first, again = await ask(api), await ask(api)
    assert (answer(first), answer(again), api.runs) == (201, 201, 1)
    assert first.sent[1]["body"] == again.sent[1]["body"]
    assert left_at == []


async def test_redirect_and_empty_response_stay_on_the_flat_way(make_api: MakeApi, left_at: list[str]) -> None:
    def respond(request: Request, run: int) -> Response:
        return RedirectResponse("/elsewhere", 303) if run == 1 else Response(status_code=204)

    api = make_api(respond)
    for key, status in (("k-1", 303), ("k-1", 303), ("k-2", 204), ("k-2", 204)):
        assert answer(await ask(api, key=key)) == status
    assert (left_at, api.runs) == ([], 2)


async def test_body_in_pieces_of_the_announced_length_stays_on_the_flat_way(
    make_api: MakeApi, left_at: list[str]
) -> None:
    api = make_api()
    server = AsgiServer(api.app)
    whole = server.incoming.get_nowait()
    for piece, more in ((whole["body"][:5], True), (whole["body"][5:], False)):
        server.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": more})
    await soon(server.start())
    assert (answer(server), left_at) == (201, [])
    assert answer(await ask(api)) == 201
    assert api.runs == 1, "in one piece it is the same request"


HEADS: dict[str, dict[str, Any]] = {
    "escaped key": {"key": '"k\\"1"'},
    "key with parameters": {"key": '"k-1";a=1'},
    "key between spaces": {"key": " k-1 "},
    "chunked": {"headers": {"transfer-encoding": "chunked"}},
    "fingerprint header": {"headers": {"if-match": '"1"'}},
    "length with a sign": {"headers": {"content-length": "+32"}},
    "large body": {"body": b'{"amount":1000,"currency":"EUR","note":"' + b"x" * 70_000 + b'"}'},
}


@pytest.mark.parametrize("head", list(HEADS))
async def test_request_with_an_unusual_head_leaves_before_the_store(
    make_api: MakeApi, left_at: list[str], head: str
) -> None:
    """The general way takes it: it runs once, and is replayed."""
    api = make_api()
    servers = [await ask(api, **HEADS[head]) for _ in range(2)]
    assert [answer(server) for server in servers] == [201, 201]
    assert (api.runs, left_at[0]) == (1, "before the store")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"key": None}, 400),
        ({"key": '"   "'}, 400),
        ({"key": "k" * 256}, 400),
        ({"headers": {"content-length": "7"}}, 400),
        ({"headers": {"content-length": "9999999"}}, 413),
    ],
)
async def test_request_that_is_refused_leaves_before_the_store(
    make_api: MakeApi, left_at: list[str], request_: dict[str, Any], status: int
) -> None:
    api = make_api()
    assert answer(await ask(api, **request_)) == status
    assert (api.runs, left_at) == (0, ["before the store"])


async def test_policy_that_narrows_keys_leaves_before_the_store(make_api: MakeApi, left_at: list[str]) -> None:
    """Then the store is asked after all: a known key is answered whatever its form."""
    api = make_api(policy=Policy(key_format="uuid"))
    assert answer(await ask(api)) == 400
    assert (api.runs, left_at) == (0, ["before the store", "the store's word"])


async def test_repeated_key_header_leaves_before_the_store(make_api: MakeApi, left_at: list[str]) -> None:
    api = make_api()
    server = AsgiServer(api.app)
    server.scope["headers"].append((b"idempotency-key", b"k-2"))
    await soon(server.start())
    assert (answer(server), api.runs, left_at) == (400, 0, ["before the store"])


async def test_duplicate_in_flight_and_mismatch_leave_at_the_stores_word(make_api: MakeApi, left_at: list[str]) -> None:
    gate = Gate()

    async def held(request: Request, run: int) -> Response:
        await gate.wait()
        return paid(request, run)

    api = make_api(held)
    first = AsgiServer(api.app)
    running = first.start()
    await soon(gate.entered.wait())
    assert answer(await ask(api)) == 409
    assert answer(await ask(api, body=b'{"amount":1}')) == 422
    gate.go.set()
    await soon(running)
    assert (answer(first), api.runs, left_at) == (201, 1, ["the store's word"] * 2)


async def test_expired_key_leaves_at_the_stores_word_and_runs_again(
    make_api: MakeApi, world: World, left_at: list[str]
) -> None:
    api = make_api()
    assert answer(await ask(api)) == 201
    world.age("k-1", 100 * 86_400)
    assert answer(await ask(api)) == 201
    assert (api.runs, left_at[0]) == (2, "the store's word")


async def with_verb(request: Request, run: int) -> Response:
    current().downstream_key("charge")
    return paid(request, run)


async def in_pieces(request: Request, run: int) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"id":'
        yield b"1}"

    return StreamingResponse(pieces(), 201)


RESPONSES: dict[str, tuple[Any, Policy | None, int]] = {
    "client error": (lambda request, run: JSONResponse({}, 404), None, 404),
    "used a verb": (with_verb, None, 201),
    "too large": (lambda request, run: Response(b"x" * 20, 201), Policy(max_response_bytes=10), 201),
    "in pieces": (in_pieces, None, 201),
}


@pytest.mark.parametrize("kind", list(RESPONSES))
async def test_unusual_response_leaves_the_flat_way_and_is_replayed(
    make_api: MakeApi, left_at: list[str], kind: str
) -> None:
    respond, policy, status = RESPONSES[kind]
    api = make_api(respond, **({} if policy is None else {"policy": policy}))
    assert [answer(await ask(api)) for _ in range(2)] == [status, status]
    assert (api.runs, bool(left_at)) == (1, True)
    assert "before the store" not in left_at


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_row_that_is_no_longer_this_owners_leaves_at_the_storing(make_api: MakeApi, left_at: list[str]) -> None:
    """The lease ran out while the handler ran, and the sweeper moved the key: nothing is sent that is not stored."""
    store = MemoryStore()

    async def loses(request: Request, run: int) -> Response:
        ((at, row),) = store._rows.items()
        store._rows[at] = type(row)(
            **{name: getattr(row, name) for name in type(row).__dataclass_fields__} | {"owner": "a rival"}
        )
        return paid(request, run)

    api = make_api(loses, store=store)
    assert answer(await ask(api)) == 409
    assert left_at == ["the response", "a flow"]
    ((_, row),) = store._rows.items()
    assert row.state is State.IN_PROGRESS


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_transactional_route_leaves_at_the_response(make_api: MakeApi, left_at: list[str]) -> None:
    """The general way warns of a handler that enlists nothing."""
    api = make_api(policy=Policy(effects="transactional"))
    assert answer(await ask(api)) == 201
    assert left_at == ["the response", "a flow"]


async def test_other_request_under_a_stored_key_leaves_at_the_stores_word(
    make_api: MakeApi, left_at: list[str]
) -> None:
    api = make_api()
    await ask(api)
    assert answer(await ask(api, body=b'{"amount":1}')) == 422
    assert (api.runs, left_at) == (1, ["the store's word"])


@pytest.mark.parametrize("store_url", ["memory://"])
async def test_reservation_whose_answer_was_lost_leaves_at_the_stores_word(
    make_api: MakeApi, left_at: list[str]
) -> None:
    """It is asked for again, and found: its lease began when it was inserted, not when it was found."""
    clock = iter(range(1_000, 2_000))

    class Cut(MemoryStore):
        cuts = 1

        def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
            found = super().reserve(batch)
            if self.cuts:
                self.cuts -= 1
                raise StoreUnavailable("the answer was lost")
            return found

    leases: list[float] = []

    async def looks(request: Request, run: int) -> Response:
        record = current().record
        leases.append(record.lease_until - record.created_at)
        return paid(request, run)

    policy = Policy()
    api = make_api(looks, store=Cut(lambda: float(next(clock))), policy=policy)
    assert answer(await ask(api)) == 201
    assert (leases, left_at[0]) == ([policy.lease_seconds], "the store's word")


class InPlace:
    """Middleware around the endpoint, inside of oncekey: it lets the endpoint run, and answers in its place."""

    def __init__(self, app: Any, meanwhile: Callable[[Any], None]) -> None:
        self.app = app
        self.meanwhile = meanwhile

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        dropped: list[Any] = []

        async def drop(message: Any) -> None:
            dropped.append(message)

        await self.app(scope, receive, drop)
        self.meanwhile(scope["oncekey"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all is well"})


@pytest.mark.parametrize(
    ("returned", "meanwhile"),
    [
        (500, lambda operation: None),
        (201, lambda operation: operation.evidence.heard(OutcomeUnknown("it was cut off"))),
        (201, lambda operation: operation.evidence.entered()),
    ],
    ids=["the endpoint returned 500", "the outcome is not known", "another call runs"],
)
@pytest.mark.parametrize("store_url", ["memory://"])
async def test_success_in_place_of_another_outcome_is_not_stored(
    make_api: MakeApi, left_at: list[str], returned: int, meanwhile: Callable[[Any], None]
) -> None:
    api = make_api(
        lambda request, run: JSONResponse({}, returned),
        prepare=lambda app: app.add_middleware(InPlace, meanwhile=meanwhile),
    )
    assert answer(await ask(api)) == 409
    assert answer(await ask(api)) == 409
    assert (api.runs, "the response" in left_at) == (1, True)


async def test_flat_way_emits_the_events_of_a_request(make_api: MakeApi, left_at: list[str]) -> None:
    api = make_api()
    await ask(api)
    await ask(api)
    kinds = [type(event) for event in api.events]
    assert kinds == [events.Reserved, events.Completed, events.Replayed]
    assert left_at == []


async def test_cancelled_request_gives_its_reservation_back(make_api: MakeApi, world: World) -> None:
    """The loop lane has the answer, and the caller is cancelled before it runs on."""
    api = make_api()
    await ask(api, key="warm")
    engine, give = api.once.engine, api.once.engine.router.ask
    asked: list[asyncio.Future[Any]] = []

    def ask_and_cancel(*work: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = give(*work)
        future.add_done_callback(lambda _: task.cancel())
        asked.append(future)
        return future

    engine.router.ask = ask_and_cancel  # type: ignore[method-assign, assignment]
    task = AsgiServer(api.app).start()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    engine.router.ask = give  # type: ignore[method-assign]
    assert (len(asked), api.runs) == (1, 1)
    assert await soon(until_free(api)) == 201
    assert api.runs == 2


async def until_free(api: Api) -> int:
    """The status of the first request that is not told that another one has the key."""
    while (status := answer(await ask(api))) == 409:
        await asyncio.sleep(0.01)
    return status
