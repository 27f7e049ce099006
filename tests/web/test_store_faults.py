"""The store is down, hung, slow, or dies half-way: 503, the handler is not called, and nothing stays stuck.

PostgreSQL is ill-treated on the wire, by the proxy; what cannot be done there is done by doubles of the store in
memory, in whose verbs a test can hold the lane or let it fail.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy, current
from oncekey.core.record import Found, Record, Reservation, Swap
from oncekey.core.states import Event, State
from oncekey.engine.breaker import FAILURES_TO_OPEN
from oncekey.errors import StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.telemetry import events
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import PostgresServer
from tests.web.apps import ONE, SECONDS, Api, Gate, World, paid, same, soon, until

PATIENCE = Policy(begin_timeout=timedelta(seconds=0.3))
ATTENTIVE = Policy(begin_timeout=timedelta(seconds=0.3), lease=timedelta(seconds=1.2))
"""The same, and its keeper looks every tenth of a second: twelve times a lease."""
IMPATIENT = Policy(begin_timeout=timedelta(seconds=0.15))
"""For what is to be refused; what is to run is sent until it does."""


def assert_refused(answer: httpx.Response, kind: str = "store-unavailable") -> None:
    assert answer.status_code == 503
    assert answer.json()["type"] == f"urn:oncekey:problem:{kind}"
    assert int(answer.headers["retry-after"]) >= 1
    assert "Keep the key" in answer.json()["detail"]


def held(gate: Gate) -> Callable[[Request, int], Any]:
    async def respond(request: Request, run: int) -> Response:
        await gate.wait()
        return paid(request, run)

    return respond


# ---------------------------------------------------------------- PostgreSQL behind a bad network


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        yield proxy


@pytest.fixture
async def far(ready_url: str, proxy: TcpProxy) -> AsyncIterator[Callable[..., Api]]:
    """Makes apps whose store is behind the proxy, with short limits."""
    made: list[Api] = []

    def make(*args: Any, timeout: float = 0.5, policy: Policy = PATIENCE, **options: Any) -> Api:
        store = PostgresStore(proxy.rewrite(ready_url), timeout=timeout, lock_timeout=0.2)
        options |= {"store": store, "policy": policy, "migrate": False}
        made.append(Api(World(ready_url), "starlette", *args, **options))
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
    assert same(answer, await api.post("k-1"))
    assert api.runs == before + 1


async def test_a_lane_does_not_hang_with_a_hung_server(far: Callable[..., Api], proxy: TcpProxy) -> None:
    """A server that keeps its sockets open and says nothing holds a lane for a bounded time, not until it speaks."""
    api = far(timeout=0.2, policy=IMPATIENT)
    await eventually(api, "before", 201)

    def given_up() -> int:
        """By lanes: an express that gives up says so too, with a time-out of its own."""
        return sum("StoreUnavailable" in event.error for event in api.saw(events.StoreFailed))

    before = given_up()
    proxy.hang("to_client")
    assert_refused(await api.post())
    await until(lambda: given_up() > before, "the lane has given up, and the server still hangs")
    assert api.runs == 1


async def eventually(api: Api, key: str, status: int, seconds: float = SECONDS) -> httpx.Response:
    """Send the request, as a client that keeps its key does, until it gets this answer."""
    deadline = time.monotonic() + seconds
    while (answer := await api.post(key)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        await asyncio.sleep(0.02)
    return answer


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
    [("returns", State.COMPLETED), ("raises", State.UNKNOWN), ("500", State.FAILED_RETRYABLE)],
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
        return JSONResponse({"run": run}, 500 if ending == "500" else 201)

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
    retry = await eventually(api, "k-1", {"returns": 201, "raises": 409, "500": 500}[ending])
    if ending == "returns":
        assert retry.json() == {"run": 1}
        assert retry.headers["idempotency-replayed"] == "true"
    assert api.runs == (2 if ending == "500" else 1)


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
    far: Callable[..., Api], proxy: TcpProxy, when: Any
) -> None:
    """What cannot be known is refused; what was reserved all the same is given back, and the key can be used."""
    api = far()
    await api.post("warm")
    cut = proxy.cut_on("to_server", b"cut-this-key", when=when, times=3)  # the express asks once, the lane twice
    assert_refused(await api.post("cut-this-key"))
    assert cut.struck == 3
    assert api.runs == 1
    answer = await eventually(api, "cut-this-key", 201, 5.0)
    assert same(answer, await api.post("cut-this-key"))
    assert api.runs == 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 2])
async def test_the_commit_of_a_response_is_cut(far: Callable[..., Api], proxy: TcpProxy, when: Any, times: int) -> None:
    """Cut once, the client does not notice; cut twice, it gets its answer by asking again. Never a second run."""
    api = far(lambda request, run: JSONResponse({"receipt": f"cut-this-body-{run}"}, 201))
    cut = proxy.cut_on("to_server", b"cut-this-body", when=when, times=times)
    answer = await api.post()
    assert cut.struck == times
    if times == 2:
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


async def test_a_lost_connection_is_replaced_without_a_word(far: Callable[..., Api], proxy: TcpProxy) -> None:
    """A server that was restarted between two requests costs nobody an error."""
    api = far()
    assert (await api.post("k-1")).status_code == 201
    proxy.cut()
    assert (await api.post("k-2")).status_code == 201
    assert not api.saw(events.StoreFailed)


# ---------------------------------------------------------------- somebody's open transaction


@contextmanager
def open_transaction(url: str, key: str) -> Iterator[psycopg.Connection]:
    """A transaction that has updated a key's row, as an enlisted one has; rolled back at the end."""
    with psycopg.connect(url) as connection:
        done = connection.execute("UPDATE idempotency_keys SET last_error = 'x' WHERE key = %s", [key])
        assert done.rowcount == 1
        yield connection
        connection.rollback()


@contextmanager
def watching_for_locks(url: str) -> Iterator[list[str]]:
    """Every statement that is seen waiting for a lock, looked at all the time."""
    seen: list[str] = []
    end = threading.Event()

    def look() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not end.wait(0.002):
                waiting = connection.execute(
                    "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                )
                seen.extend(row[0] for row in waiting)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        end.set()
        thread.join(SECONDS)


async def test_an_open_transaction_slows_nobody_else(ready_url: str) -> None:
    """One transaction has updated one key's row: 64 clients on other keys are served as before, nobody waits for its
    lock, and a duplicate of that key gets its 409 at once."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        if request.url.query == "hold":
            await gate.wait()
        return paid(request, run)

    api = Api(World(ready_url), "starlette", respond, migrate=False)
    first = api.start("held", "/payments?hold")
    await soon(gate.entered.wait())

    async def client(name: str) -> Counter[int]:
        return Counter([(await api.post(f"{name}-{number}")).status_code for number in range(3)])

    async def wave(name: str) -> tuple[float, float]:
        """How long 64 clients take, and how long the slowest of 8 duplicates in their midst."""

        async def duplicate() -> float:
            asked = time.monotonic()
            answer = await api.post("held", "/payments?hold")
            assert answer.status_code == 409
            assert "retry-after" in answer.headers
            return time.monotonic() - asked

        began = time.monotonic()
        clients = [asyncio.create_task(client(f"{name}-{number}")) for number in range(64)]
        duplicates = [asyncio.create_task(duplicate()) for _ in range(8)]
        slowest = max([await task for task in duplicates])
        assert sum([await task for task in clients], Counter()) == {201: 192}
        return time.monotonic() - began, slowest

    try:
        await wave("warm")
        without, _ = await wave("without")
        with open_transaction(ready_url, "held"), watching_for_locks(ready_url) as waits:
            with_it, slowest = await wave("with")
        assert waits == []
        assert with_it < 5 * without + 0.2
        assert slowest < without + 0.4
        gate.go.set()
        assert (await first).status_code == 201
    finally:
        await api.close()


async def test_a_finish_waits_for_a_row_that_is_held_for_a_moment(ready_url: str) -> None:
    """The owner tries again while somebody holds its row, and the client gets its answer, not an error; nobody else's
    finish waits with it."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        if request.url.query == "hold":
            await gate.wait()
        return paid(request, run)

    api = Api(World(ready_url), "starlette", respond, migrate=False)
    first = api.start("held", "/payments?hold")
    await soon(gate.entered.wait())
    try:
        with open_transaction(ready_url, "held"), watching_for_locks(ready_url) as waits:
            gate.go.set()
            for number in range(20):
                assert (await api.post(f"k-{number}")).status_code == 201
            assert not first.done()
        assert waits == []
        answer = await first
        assert answer.status_code == 201
        assert same(answer, await api.post("held", "/payments?hold"))
    finally:
        await api.close()


# ---------------------------------------------------------------- doubles


class Double(MemoryStore):
    """A store in memory that can be told to fail, and in which a lane can be held."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[str, Sequence[Any]], Exception | None] = lambda verb, batch: None
        self.asked: Counter[str] = Counter()
        self.hold = False
        self.entered = threading.Event()
        self.go = threading.Event()

    def _check(self, verb: str, batch: Sequence[Any]) -> None:
        self.asked[verb] += 1
        if self.hold:
            self.entered.set()
            assert self.go.wait(SECONDS)
        if error := self.fails(verb, batch):
            raise error

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        self._check("reserve", batch)
        return super().reserve(batch)

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        self._check("swap", batch)
        return super().swap(batch)

    def row(self, key: str) -> Record:
        record = self.read([(ONE, key)])[0]
        assert record is not None
        return record


def down(verb: str, batch: Sequence[Any]) -> Exception:
    return StoreUnavailable("down")


@pytest.fixture
async def near() -> AsyncIterator[Callable[..., tuple[Api, Double]]]:
    """Makes apps on a double."""
    made: list[Api] = []

    def make(*args: Any, policy: Policy = PATIENCE, **options: Any) -> tuple[Api, Double]:
        store = Double()
        made.append(Api(World("memory://"), "starlette", *args, store=store, policy=policy, **options))
        return made[-1], store

    yield make
    for api in made:
        store: Any = api.once.store
        store.hold, store.fails = False, lambda verb, batch: None
        store.go.set()
        await api.close()


async def test_the_breaker_opens_and_closes(near: Callable[..., tuple[Api, Double]]) -> None:
    """After failures in a row requests are refused without asking; after a pause one asks, and its success is for
    all."""
    api, store = near()
    now = [1000.0]
    api.once.engine.breaker._clock = lambda: now[0]
    store.fails = down
    for number in range(FAILURES_TO_OPEN):
        assert not api.saw(events.BreakerOpened)
        assert_refused(await api.post(f"k-{number}"))
    assert len(api.saw(events.BreakerOpened)) == 1
    asked = store.asked["reserve"]
    for number in range(20):
        assert_refused(await api.post(f"open-{number}"))
    assert store.asked["reserve"] == asked
    now[0] += 1.5
    assert_refused(await api.post("probe"))  # one may look, and it is still down
    assert_refused(await api.post("not-a-probe"))
    assert store.asked["reserve"] == asked + 2  # a lane asks twice
    store.fails = lambda verb, batch: None
    assert_refused(await api.post("too-early"))
    assert api.runs == 0
    now[0] += 1.5
    assert (await api.post("probe")).status_code == 201
    assert len(api.saw(events.BreakerClosed)) == 1
    assert [(await api.post(f"k-{number}")).status_code for number in range(5)] == [201] * 5


async def test_a_success_between_failures_keeps_the_breaker_closed(near: Callable[..., tuple[Api, Double]]) -> None:
    """Only failures in a row count: a service that mostly works is not switched off."""
    api, store = near()
    for number in range(4 * FAILURES_TO_OPEN):
        store.fails = down if number % FAILURES_TO_OPEN else (lambda verb, batch: None)
        await api.post(f"k-{number}")
    assert not api.saw(events.BreakerOpened)


async def test_an_open_breaker_lets_owners_finish(near: Callable[..., tuple[Api, Double]]) -> None:
    """The breaker gates begin only: whoever holds a key stores its outcome, renews and releases."""
    gate = Gate()
    api, store = near(held(gate))
    first = api.start("k-1")
    await soon(gate.entered.wait())
    store.fails = down
    for number in range(FAILURES_TO_OPEN):
        await api.post(f"down-{number}")
    assert api.saw(events.BreakerOpened)
    store.fails = lambda verb, batch: None
    gate.go.set()
    assert (await first).status_code == 201
    assert store.row("k-1").state is State.COMPLETED


async def test_a_store_that_is_slow_is_503_and_late_work_is_given_back(
    near: Callable[..., tuple[Api, Double]],
) -> None:
    """The answer comes after the caller's patience: not called, and no reservation stays."""
    api, store = near()
    store.hold = True
    assert_refused(await api.post())
    store.hold = False
    store.go.set()
    await until(lambda: store.asked["swap"] >= 1 and not store._rows, "the late reservation is given back")
    assert (await api.post()).status_code == 201
    assert api.runs == 1


async def test_a_store_with_a_bug_is_503_too(near: Callable[..., tuple[Api, Double]]) -> None:
    """Whatever a store raises, the handler is not called, and the message tells no values."""
    api, store = near()
    store.fails = lambda verb, batch: KeyError(f"secret {batch[0].key}")
    answer = await api.post("my-secret-key")
    assert_refused(answer)
    assert "secret" not in answer.text
    assert all("secret" not in str(event) for event in api.events)
    assert api.runs == 0


async def test_a_store_that_sees_neither_row_nor_place_is_409(near: Callable[..., tuple[Api, Double]]) -> None:
    """Hazard 6: a race that cannot be told is "somebody else", never "proceed"."""
    api, store = near()
    store.reserve = lambda batch: [Found(None) for _ in batch]  # type: ignore[method-assign]
    answer = await api.post()
    assert answer.status_code == 409
    assert "retry-after" in answer.headers
    assert api.runs == 0


async def test_a_full_queue_is_503_at_once(near: Callable[..., tuple[Api, Double]]) -> None:
    """More callers than the queue holds are refused without waiting; that is load, and no reason for the breaker."""
    api, store = near(max_queued=2, policy=Policy(begin_timeout=timedelta(seconds=20)))
    store.hold = True
    waiting = [api.start("k-0")]
    await until(store.entered.is_set, "the lane is busy")
    for number in (1, 2):
        waiting.append(api.start(f"k-{number}"))
        await asyncio.sleep(0)
    await until(lambda: _queued(api) >= 2, "two are in the queue")
    for number in range(FAILURES_TO_OPEN + 3):
        assert_refused(await soon(api.post(f"more-{number}"), 5.0))
    assert len(api.saw(events.QueueFull)) == FAILURES_TO_OPEN + 3
    assert not api.saw(events.BreakerOpened)
    store.hold = False
    store.go.set()
    assert [(await task).status_code for task in waiting] == [201, 201, 201]
    assert api.runs == 3


def _queued(api: Api) -> int:
    return sum(lane.queued for lane in api.once.engine.lanes._lanes or ())


async def test_one_bad_row_harms_nobody_else(near: Callable[..., tuple[Api, Double]]) -> None:
    """Hazard 25: of a batch that fails as a whole, all but the bad row are served."""
    api, store = near(policy=Policy(begin_timeout=timedelta(seconds=20)))

    def poisoned(verb: str, batch: Sequence[Any]) -> Exception | None:
        return ValueError("a bad row") if any(item.key == "bad" for item in batch) else None

    store.fails = poisoned
    store.hold = True
    tasks = {key: api.start(key) for key in ["first", "a", "bad", "b", "c"]}
    await until(store.entered.is_set, "the lane is busy")
    await asyncio.sleep(0.02)
    store.hold = False
    store.go.set()
    statuses = {key: (await task).status_code for key, task in tasks.items()}
    assert statuses == {"first": 201, "a": 201, "bad": 503, "b": 201, "c": 201}


async def test_one_outcome_that_cannot_be_stored_does_not_hold_up_the_others(
    near: Callable[..., tuple[Api, Double]],
) -> None:
    """Of the outcomes that the keeper holds, one may meet a row that somebody keeps locked: the rest are stored."""
    gate = Gate()
    api, store = near(held(gate), policy=ATTENTIVE)
    tasks = [api.start("stuck"), api.start("k-2")]
    await until(lambda: api.runs == 2, "both run")

    def both(verb: str, batch: Sequence[Any]) -> Exception | None:
        ends = any(change.event is Event.COMPLETE for change in batch)
        return StoreUnavailable("locked") if verb == "swap" and ends else None

    store.fails = both
    gate.go.set()
    for task in tasks:
        assert_refused(await task, "not-stored")

    def stuck(verb: str, batch: Sequence[Any]) -> Exception | None:
        return both(verb, batch) if any(change.key == "stuck" for change in batch) else None

    store.fails = stuck
    await until(lambda: store.row("k-2").state is State.COMPLETED, "the other outcome is stored", 5.0)
    store.fails = lambda verb, batch: None
    await until(lambda: store.row("stuck").state is State.COMPLETED, "and in the end the first one too", 5.0)


async def test_the_lease_is_kept_while_an_outcome_waits_for_the_store(
    near: Callable[..., tuple[Api, Double]],
) -> None:
    """An outcome that could not be stored yet is still its owner's: nobody takes over and runs it again."""
    policy = Policy(effects="repeatable", lease=timedelta(seconds=0.3), begin_timeout=timedelta(seconds=0.3))
    api, store = near(policy=policy)
    store.fails = lambda verb, batch: (
        StoreUnavailable("no") if verb == "swap" and any(change.event is Event.COMPLETE for change in batch) else None
    )
    assert_refused(await api.post(), "not-stored")
    row = store.row("k-1")
    await until(lambda: store.row("k-1").lease_until > row.created_at + 3 * 0.3, "the lease is renewed")
    assert (await api.post()).status_code == 409
    store.fails = lambda verb, batch: None
    await until(lambda: store.row("k-1").state is State.COMPLETED, "the outcome is stored")
    assert (await api.post()).content == b'{"id":"pay_1"}'
    assert api.runs == 1


async def test_shutdown_stores_what_is_unfinished(near: Callable[..., tuple[Api, Double]]) -> None:
    """The last chance of an outcome is the end of the process, and it is taken."""
    api, store = near()
    store.fails = lambda verb, batch: StoreUnavailable("no") if verb == "swap" else None
    assert_refused(await api.post(), "not-stored")
    store.fails = lambda verb, batch: None
    await api.once.aclose()
    assert store.row("k-1").state is State.COMPLETED


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
    """Reading takes no lock (WAL): what is stored is answered while somebody writes."""
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
