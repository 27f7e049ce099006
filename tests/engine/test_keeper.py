"""The keeper: which leases it renews, how it learns that one is lost, and what it does with unfinished outcomes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from oncekey.core.policy import Policy
from oncekey.core.record import Record, swap
from oncekey.core.states import Actor, Event, State
from oncekey.engine import keeper as keeper_module
from oncekey.engine.engine import Engine
from oncekey.engine.keeper import Keeper, Unfinished
from oncekey.engine.operation import Operation
from oncekey.engine.tickets import SyncTicket
from oncekey.errors import StoreError, StoreUnavailable
from oncekey.telemetry import events
from tests.engine.doubles import (
    PATIENCE,
    RESPONSE,
    Clock,
    FakeStore,
    Heard,
    eventually,
    listening,
    operation_of,
    reservation,
)


def policy(lease: float = 60.0, timeout: float = 5.0) -> Policy:
    return Policy(lease=timedelta(seconds=lease), begin_timeout=timedelta(seconds=timeout))


class Kept:
    """An engine over a fake store, with operations that are watched."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.store = FakeStore(clock=clock)
        self.engine: Engine
        self.heard: Heard
        self.engine, self.heard = listening(self.store)
        self.keeper = self.engine.keeper

    def start(self, key: str = "key-1", lease: float = 60.0, *, timeout: float = 5.0) -> Operation:
        record = self.store.put(reservation(key, lease=lease))
        operation = operation_of(record, policy(lease, timeout))
        self.keeper.watch(operation)
        return operation

    def settle(self) -> None:
        """Everything that was submitted is answered, what that led to included."""
        for _ in range(3):
            for work in (("tenant-1", "x"), ("tenant-1", "y")):
                ticket = SyncTicket(work)
                self.engine.lanes.submit(ticket)
                ticket.wait(PATIENCE)

    def move(self, operation: Operation, event: Event, by: Actor = Actor.OWNER) -> Record | None:
        return self.store.inner.swap([swap(operation.record, event, by)])[0]

    def lease_left(self, key: str = "key-1") -> float:
        row = self.store.row(key)
        assert row is not None
        return row.lease_until - self.clock.now


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Looks only when it is told to, on a clock that stands still."""
    clock = Clock()
    monkeypatch.setattr(keeper_module, "time", clock)
    monkeypatch.setattr(Keeper, "_look_within", lambda self, seconds: None)
    kept = Kept(clock)
    yield kept
    kept.keeper._unfinished.clear()
    kept.engine.close(1.0)


# ---------------------------------------------------------------- renewing


def test_only_what_is_older_than_a_third_of_its_lease_is_renewed(kept: Kept) -> None:
    """A quick handler costs the store nothing; each lease counts from its own start and by its own length."""
    kept.start("long", 60.0)
    kept.start("short", 30.0)
    kept.clock.now += 9.9
    kept.keeper.look()
    kept.settle()
    assert kept.store.asked("swap") == []
    kept.clock.now += 0.1
    kept.keeper.look()
    kept.settle()
    assert kept.store.keys("swap") == [["short"]]
    assert kept.lease_left("short") == 30.0
    assert kept.lease_left("long") == 50.0
    kept.clock.now += 10.0
    kept.keeper.look()
    kept.settle()
    assert sorted(key for batch in kept.store.keys("swap") for key in batch) == ["long", "short", "short"]
    assert kept.lease_left("long") == 60.0


def test_what_is_due_together_is_renewed_in_one_batch(kept: Kept) -> None:
    """Twenty leases are one statement, and one event that says how many."""
    gate = kept.store.hold("read")
    blocker = SyncTicket(("tenant-1", "x"))
    kept.engine.lanes.submit(blocker)
    gate.wait()
    for number in range(20):
        kept.start(f"key-{number}")
    kept.clock.now += 20.0
    kept.keeper.look()
    gate.open()
    kept.settle()
    assert [len(batch) for batch in kept.store.asked("swap")] == [20]
    assert {change.event for change in kept.store.asked("swap")[0]} == {Event.RENEW}
    assert [event.rows for event in kept.heard.of(events.LeaseRenewed)] == [20]
    blocker.wait(PATIENCE)


def test_a_renewal_is_not_repeated_at_every_look(kept: Kept) -> None:
    """The next one is due a third of the lease later."""
    kept.start()
    kept.clock.now += 20.0
    for _ in range(3):
        kept.keeper.look()
        kept.settle()
    assert len(kept.store.asked("swap")) == 1
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert len(kept.store.asked("swap")) == 2


def test_what_has_ended_is_not_renewed(kept: Kept) -> None:
    """Unwatched is unwatched, also twice."""
    operation = kept.start()
    kept.keeper.unwatch(operation)
    kept.keeper.unwatch(operation)
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert kept.store.asked("swap") == []
    assert kept.heard == []


def test_a_renewal_that_failed_is_not_reported_as_one(kept: Kept) -> None:
    """While the store is down no lease is renewed, and the metric must not say so."""
    kept.start()
    kept.store.break_("swap", lambda: StoreUnavailable("down"))
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert kept.heard.of(events.LeaseRenewed) == []


def test_a_renewal_that_failed_is_tried_again(kept: Kept) -> None:
    """The store was down for one look: not lost, still watched, and renewed at the next third."""
    operation = kept.start()
    kept.store.break_("swap", lambda: StoreUnavailable("down"))
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert not operation.lost
    kept.store.heal()
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert kept.lease_left() == 60.0


def test_a_full_queue_does_not_stop_the_keeper(kept: Kept) -> None:
    """A renewal that cannot even be queued waits for its next turn; the others are tried all the same."""
    operations = [kept.start("a"), kept.start("b")]
    kept.engine.lanes._max_queued = 0
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.engine.lanes._max_queued = 10
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert (kept.lease_left("a"), kept.lease_left("b")) == (60.0, 60.0)
    assert not any(operation.lost for operation in operations)


def test_nobody_has_to_listen_to_renewals(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed also where nobody wants the event."""
    monkeypatch.setattr(type(kept.engine.emitter), "wants", lambda self, kind: False)
    kept.start()
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert kept.lease_left() == 60.0
    assert kept.heard == []


# ---------------------------------------------------------------- losing


def _taken_over(kept: Kept, operation: Operation) -> None:
    kept.move(operation, Event.DISCARD)
    kept.store.put(reservation(operation.key, owner="rival"))


@pytest.mark.parametrize(
    "lose",
    [
        _taken_over,
        lambda kept, operation: kept.move(operation, Event.DISCARD),
        lambda kept, operation: kept.move(operation, Event.DOUBT),
    ],
    ids=["another owner", "no row", "another state"],
)
def test_a_lost_lease_is_noticed(kept: Kept, lose: Any) -> None:
    """A renewal that moved nothing reads the row; where it is not ours any more, the operation is told, once."""
    operation, other = kept.start(), kept.start("other")
    lose(kept, operation)
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert operation.lost
    assert not other.lost
    assert [(event.move, event.scope) for event in kept.heard.of(events.LeaseLost)] == [("renew", "tenant-1")]
    asked = len(kept.store.asked("swap"))
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert [key for batch in kept.store.keys("swap")[asked:] for key in batch] == ["other"]
    assert len(kept.heard.of(events.LeaseLost)) == 1


def test_a_row_that_is_merely_locked_is_not_lost(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody holds the row, so it was skipped: the row still says that it is ours, and the keeper goes on."""
    operation = kept.start()
    monkeypatch.setattr(kept.store.inner, "swap", lambda batch: [None] * len(batch))
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert ["key-1"] in kept.store.keys("read")
    assert not operation.lost
    monkeypatch.undo()
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert not operation.lost
    assert kept.heard.of(events.LeaseLost) == []


def test_an_operation_that_ended_meanwhile_is_not_called_lost(kept: Kept) -> None:
    """It finished between the renewal and its answer: the row has moved on, as it should."""
    operation = kept.start()
    gate = kept.store.hold("swap")
    kept.clock.now += 20.0
    kept.keeper.look()
    gate.wait()
    kept.keeper.unwatch(operation)
    kept.move(operation, Event.RELEASE)
    gate.open()
    kept.settle()
    assert not operation.lost
    assert ["key-1"] not in kept.store.keys("read")


def test_an_operation_that_ended_during_the_second_look_is_not_called_lost(kept: Kept) -> None:
    """It finished between the reading of its row and the answer."""
    operation = kept.start()
    kept.move(operation, Event.RELEASE)
    gate = kept.store.hold("read")
    kept.clock.now += 20.0
    kept.keeper.look()
    gate.wait()
    kept.keeper.unwatch(operation)
    gate.open()
    kept.settle()
    assert not operation.lost
    assert kept.heard.of(events.LeaseLost) == []


def test_a_row_that_cannot_be_read_is_not_lost(kept: Kept) -> None:
    """An error says nothing about the lease."""
    operation = kept.start()
    kept.move(operation, Event.RELEASE)
    kept.store.break_("read", lambda: StoreUnavailable("down"), times=2, about=lambda keys: keys[0][1] == "key-1")
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert not operation.lost
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert operation.lost


# ---------------------------------------------------------------- outcomes that could not be stored


def unfinished(operation: Operation) -> Unfinished:
    return Unfinished(operation, Event.COMPLETE, RESPONSE, None)


def test_an_unfinished_outcome_is_stored_when_the_store_is_back(kept: Kept) -> None:
    """While the store is down every look tries again; then the response is stored and the lease let go."""
    operation = kept.start()
    kept.store.break_("swap", lambda: StoreUnavailable("down"))
    kept.keeper.adopt(unfinished(operation))
    for _ in range(2):
        kept.keeper.look()
    row = kept.store.row()
    assert row is not None
    assert row.state is State.IN_PROGRESS
    kept.store.heal()
    kept.keeper.look()
    row = kept.store.row()
    assert row is not None
    assert (row.state, row.response) == (State.COMPLETED, RESPONSE)
    assert kept.keeper._live == {}
    assert kept.heard.kinds()[-1] == "Completed"
    asked = len(kept.store.batches)
    kept.keeper.look()
    assert len(kept.store.batches) == asked


def test_the_lease_of_an_unfinished_outcome_is_kept(kept: Kept) -> None:
    """Reserving and renewing may work where storing a large response does not: the key stays its owner's."""
    operation = kept.start()
    kept.store.break_(
        "swap", lambda: StoreUnavailable("down"), about=lambda batch: any(c.event is Event.COMPLETE for c in batch)
    )
    kept.keeper.adopt(unfinished(operation))
    kept.clock.now += 50.0
    kept.keeper.look()
    kept.settle()
    assert kept.lease_left() == 60.0


def test_an_unfinished_outcome_whose_lease_was_lost_is_dropped(kept: Kept) -> None:
    """The key is somebody else's by now: nothing is written, and nothing is kept (I3)."""
    operation = kept.start()
    kept.keeper.adopt(unfinished(operation))
    _taken_over(kept, operation)
    kept.keeper.look()
    row = kept.store.row()
    assert row is not None
    assert row.owner == "rival"
    assert operation.lost
    assert kept.keeper._unfinished == []


def test_all_unfinished_outcomes_are_stored_in_one_look(kept: Kept) -> None:
    """The store is back: whatever waits is stored without waiting for the next look."""
    operations = [kept.start(f"key-{number}") for number in range(5)]
    for operation in operations:
        kept.keeper.adopt(unfinished(operation))
    kept.keeper.look()
    rows = [kept.store.row(operation.key) for operation in operations]
    assert [row and row.state for row in rows] == [State.COMPLETED] * 5


def test_one_outcome_that_cannot_be_stored_does_not_hold_up_the_others(kept: Kept) -> None:
    """A response that the store refuses for its contents harms nobody behind it (hazard 25)."""
    bad, good = kept.start("bad"), kept.start("good")
    kept.store.break_("swap", lambda: StoreError("refused"), about=lambda batch: any(c.key == "bad" for c in batch))
    kept.keeper.adopt(unfinished(bad))
    kept.keeper.adopt(unfinished(good))
    kept.keeper.look()
    kept.keeper.look()
    row = kept.store.row("good")
    assert row is not None
    assert row.state is State.COMPLETED


def test_the_number_of_unfinished_outcomes_is_bounded(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Past the bound an outcome is left to its lease, which is no longer renewed; the log says so."""
    monkeypatch.setattr(keeper_module, "MAX_UNFINISHED", 2)
    operations = [kept.start(f"key-{number}") for number in range(3)]
    with caplog.at_level(logging.ERROR, "oncekey"):
        for operation in operations:
            kept.keeper.adopt(unfinished(operation))
    assert "more than 2 outcomes wait" in caplog.text
    assert set(kept.keeper._live) == {operation.owner for operation in operations[:2]}
    kept.keeper.look()
    rows = [kept.store.row(operation.key) for operation in operations]
    assert [row and row.state for row in rows] == [State.COMPLETED, State.COMPLETED, State.IN_PROGRESS]


# ---------------------------------------------------------------- the thread


@pytest.fixture
def running() -> Iterator[Kept]:
    """Real time and a real thread."""
    import time

    class Real(Clock):
        def __call__(self) -> float:
            return time.time()

    kept = Kept(Real())
    yield kept
    kept.keeper._unfinished.clear()
    kept.engine.close(1.0)


def test_no_thread_before_the_first_handler(running: Kept) -> None:
    """An engine that is only made has no keeper's thread."""
    assert running.keeper._thread is None
    running.start()
    assert running.keeper._thread is not None


def test_a_short_lease_wakes_a_keeper_that_waits_for_a_long_one(running: Kept) -> None:
    """The keeper would look in five seconds; the new lease lasts half of one, and is renewed in time."""
    running.start("long", 3600.0)
    eventually(lambda: not running.keeper._wake.is_set())
    operation = running.start("short", 0.6)
    eventually(lambda: running.store.keys("swap"))
    assert running.store.keys("swap")[0] == ["short"]
    assert not operation.lost


def test_an_adopted_outcome_wakes_the_keeper(running: Kept) -> None:
    """The next look comes at once, not in five seconds."""
    operation = running.start("long", 3600.0)
    running.keeper.adopt(unfinished(operation))
    eventually(lambda: running.store.row("long").state is State.COMPLETED)  # type: ignore[union-attr]


def test_a_keeper_that_stumbles_goes_on(
    running: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a look raises is logged, and the next look comes."""
    looks: list[int] = []
    again = threading.Event()

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise RuntimeError("stumbled over this")
        again.set()

    monkeypatch.setattr(running.keeper, "look", look)
    with caplog.at_level(logging.ERROR, "oncekey"):
        running.start("short", 0.12)
        assert again.wait(PATIENCE)
    assert "the keeper stumbled" in caplog.text


def test_closing_stores_what_is_unfinished(running: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last try is made on the way out, after the thread has ended."""
    monkeypatch.setattr(Keeper, "look", lambda self: None)
    operation = running.start()
    running.keeper.adopt(unfinished(operation))
    running.keeper.close(PATIENCE)
    assert running.keeper._thread is not None
    assert not running.keeper._thread.is_alive()
    row = running.store.row()
    assert row is not None
    assert row.state is State.COMPLETED


def test_closing_gives_up_on_a_store_that_is_down(kept: Kept) -> None:
    """An outcome that cannot be stored at the end is left to its lease, and closing goes on."""
    operation = kept.start()
    kept.store.break_("swap", lambda: StoreUnavailable("down"))
    kept.keeper.adopt(unfinished(operation))
    kept.keeper.close(PATIENCE)
    row = kept.store.row()
    assert row is not None
    assert row.state is State.IN_PROGRESS


def test_closing_survives_whatever_the_last_try_raises(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in the last try is logged, and the lanes are closed all the same."""

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(kept.engine, "run_blocking", broken)
    kept.keeper.adopt(unfinished(kept.start()))
    with caplog.at_level(logging.ERROR, "oncekey"):
        assert kept.engine.close(PATIENCE)
    assert "could not be stored before the end" in caplog.text


def test_closing_beside_a_slow_keeper_loses_no_outcome(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is still storing the first outcome when closing begins to: the second must be stored too."""
    both = threading.Barrier(2)
    begun = threading.Event()
    stored: list[str] = []

    def together() -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)

    class Slow(list[Unfinished]):
        """Two threads that take an outcome off the list do so at the same moment."""

        def pop(self, at: Any = -1) -> Unfinished:
            together()
            taken = super().pop(at)
            together()
            return taken

    def run_blocking(flow: Any, timeout: float) -> None:
        stored.append(next(flow).key)
        begun.set()

    kept.keeper._unfinished = Slow()
    monkeypatch.setattr(kept.engine, "run_blocking", run_blocking)
    for key in ("first", "second"):
        kept.keeper.adopt(unfinished(kept.start(key)))

    def look() -> None:
        with suppress(IndexError):
            kept.keeper.look()

    keeper = threading.Thread(target=look)
    kept.keeper._thread = keeper
    keeper.start()
    assert begun.wait(PATIENCE)
    kept.keeper.close(0.01)
    keeper.join(PATIENCE)
    assert "second" in stored


def test_after_closing_no_thread_is_started(running: Kept) -> None:
    """A handler that begins after the close is watched by nobody."""
    running.keeper.close(PATIENCE)
    running.start()
    assert running.keeper._thread is None


def test_a_forked_child_keeps_nothing_of_its_parents(kept: Kept) -> None:
    """Handlers in flight and outcomes are the parent's: the child neither renews nor stores them."""
    kept.keeper.adopt(unfinished(kept.start()))
    kept.keeper.after_fork()
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert kept.store.asked("swap") == []
    assert kept.keeper._thread is None
