"""The same flows through the two drivers, against a store in memory: one that awaits, one that blocks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from oncekey.core.decision import Busy, Execute, Replay, Unknown
from oncekey.core.policy import Policy
from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import swap
from oncekey.engine import engine as engine_module
from oncekey.engine.batching.ticket import SyncTicket
from oncekey.engine.engine import Engine
from oncekey.engine.flows import Pause
from oncekey.errors import ConfigurationError, StoreOverloaded, StoreUnavailable
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter
from tests.engine.doubles import (
    PATIENCE,
    RESPONSE,
    FakeStore,
    Heard,
    eventually,
    operation_of,
    reservation,
)

Drive = Callable[..., Any]


def awaiting(engine: Engine, flow: Any, timeout: float = PATIENCE) -> Any:
    return asyncio.run(engine.run(flow, timeout))


def blocking(engine: Engine, flow: Any, timeout: float = PATIENCE) -> Any:
    return engine.run_blocking(flow, timeout)


@pytest.fixture(params=[awaiting, blocking])
def drive(request: pytest.FixtureRequest) -> Drive:
    driver: Drive = request.param
    return driver


class Open:
    def __init__(self, **options: Any) -> None:
        self.store = FakeStore()
        self.heard = Heard()
        self.engine = Engine(self.store, emitter=Emitter(self.heard.append), **options)


@pytest.fixture
def it() -> Iterator[Open]:
    opened = Open()
    yield opened
    opened.engine.close(1.0)


WAITING = Policy(in_flight="wait", wait=timedelta(seconds=PATIENCE * 2))


# ---------------------------------------------------------------- the way of a request


def test_a_request_and_its_replay(it: Open, drive: Drive) -> None:
    """Begin, finish, and the same key again: executed once, replayed byte for byte, in two questions and one."""
    policy = Policy()
    decision = drive(it.engine, it.engine.begin(reservation(), policy))
    assert isinstance(decision, Execute)
    finished = drive(it.engine, it.engine.finish(operation_of(decision.record), Event.COMPLETE, RESPONSE))
    assert finished.stored
    assert [verb for verb, _ in it.store.batches] == ["reserve", "swap"]
    again = drive(it.engine, it.engine.begin(reservation(), policy))
    assert isinstance(again, Replay)
    assert again.record.response == RESPONSE
    assert [verb for verb, _ in it.store.batches] == ["reserve", "swap", "reserve"]
    assert it.heard.kinds() == ["Reserved", "Completed", "Replayed"]


def test_a_released_key_is_retried_and_counted(it: Open, drive: Drive) -> None:
    """The second attempt is attempt 2, under another token."""
    first = drive(it.engine, it.engine.begin(reservation(), Policy()))
    drive(it.engine, it.engine.finish(operation_of(first.record), Event.RELEASE, None, "not executed"))
    second = drive(it.engine, it.engine.begin(reservation(), Policy()))
    assert isinstance(second, Execute)
    assert second.record.attempt == 2
    assert it.heard.kinds() == ["Reserved", "Released", "Retried"]


def test_lapsed_external_key_becomes_unknown_once(it: Open, drive: Drive) -> None:
    """The lease is over: unknown for this request and for every other, and no handler runs."""
    it.store.put(reservation(effects=Effects.EXTERNAL, lease=-1.0))
    for _ in range(2):
        assert isinstance(drive(it.engine, it.engine.begin(reservation(), Policy())), Unknown)
    assert it.heard.kinds() == ["ZombieFound", "ReconcileScheduled", "FoundUnknown", "FoundUnknown"]
    row = it.store.row()
    assert row is not None
    assert (row.state, row.last_error) == (State.UNKNOWN, "the lease ran out")
    assert row.reconcile_at is not None


def test_a_completion_is_stored_though_its_answers_are_lost(it: Open, drive: Drive) -> None:
    """The swap happens and is cut; asked again it moves nothing; the row says that it was us (hazard 9)."""
    begun = drive(it.engine, it.engine.begin(reservation(), Policy()))
    it.store.break_("swap", lambda: StoreUnavailable("cut"), times=1, applied=True)
    finished = drive(it.engine, it.engine.finish(operation_of(begun.record), Event.COMPLETE, RESPONSE))
    assert finished.stored
    assert finished.record.response == RESPONSE
    assert [verb for verb, _ in it.store.batches] == ["reserve", "swap", "swap", "read"]


def test_a_row_that_is_held_is_waited_for(it: Open, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another transaction holds the row for two tries: the owner pauses briefly and gets through."""
    begun = drive(it.engine, it.engine.begin(reservation(), Policy()))
    answers = [[None], [None]]
    real = it.store.inner.swap
    monkeypatch.setattr(it.store.inner, "swap", lambda batch: answers.pop() if answers else real(batch))
    assert drive(it.engine, it.engine.finish(operation_of(begun.record), Event.COMPLETE, RESPONSE)).stored
    assert it.engine.waiters == {}


# ---------------------------------------------------------------- errors


def test_a_store_that_is_down_is_raised_and_counted(it: Open, drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    """The flow sees the error, so the breaker opens, and the sixth request asks nothing."""
    it.store.break_("reserve", lambda: StoreUnavailable("down"))
    it.store.break_("swap", lambda: StoreUnavailable("down"))
    for _ in range(5):
        with pytest.raises(StoreUnavailable, match="down"):
            drive(it.engine, it.engine.begin(reservation(), Policy()))
    asked = len(it.store.asked("reserve"))
    with pytest.raises(StoreUnavailable, match=r"failed repeatedly.*: down"):
        drive(it.engine, it.engine.begin(reservation(), Policy()))
    assert len(it.store.asked("reserve")) == asked == 10
    assert it.heard.kinds().count("BreakerOpened") == 1
    failed = it.heard.of(events.StoreFailed)
    assert {event.verb for event in failed} == {"reserve"}
    assert sum(event.amount for event in failed) == 5, "each request counts once"
    lines = [line for line in caplog.messages if line.startswith("StoreFailed")]
    assert lines == ["StoreFailed verb=reserve error='StoreUnavailable: down' requests=1"]


def test_a_hung_store_is_left_and_its_late_row_given_back(it: Open, drive: Drive) -> None:
    """The caller gets StoreUnavailable after its own time, and the reservation that arrives later is undone (I7)."""
    gate = it.store.hold("reserve")
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        drive(it.engine, it.engine.begin(reservation(), Policy()), 0.01)
    gate.open()
    assert it.engine.router.close(PATIENCE)
    assert it.store.row() is None


def test_a_full_queue_is_reported(drive: Drive) -> None:
    """Refused before it was queued: the event names the verb, and the breaker stays closed."""
    opened = Open(max_queued=0)
    with pytest.raises(StoreOverloaded):
        drive(opened.engine, opened.engine.begin(reservation(), Policy()))
    assert opened.heard.kinds() == ["QueueFull"]
    assert opened.heard.of(events.QueueFull)[0].verb == "reserve"
    assert opened.engine.breaker.allows()
    opened.engine.close(1.0)


def test_an_error_that_is_not_the_operators_passes_through(it: Open, drive: Drive) -> None:
    """A mistake of the application is raised as it is, and the breaker does not count it."""
    it.store.break_("reserve", lambda: ConfigurationError("no such thing"))
    for _ in range(6):
        with pytest.raises(ConfigurationError):
            drive(it.engine, it.engine.begin(reservation(), Policy()))
    assert it.engine.breaker.allows()


# ---------------------------------------------------------------- waiting for the one in flight


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter looks again only after a minute: one that ends sooner was woken."""
    monkeypatch.setattr(engine_module, "FIRST_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(engine_module, "LONGEST_WAIT_SECONDS", 60.0)


@pytest.mark.parametrize("finisher", [awaiting, blocking])
def test_a_waiter_in_the_same_process_is_woken(it: Open, drive: Drive, finisher: Drive, patient: None) -> None:
    """A finish wakes the waiters of this key, in a thread or in a loop of its own, and none is left registered."""
    begun = blocking(it.engine, it.engine.begin(reservation(), Policy()))
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(drive, it.engine, it.engine.begin(reservation(), WAITING))
        eventually(lambda: it.engine.waiters)
        assert finisher(it.engine, it.engine.finish(operation_of(begun.record), Event.COMPLETE, RESPONSE)).stored
        decision = waiter.result(PATIENCE)
    assert isinstance(decision, Replay)
    assert decision.record.response == RESPONSE
    assert it.engine.waiters == {}


def test_all_waiters_of_a_key_are_woken_and_no_others(it: Open, patient: None) -> None:
    """Three wait for one key, one for another: the finish of the first key wakes its three."""
    begun = blocking(it.engine, it.engine.begin(reservation(), Policy()))
    other = blocking(it.engine, it.engine.begin(reservation("other"), Policy()))
    with ThreadPoolExecutor(4) as pool:
        mine = [pool.submit(blocking, it.engine, it.engine.begin(reservation(), WAITING)) for _ in range(3)]
        theirs = pool.submit(blocking, it.engine, it.engine.begin(reservation("other"), WAITING))
        eventually(lambda: sum(len(waiters) for waiters in list(it.engine.waiters.values())) == 4)
        blocking(it.engine, it.engine.finish(operation_of(begun.record), Event.COMPLETE, RESPONSE))
        assert all(isinstance(waiter.result(PATIENCE), Replay) for waiter in mine)
        assert set(it.engine.waiters) == {("tenant-1", "other")}
        assert not theirs.done()
        blocking(it.engine, it.engine.finish(operation_of(other.record), Event.COMPLETE, RESPONSE))
        assert isinstance(theirs.result(PATIENCE), Replay)
    assert it.engine.waiters == {}


def test_a_waiter_looks_again_by_itself(it: Open, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finished: nothing wakes us, and the next look finds the answer."""
    monkeypatch.setattr(engine_module, "FIRST_WAIT_SECONDS", 0.01)
    record = it.store.put(reservation())
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(drive, it.engine, it.engine.begin(reservation(), WAITING))
        eventually(lambda: len(it.store.asked("reserve")) >= 2)
        it.store.inner.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])
        assert isinstance(waiter.result(PATIENCE), Replay)
    assert it.engine.waiters == {}


def test_waiting_ends_with_a_conflict(it: Open, drive: Drive) -> None:
    """The first request is not done in time: 409, an event, and no waiter is left registered."""
    it.store.put(reservation())
    policy = Policy(in_flight="wait", wait=timedelta(seconds=1.5))
    decision = drive(it.engine, it.engine.begin(reservation(), policy))
    assert isinstance(decision, Busy)
    assert it.heard.kinds() == ["FoundInFlight", "WaitedOut"]
    assert len(it.store.asked("reserve")) >= 2
    assert it.engine.waiters == {}


def test_a_waiter_that_is_cancelled_is_forgotten(it: Open, patient: None) -> None:
    """A task that is cancelled in the middle of its pause leaves nothing behind."""
    it.store.put(reservation())

    async def main() -> None:
        task = asyncio.create_task(it.engine.run(it.engine.begin(reservation(), WAITING), PATIENCE))
        await asyncio.to_thread(eventually, lambda: it.engine.waiters)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert it.engine.waiters == {}


def test_waiter_of_a_closed_loop_does_not_stop_the_others(it: Open, patient: None) -> None:
    """A loop was closed under its waiter: the finish of that key is stored and says so, and wakes the others."""
    begun = blocking(it.engine, it.engine.begin(reservation(), Policy()))
    loop = asyncio.new_event_loop()
    task = loop.create_task(it.engine.run(it.engine.begin(reservation(), WAITING), PATIENCE))
    while not it.engine.waiters:
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    try:
        finished = blocking(it.engine, it.engine.finish(operation_of(begun.record), Event.COMPLETE, RESPONSE))
    finally:
        it.engine.waiters.clear()
        task.get_coro().close()
    assert finished.stored


def test_a_pause_ends_when_its_time_is_over(it: Open, drive: Drive) -> None:
    """Nothing happened to the key: the flow goes on after the pause, and not before."""

    def flow() -> Any:
        begun = time.monotonic()
        answer = yield Pause(("tenant-1", "key-1"), 0.02)
        return answer, time.monotonic() - begun

    answer, seconds = drive(it.engine, flow())
    assert answer is None
    assert 0.015 <= seconds < PATIENCE
    assert it.engine.waiters == {}


# ---------------------------------------------------------------- the end


def test_closing_finishes_and_lets_go(it: Open, drive: Drive) -> None:
    """What is queued is done and the store is closed. A later use opens it again, for another close to end."""
    drive(it.engine, it.engine.begin(reservation(), Policy()))
    assert it.engine.close(PATIENCE)
    assert it.store.closed
    it.store.closed = False
    assert isinstance(drive(it.engine, it.engine.begin(reservation("b"), Policy())), Execute)
    assert it.engine.close(PATIENCE)
    assert it.store.closed


def test_closing_with_a_hung_store_returns_false(it: Open) -> None:
    """False, in time, and the store is closed all the same, which ends the hung call where that is possible."""
    gate = it.store.hold("reserve")
    it.engine.router.submit(SyncTicket(reservation()))
    gate.wait()
    assert it.engine.close(0.05) is False
    assert it.store.closed
    gate.open()


def test_migrating_is_the_first_thing_that_happens() -> None:
    """With ``migrate`` the tables are made on first use, once, before the first question."""
    opened = Open(migrate=True)
    assert opened.store.batches == []
    for key in "ab":
        blocking(opened.engine, opened.engine.begin(reservation(key), Policy()))
    assert [verb for verb, _ in opened.store.batches] == ["migrate", "reserve", "reserve"]
    opened.engine.close(1.0)


def test_many_callers_of_one_key_have_one_owner(it: Open) -> None:
    """64 threads begin the same key at once: one executes, 63 are told that it is in flight (I1)."""
    begin = threading.Barrier(64)

    def request(number: int) -> Any:
        flow = it.engine.begin(reservation(), Policy())
        begin.wait(PATIENCE)
        return it.engine.run_blocking(flow, PATIENCE)

    with ThreadPoolExecutor(64) as pool:
        decisions = list(pool.map(request, range(64)))
    assert sum(isinstance(decision, Execute) for decision in decisions) == 1
    assert sum(isinstance(decision, Busy) for decision in decisions) == 63


def test_many_coroutines_of_one_key_have_one_owner(it: Open) -> None:
    """The same for coroutines, which reach the lane as one batch that names the key once."""

    async def main() -> list[Any]:
        flows = [it.engine.begin(reservation(), Policy()) for _ in range(64)]
        return list(await asyncio.gather(*(it.engine.run(flow, PATIENCE) for flow in flows)))

    decisions = asyncio.run(main())
    executed = [decision.record for decision in decisions if isinstance(decision, Execute)]
    assert len(executed) == 1
    assert isinstance(executed[0], Record)
    assert all(len({work.key for work in batch}) == len(batch) for batch in it.store.asked("reserve"))
