"""The keeper's thread: when it starts, what wakes it, how it ends, and what a forked child has of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from oncekey.core.states import State
from oncekey.engine.keeper import Keeper
from tests.engine.doubles import (
    PATIENCE,
    Clock,
    eventually,
)
from tests.engine.kept_operations import Kept, unfinished


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


def test_after_a_reopening_there_is_one_keeper(running: Kept) -> None:
    """Also where the old thread had not ended: it does when there is another, and never is there none."""
    running.start()
    old = running.keeper._thread
    assert old is not None
    running.keeper.open()  # its close came and went unnoticed
    running.start("next", 0.6)
    assert running.keeper._thread is not old
    old.join(PATIENCE)
    assert not old.is_alive()
    eventually(lambda: running.store.keys("swap"))
    running.keeper.close(PATIENCE)
    running.keeper.open()
    running.start("last", 0.6)
    eventually(lambda: any("last" in batch for batch in running.store.keys("swap")))  # perhaps with the other


def test_a_short_lease_wakes_a_keeper_that_waits_for_a_long_one(running: Kept) -> None:
    """The keeper would look in five seconds; the new lease lasts three, and is renewed in time."""
    running.start("long", 3600.0)
    eventually(lambda: not running.keeper._wake.is_set())
    operation = running.start("short", 3.0)
    eventually(lambda: running.store.keys("swap"))
    assert running.store.keys("swap")[0] == ["short"]
    assert not operation.lost


def test_an_adopted_outcome_wakes_the_keeper(running: Kept) -> None:
    """The next look comes at once, not in five seconds."""
    operation = running.start("long", 3600.0)
    running.keeper.adopt(unfinished(operation))
    eventually(lambda: running.store.row("long").state is State.COMPLETED)  # type: ignore[union-attr]


def test_reopened_keeper_stores_unfinished_outcomes(running: Kept) -> None:
    """By itself: until the next request its lease may be over, and its outcome lost to a sweeper."""
    operation = running.start("long", 3600.0)
    running.keeper.close(PATIENCE)
    running.keeper.adopt(unfinished(operation))
    running.keeper.open()
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
    assert "the keeper failed unexpectedly" in caplog.text


def test_closing_stores_unfinished_outcomes(running: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_after_closing_no_thread_is_started(running: Kept) -> None:
    """A handler that begins after the close is not watched."""
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
