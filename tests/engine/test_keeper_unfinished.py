"""Outcomes that could not be stored: the keeper stores them when the store is back, or with its last try."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any

import pytest

from oncekey.core.states import Event, State
from oncekey.engine import keeper as keeper_module
from oncekey.engine.keeper import Unfinished
from oncekey.errors import StoreError, StoreUnavailable
from tests.engine.doubles import (
    PATIENCE,
    RESPONSE,
)
from tests.engine.kept_operations import Kept, taken_over, unfinished

# ---------------------------------------------------------------- when the store is back


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
    """Another owner has the key by now: nothing is written, and nothing is kept (I3)."""
    operation = kept.start()
    kept.keeper.adopt(unfinished(operation))
    taken_over(kept, operation)
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
    """If the store refuses a response for its contents, the outcomes behind it are still stored (hazard 25)."""
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


# ---------------------------------------------------------------- the last try


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
    assert "could not be stored at the close" in caplog.text


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
