"""The keeper: which leases it renews, and how it learns that one is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from oncekey.core.leases import LOOKS_PER_LEASE, overdue_lease
from oncekey.core.states import Event
from oncekey.engine.batching.ticket import SyncTicket
from oncekey.errors import StoreUnavailable
from oncekey.telemetry import events
from tests.engine.doubles import (
    PATIENCE,
)
from tests.engine.kept_operations import Kept, taken_over

# ---------------------------------------------------------------- renewing


def test_lease_is_renewed_after_a_third_of_its_time(kept: Kept) -> None:
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


@pytest.mark.parametrize("lease", [3.0, 60.0])
def test_renewals_of_a_live_handler_are_never_overdue(kept: Kept, lease: float) -> None:
    """For another process, which sees the row alone; looked at throughout five renewals, each as late as it may be."""
    kept.start("slow", lease)
    seen: set[float | None] = set()
    for _ in range(5 * 5):
        for _ in range(10):  # so that four looks are just less than a third of the lease
            row = kept.store.row("slow")
            assert row is not None
            seen.add(overdue_lease(replace(row, now=kept.clock.now), lease))
            kept.clock.now += 0.99 * lease / LOOKS_PER_LEASE / 10
        kept.keeper.look()
        kept.settle()
    assert len(kept.store.asked("swap")) == 5
    assert seen == {None}


def test_live_handler_of_this_process_is_not_overdue_whatever_its_row_says(kept: Kept) -> None:
    """An enlisted transaction holds its row, so that the lease in it is not renewed."""
    operation = kept.start()
    aged = replace(operation.record, now=operation.record.now + 50.0)
    assert kept.engine.overdue_lease(aged, operation.policy) is None
    kept.keeper.unwatch(operation)
    assert kept.engine.overdue_lease(aged, operation.policy) == 10.0


def test_leases_due_together_are_renewed_in_one_batch(kept: Kept) -> None:
    """Twenty leases are one statement, and one event that says how many."""
    gate = kept.store.hold("read")
    blocker = SyncTicket(("tenant-1", "x"))
    kept.engine.router.submit(blocker)
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


def test_renewal_is_not_sent_again_while_the_store_is_slow_to_answer_it(kept: Kept) -> None:
    """Otherwise a slow store gets ever more renewals, and at last does nothing else (I4)."""
    kept.start()
    gate = kept.store.hold("swap")
    kept.clock.now += 20.0
    kept.keeper.look()
    gate.wait()
    for _ in range(2):
        kept.clock.now += 19.0
        kept.keeper.look()
    gate.open()
    kept.settle()
    assert len(kept.store.asked("swap")) == 1
    kept.keeper.look()
    kept.settle()
    assert len(kept.store.asked("swap")) == 2, "its answer came late, so the next one is due at once"


def test_renewal_that_gets_no_answer_is_sent_again_after_a_lease(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.start()
    sent: list[Any] = []
    monkeypatch.setattr(kept.engine.router, "submit", sent.append)
    for _ in range(5):
        kept.clock.now += 20.0
        kept.keeper.look()
    assert len(sent) == 2


def test_renewal_that_no_lane_takes_is_sent_again_after_a_third_of_the_lease(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = kept.start()

    def refuse(ticket: Any) -> None:
        raise StoreUnavailable("closed")

    with monkeypatch.context() as patched:
        patched.setattr(kept.engine.router, "submit", refuse)
        kept.clock.now += 20.0
        kept.keeper.look()
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert len(kept.store.asked("swap")) == 1
    assert kept.lease_left(operation.key) == 60.0


def test_unwatched_lease_is_not_renewed(kept: Kept) -> None:
    """Unwatched is unwatched, also twice."""
    operation = kept.start()
    kept.keeper.unwatch(operation)
    kept.keeper.unwatch(operation)
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert kept.store.asked("swap") == []
    assert kept.heard == []


def test_a_handler_whose_loop_is_gone_is_not_renewed(kept: Kept) -> None:
    """It will never end, and its key must not be in progress for ever (I4)."""
    operation = kept.start()
    gone = asyncio.new_event_loop()
    operation.task = gone.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    gone.run_until_complete(asyncio.sleep(0))
    gone.close()
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert kept.store.asked("swap") == []
    operation.task._log_destroy_pending = False  # type: ignore[attr-defined]


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
    kept.engine.router._max_queued = 0
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.engine.router._max_queued = 10
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert (kept.lease_left("a"), kept.lease_left("b")) == (60.0, 60.0)
    assert not any(operation.lost for operation in operations)


def test_leases_are_renewed_without_a_listener(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed also if no listener wants the event."""
    monkeypatch.setattr(type(kept.engine.emitter), "wants", lambda self, kind: False)
    kept.start()
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert kept.lease_left() == 60.0
    assert kept.heard == []


# ---------------------------------------------------------------- losing


@pytest.mark.parametrize(
    "lose",
    [
        taken_over,
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
    """A transaction holds the row, so it was skipped: the row still says that it is ours, and the keeper goes on."""
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


def test_end_of_this_owner_whose_answer_was_lost_is_not_called_a_lost_lease(kept: Kept) -> None:
    """The store hung after the commit: the row is final under this owner, and the storing finds that out."""
    operation = kept.start()
    kept.move(operation, Event.COMPLETE)
    kept.clock.now += 20.0
    kept.keeper.look()
    kept.settle()
    assert ["key-1"] in kept.store.keys("read")
    assert not operation.lost
    assert kept.heard.of(events.LeaseLost) == []
    kept.clock.now += 200.0
    kept.keeper.look()
    kept.settle()
    assert len(kept.store.asked("swap")) == 1, "there is no lease to renew any more"


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
