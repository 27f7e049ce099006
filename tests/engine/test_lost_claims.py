"""A claim whose answer was lost: the row has its owner token, and no other process will end it.

I1: a request that looks again must not take its own claim for a reservation. Given back as one, the row would be
deleted with its steps, and the next retry would charge again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import Swap, swap
from oncekey.engine.batching import thread_lane as lane_module
from oncekey.errors import StoreError, StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.web.asgi import IdempotencyMiddleware
from tests.engine.doubles import FakeStore, eventually, reservation
from tests.engine.lanes import Open, ask

BEGIN_SECONDS = 0.3


@pytest.fixture(autouse=True)
def quick_debts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "_RETRY_SECONDS", 0.01)


def retryable(store: FakeStore) -> Record:
    moved = store.inner.swap([swap(store.put(reservation()), Event.RELEASE, Actor.OWNER)])[0]
    assert moved is not None
    return moved


# ---------------------------------------------------------------- in a lane


def test_a_claim_whose_answer_was_lost_is_known_by_its_token(open_lanes: Open) -> None:
    """Asked again, it finds nothing to move: it has moved it. Taken for another owner's, it would have no owner."""
    store = FakeStore()
    router = open_lanes(store)
    row = retryable(store)
    store.break_("swap", lambda: StoreUnavailable("cut"), times=1, applied=True)
    wanted = reservation()
    moved = ask(router, swap(row, Event.RETRY, Actor.REQUEST, reservation=wanted))
    assert isinstance(moved, Record)
    assert (moved.owner, moved.attempt, moved.state) == (wanted.owner, 2, State.IN_PROGRESS)


def test_a_claim_that_a_rival_was_faster_with_is_not_ours_the_second_time(open_lanes: Open) -> None:
    store = FakeStore()
    router = open_lanes(store)
    row = retryable(store)
    assert store.swap([swap(row, Event.RETRY, Actor.REQUEST, reservation=reservation(owner="a rival"))])[0] is not None
    store.break_("swap", lambda: StoreUnavailable("cut"), times=1)
    assert ask(router, swap(row, Event.RETRY, Actor.REQUEST, reservation=reservation())) is None
    assert store.row().owner == "a rival"  # type: ignore[union-attr]


def test_claim_with_a_lost_answer_is_released_if_it_cannot_be_read(open_lanes: Open) -> None:
    """Made, its answer lost, and no store to ask: its caller gets 503, and the key is free for the next."""
    store = FakeStore()
    router = open_lanes(store)
    row = retryable(store)
    store.break_("swap", lambda: StoreUnavailable("cut"), times=1, applied=True)
    store.break_("read", lambda: StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        ask(router, swap(row, Event.RETRY, Actor.REQUEST, reservation=reservation()))
    store.heal()
    eventually(lambda: store.row().state is State.FAILED_RETRYABLE)  # type: ignore[union-attr]
    assert store.row().attempt == 2  # type: ignore[union-attr]


# ---------------------------------------------------------------- a whole request


class Faults:
    """The next claim is made, and its answer lost; then comes a second trouble."""

    second = ""
    lost = 0
    asking: asyncio.Task[None]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        is_claim = any(change.event is Event.RETRY for change in batch)
        if is_claim and self.lost == 2 and self.second.endswith("claim"):
            self._trouble()
        moved: list[Record | None] = super().swap(batch)  # type: ignore[misc]
        if is_claim and self.lost == 1:
            self.lost = 2
            raise StoreUnavailable("made, and the answer lost")
        return moved

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        self._when("reserve")
        return super().reserve(batch)  # type: ignore[misc]

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        self._when("read")
        return super().read(keys)  # type: ignore[misc]

    def _when(self, verb: str) -> None:
        if self.lost == 2 and self.second.endswith(verb):
            self._trouble()

    def _trouble(self) -> None:
        self.lost = 0
        match self.second.split()[0]:
            case "slow":
                time.sleep(2 * BEGIN_SECONDS)
            case "left":
                self.asking.get_loop().call_soon_threadsafe(self.asking.cancel)
                time.sleep(0.1)
            case "down":
                raise StoreUnavailable("down")
            case _:
                raise StoreError("refused")


class FaultyMemory(Faults, MemoryStore):
    pass


class FaultySqlite(Faults, SqliteStore):
    in_loop = None  # type: ignore[assignment]  # by the lanes, as in every WSGI app


SECOND = [f"{how} {verb}" for verb in ("reserve", "read", "claim") for how in ("slow", "left", "down", "refused")]


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    store = FaultyMemory() if request.param == "memory" else FaultySqlite(tmp_path / "keys.db")
    yield store
    store.close()


async def _ask(app: Any, store: Any) -> int | None:
    """The status, or None where the client has left."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/pay", "headers": [(b"idempotency-key", b"k-1")]}
    store.asking = asyncio.ensure_future(app(scope, receive, send))
    try:
        await store.asking
    except asyncio.CancelledError:
        return None
    except ValueError:
        return 500
    status: int = sent[0]["status"]
    return status


async def _first(app: Any, store: Any, runs: list[int]) -> int | None:
    """The answer of the first request that reached the handler. On a busy machine one before it may time out."""
    status = await _ask(app, store)
    while not runs:
        status = await _ask(app, store)
    return status


async def _settled(app: Any, store: Any, wanted: int) -> None:
    """Ask as a client does, until the answer is final."""
    for _ in range(100):
        if await _ask(app, store) == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it was not settled")


@pytest.mark.parametrize("second", SECOND)
async def test_a_charge_is_not_made_again(store: Any, second: str) -> None:
    """Its first attempt has charged, and failed after that; the retry's claim is lost, and what follows fails too."""
    charges: list[int] = []

    async def charge() -> int:
        charges.append(1)
        return len(charges)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await current().effect("charge", charge, repeatable=False)
        if current().attempt == 1:
            raise ValueError("after the charge")
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    policy = Policy(effects="phased", begin_timeout=timedelta(seconds=BEGIN_SECONDS))
    once = OnceKey(store, scope=SINGLE_TENANT, policy=policy)
    protected = IdempotencyMiddleware(app, once)
    assert await _first(protected, store, charges) == 500
    store.lost, store.second = 1, second
    await _ask(protected, store)
    await _settled(protected, store, 201)
    assert charges == [1]
    await once.aclose()


@pytest.mark.parametrize("second", [each for each in SECOND if not each.endswith("reserve")])
async def test_a_claim_is_not_left_behind(store: Any, second: str) -> None:
    """Nothing ever ran, so the key stays one that may be retried: not in progress for a lease, and not unknown then."""
    runs: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise NotExecuted
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    policy = Policy(begin_timeout=timedelta(seconds=BEGIN_SECONDS))
    once = OnceKey(store, scope=SINGLE_TENANT, policy=policy)
    protected = IdempotencyMiddleware(app, once)
    assert await _first(protected, store, runs) == 503
    store.lost, store.second = 1, second
    await _ask(protected, store)
    await _settled(protected, store, 201)
    assert len(runs) == 2
    await once.aclose()
