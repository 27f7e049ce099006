"""The store is down, hung, slow, or dies half-way: 503, the handler is not called, and nothing stays stuck.

A server is ill-treated on the wire, by the proxy, and a SQLite file by a rival. What cannot be done there is done by
doubles of the store, in test_breaker_queue_keeper.py.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy, current
from oncekey.core.states import State
from oncekey.stores.api import EventLoops, Store
from oncekey.stores.mysql import MysqlStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.redis import RedisStore
from oncekey.stores.registry import open_store
from oncekey.stores.sqlite import SqliteStore
from oncekey.telemetry import events
from oncekey.testing.proxy import TcpProxy
from tests.stores.dynamo_rows import port_of, through
from tests.web.apps import ATTENTIVE, PATIENCE, SECONDS, Api, Gate, World, same, soon, until
from tests.web.checks import assert_refused
from tests.web.conftest import DEEP, READY

IMPATIENT = Policy(begin_timeout=timedelta(seconds=0.15))
"""For what is to be refused; what is to run is sent until it does."""


async def eventually(api: Api, key: str, status: int, seconds: float = SECONDS) -> httpx.Response:
    """Send the request, as a client that keeps its key does, until it gets this answer."""
    deadline = time.monotonic() + seconds
    while (answer := await api.post(key)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        await asyncio.sleep(0.02)
    return answer


# ---------------------------------------------------------------- a server behind a bad network


@pytest.fixture(params=["postgres", *DEEP])
def server_url(request: pytest.FixtureRequest) -> str:
    """An empty database of a server."""
    url: str = request.getfixturevalue(READY[request.param])
    return url


@pytest.fixture
def proxy(server_url: str) -> Iterator[TcpProxy]:
    port = port_of(server_url) if server_url.startswith("dynamodb") else urlsplit(server_url).port or 0
    with TcpProxy("127.0.0.1", port) as proxy:
        yield proxy


@pytest.fixture
def repeats_itself(server_url: str) -> bool:
    """Whether the store itself asks again after a lost connection (``tests/stores/test_dynamodb_repeats.py``), so that
    neither a lane nor a client sees it."""
    return server_url.startswith("dynamodb")


@pytest.fixture
async def far(server_url: str, proxy: TcpProxy) -> AsyncIterator[Callable[..., Api]]:
    """Makes apps whose store is behind the proxy, with short limits."""
    made: list[Api] = []

    def make(*args: Any, timeout: float = 0.5, policy: Policy = PATIENCE, **options: Any) -> Api:
        url = through(proxy, server_url) if server_url.startswith("dynamodb") else proxy.rewrite(server_url)
        if url.startswith("dynamodb"):
            store: Store = open_store(f"{url}&timeout={timeout * 2}")
            store.check()  # to make the SDK's client takes longer than these requests may
            if policy is not IMPATIENT:  # on a busy machine a request of the SDK takes a tenth of a second
                policy = replace(policy, begin_timeout=timedelta(seconds=1.0))
        elif url.startswith("postgresql"):
            store = PostgresStore(url, timeout=timeout, lock_timeout=0.2)
        elif url.startswith("mysql"):
            store = MysqlStore(url, timeout=timeout)
        else:
            store = RedisStore(f"{url}?timeout={timeout}&replicas_timeout=0.01")
        options |= {"store": store, "policy": policy, "migrate": False}
        made.append(Api(World(server_url), "starlette", *args, **options))
        return made[-1]

    yield make
    proxy.pass_through()
    for api in made:
        await api.close()


def refuse(proxy: TcpProxy) -> None:
    proxy.refuse()


def hang(proxy: TcpProxy) -> None:
    proxy.hang()


def crawl(proxy: TcpProxy) -> None:
    proxy.delay(0.4)


FAULTS = [refuse, hang, crawl]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("connected", [True, False], ids=["warm", "cold"])
async def test_store_down_hung_slow_is_503_and_the_handler_is_not_called(
    far: Callable[..., Api], proxy: TcpProxy, fault: Callable[[TcpProxy], None], connected: bool
) -> None:
    """I7: no answer in time is a refusal in time; when the store is back, the same keys run."""
    api = far(policy=IMPATIENT)
    if connected:
        await eventually(api, "before", 201)
    before = api.runs
    fault(proxy)
    began = time.monotonic()
    for answer in await asyncio.gather(*(api.post(f"k-{number}") for number in range(3)), api.post("k-1")):
        assert_refused(answer)
    assert time.monotonic() - began < 2.0
    assert api.runs == before
    proxy.pass_through()
    answer = await eventually(api, "k-1", 201)
    assert same(answer, await eventually(api, "k-1", 201))
    assert api.runs == before + 1


async def test_a_lane_does_not_hang_with_a_hung_server(far: Callable[..., Api], proxy: TcpProxy) -> None:
    """A server that keeps its sockets open and says nothing holds a lane for a bounded time, not until it speaks."""
    api = far(timeout=0.2, policy=IMPATIENT)
    await eventually(api, "before", 201)

    def given_up() -> int:
        """By thread lanes: a loop lane that gives up says so too, with a time-out of its own."""
        return sum("StoreUnavailable" in event.error for event in api.saw(events.StoreFailed))

    before = given_up()
    proxy.hang("to_client")
    assert_refused(await api.post())
    await until(lambda: given_up() > before, "the lane has given up, and the server still hangs")
    assert api.runs == 1


async def test_a_replay_needs_the_store_too(far: Callable[..., Api], proxy: TcpProxy) -> None:
    """Hazard 12: a record that cannot be read is not a first request."""
    api = far()
    first = await api.post()
    proxy.refuse()
    assert_refused(await api.post())
    proxy.pass_through()
    assert same(first, await eventually(api, "k-1", 201))
    assert api.runs == 1


@pytest.mark.parametrize("fault", [refuse, hang])
@pytest.mark.parametrize(
    ("ending", "state"),
    [("returns", State.COMPLETED), ("raises", State.UNKNOWN), ("429", State.FAILED_RETRYABLE)],
)
async def test_the_store_dies_between_begin_and_finish(
    far: Callable[..., Api], proxy: TcpProxy, fault: Callable[[TcpProxy], None], ending: str, state: State
) -> None:
    """The client is told to ask again; the outcome is kept, stored by itself when the store is back, and replayed."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        await gate.wait()
        if ending == "raises":
            raise RuntimeError("it broke")
        return JSONResponse({"run": run}, 429 if ending == "429" else 201)

    api = far(respond, policy=ATTENTIVE)
    first = api.start()
    await soon(gate.entered.wait())
    fault(proxy)
    gate.go.set()
    answer = await first
    assert_refused(answer, "not-stored")
    assert "new one" in answer.json()["detail"]
    assert api.world.record("k-1").state is State.IN_PROGRESS  # type: ignore[union-attr]
    proxy.pass_through()
    await until(lambda: api.world.record("k-1").state is state, f"the key is {state}")  # type: ignore[union-attr]
    retry = await eventually(api, "k-1", {"returns": 201, "raises": 409, "429": 429}[ending])
    if ending == "returns":
        assert retry.json() == {"run": 1}
        assert retry.headers["idempotency-replayed"] == "true"
    assert api.runs == (2 if ending == "429" else 1)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_commit_of_a_reservation_is_cut_once(far: Callable[..., Api], proxy: TcpProxy, when: Any) -> None:
    """Hazard 9: whether it was committed cannot be told from the error, so it is asked again; one run, attempt 1."""
    api = far(lambda request, run: JSONResponse({"attempt": current().attempt}, 201))
    await api.post("warm")
    cut = proxy.cut_on("to_server", b"cut-this-key", when=when)
    answer = await api.post("cut-this-key")
    assert cut.struck == 1
    assert (answer.status_code, answer.json()) == (201, {"attempt": 1})
    assert same(answer, await api.post("cut-this-key"))
    assert api.runs == 2


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_commit_of_a_reservation_is_cut_again_and_again(
    far: Callable[..., Api], proxy: TcpProxy, when: Any, repeats_itself: bool
) -> None:
    """What cannot be known is refused; what was reserved all the same is given back, and the key can be used."""
    if repeats_itself:
        pytest.skip("the store asks as often as its time limit allows")
    api = far()
    await api.post("warm")
    times = 3 if isinstance(api.once.store, EventLoops) else 2  # the loop lane asks once, the thread lane twice
    cut = proxy.cut_on("to_server", b"cut-this-key", when=when, times=times)
    assert_refused(await api.post("cut-this-key"))
    assert cut.struck == times
    assert api.runs == 1
    answer = await eventually(api, "cut-this-key", 201, 5.0)
    assert same(answer, await api.post("cut-this-key"))
    assert api.runs == 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 3])
async def test_the_commit_of_a_response_is_cut(
    far: Callable[..., Api], proxy: TcpProxy, when: Any, times: int, repeats_itself: bool
) -> None:
    """Cut once, the client does not notice. Cut three times (the loop lane tries once, a thread lane twice), it gets
    its answer by asking again. Never a second run."""
    api = far(lambda request, run: JSONResponse({"receipt": f"cut-this-body-{run}"}, 201))
    often = times == 3
    if often and not isinstance(api.once.store, EventLoops) and not repeats_itself:
        times = 2
    body = b64encode(b'{"receipt":"cut-this-body-1"}') if repeats_itself else b"cut-this-body"
    cut = proxy.cut_on("to_server", body, when=when, times=times)
    answer = await api.post()
    assert cut.struck == times
    if often and (answer.status_code == 503 or not repeats_itself):  # it may have asked for long enough
        assert_refused(answer, "not-stored")
        answer = await eventually(api, "k-1", 201)
    assert answer.json() == {"receipt": "cut-this-body-1"}
    assert same(answer, await api.post())
    assert api.runs == 1


async def test_a_reservation_that_arrives_late_is_given_back(far: Callable[..., Api], proxy: TcpProxy) -> None:
    """The caller gave up, the row was written all the same: it goes, and the same key can be used at once."""
    api = far(timeout=5.0)
    for number in range(3):  # until the statement is prepared, and one message is all it takes
        await api.post(f"warm-{number}")
    proxy.hang("to_client")
    assert_refused(await api.post())
    await until(lambda: api.world.record("k-1"), "the reservation has reached the server")
    proxy.pass_through()
    await until(lambda: api.world.record("k-1") is None, "the late reservation is given back")
    answer = await api.post()
    assert answer.status_code == 201
    assert api.world.record("k-1").attempt == 1  # type: ignore[union-attr]
    assert api.runs == 4


async def test_lost_connection_is_replaced_and_no_client_notices(
    far: Callable[..., Api], proxy: TcpProxy, repeats_itself: bool
) -> None:
    """A server that was restarted between two requests: a loop lane reports its lost connection at most once, and the
    thread lane, which has lost its own too, answers in its place."""
    api = far()
    assert (await api.post("k-1")).status_code == 201
    proxy.cut()
    assert (await api.post("k-2")).status_code == 201
    reported = [event.verb for event in api.saw(events.StoreFailed)]
    assert reported in ([], ["reserve"])  # none: the loop lane saw it before it asked, or a thread lane asked again


# ---------------------------------------------------------------- SQLite


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[tuple[Api, sqlite3.Connection]]:
    """An app on a SQLite file, with the proportion of limits that is the default, and a rival writer."""
    path = tmp_path / "keys.db"
    store = SqliteStore(path, timeout=0.3)
    api = Api(World(f"sqlite:///{path}"), "starlette", store=store, policy=PATIENCE)
    rival = sqlite3.connect(path, isolation_level=None)
    yield api, rival
    rival.close()
    await api.close()


async def test_a_locked_sqlite_file_is_503_and_the_handler_is_not_called(
    locked: tuple[Api, sqlite3.Connection],
) -> None:
    """A writer that holds the file refuses new keys, in time; when it lets go, they run."""
    api, rival = locked
    assert (await api.post("k-1")).status_code == 201
    rival.execute("BEGIN IMMEDIATE")
    assert_refused(await api.post("k-2"))
    assert api.runs == 1
    rival.execute("ROLLBACK")
    await eventually(api, "k-2", 201)
    assert api.runs == 2


async def test_a_locked_sqlite_file_still_replays(locked: tuple[Api, sqlite3.Connection]) -> None:
    """Reading takes no lock (WAL): what is stored is answered while another process writes."""
    api, rival = locked
    first = await api.post("k-1")
    rival.execute("BEGIN IMMEDIATE")
    assert same(first, await api.post("k-1"))
    assert (await api.post("k-1", "/refunds")).status_code == 422


async def test_a_sqlite_file_that_disappears_is_503_and_never_a_first_request(tmp_path: Path) -> None:
    """Hazard 12: an empty file in its place would make every key a new one."""
    path = tmp_path / "keys.db"
    api = Api(World(f"sqlite:///{path}"), "starlette", policy=PATIENCE)
    assert (await api.post("k-1")).status_code == 201
    path.rename(tmp_path / "elsewhere.db")
    assert_refused(await api.post("k-1"))
    assert_refused(await api.post("k-2"))
    assert api.runs == 1
    await api.close()
