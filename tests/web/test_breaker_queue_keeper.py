"""What keeps a service going on a store that fails: the breaker, a queue with an end, and the keeper of outcomes.

The store is a double in memory, in whose verbs a test can hold the lane or let it fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from oncekey import Policy
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import Event, State
from oncekey.core.swaps import Swap
from oncekey.engine.breaker import FAILURES_TO_OPEN
from oncekey.errors import StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.telemetry import events
from tests.web.apps import ATTENTIVE, ONE, PATIENCE, SECONDS, Api, Gate, World, held, soon, until
from tests.web.checks import assert_refused


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


# ---------------------------------------------------------------- the breaker


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
    """The breaker gates begin only: an owner of a key stores its outcome, renews and releases."""
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


# ---------------------------------------------------------------- lanes and their queue


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
    """Hazard 6: a race that cannot be told counts as another owner, never as "proceed"."""
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
    return sum(lane.queued for lane in api.once.engine.router._lanes or ())


async def test_bad_row_fails_alone_in_its_batch(near: Callable[..., tuple[Api, Double]]) -> None:
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


# ---------------------------------------------------------------- the keeper


async def test_one_outcome_that_cannot_be_stored_does_not_hold_up_the_others(
    near: Callable[..., tuple[Api, Double]],
) -> None:
    """Of the outcomes that the keeper holds, one may meet a row that stays locked: the rest are stored."""
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
    """An outcome that could not be stored yet is still its owner's: no request takes over and runs it again."""
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


async def test_shutdown_stores_unfinished_outcomes(near: Callable[..., tuple[Api, Double]]) -> None:
    """The last chance of an outcome is the end of the process, and it is taken."""
    api, store = near()
    store.fails = lambda verb, batch: StoreUnavailable("no") if verb == "swap" else None
    assert_refused(await api.post(), "not-stored")
    store.fails = lambda verb, batch: None
    await api.once.aclose()
    assert store.row("k-1").state is State.COMPLETED
