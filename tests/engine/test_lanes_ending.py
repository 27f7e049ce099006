"""The end of lanes: closing, closing what hangs, the end of the process, and forks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import AsyncTicket, SyncTicket
from oncekey.errors import StoreError, StoreUnavailable
from tests.engine.doubles import PATIENCE, RESPONSE, FakeStore, reservation
from tests.engine.forked_process import FORK_RESULT, FORK_SCRIPT


def submit(router: Router, *work: object) -> list[SyncTicket]:
    tickets = [SyncTicket(item) for item in work]  # type: ignore[arg-type]
    for ticket in tickets:
        router.submit(ticket)
    return tickets


def took(call: Callable[[], object]) -> tuple[object, float]:
    begun = time.monotonic()
    return call(), time.monotonic() - begun


# ---------------------------------------------------------------- closing


def test_closing_answers_queued_tickets() -> None:
    """Tickets that were queued before the close are worked off, then the connection is let go of."""
    store = FakeStore()
    router, gate = Router(store), store.hold("reserve")
    tickets = submit(router, reservation("first"))
    gate.wait()
    tickets += submit(router, *(reservation(f"key-{number}") for number in range(300)))
    closing = threading.Thread(target=router.close, args=(PATIENCE,))
    closing.start()
    gate.open()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert all(ticket.wait(0).record is not None for ticket in tickets)
    assert store.disconnects == 1


def test_ticket_after_the_close_is_refused() -> None:
    """A ticket that comes after the close is refused at once, whether lanes ever ran or not."""
    for used in (True, False):
        router = Router(FakeStore())
        if used:
            submit(router, reservation())[0].wait(PATIENCE)
        assert router.close(PATIENCE)
        with pytest.raises(StoreUnavailable, match="closed"):
            submit(router, reservation())


def test_closing_twice_is_closing_once() -> None:
    """The second close finds nothing to do."""
    store = FakeStore()
    router = Router(store)
    submit(router, reservation())[0].wait(PATIENCE)
    assert router.close(PATIENCE)
    assert router.close(0)
    assert store.disconnects == 1


def test_lanes_that_were_never_used_have_no_thread() -> None:
    """Threads start with the first ticket: an app that is preloaded and forked has none to lose."""
    before = threading.active_count()
    router = Router(FakeStore())
    assert threading.active_count() == before
    assert router.close(0)


def test_a_hung_store_is_left_behind() -> None:
    """Closing while a verb hangs ends in time and says so."""
    store = FakeStore()
    router, gate = Router(store), store.hold("reserve")
    submit(router, reservation())
    gate.wait()
    ended, seconds = took(lambda: router.close(0.05))
    assert ended is False
    assert seconds < PATIENCE
    gate.open()


def test_two_hung_lanes_share_the_time_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` is for closing, not for each lane: two that hang take no longer than one."""
    store = FakeStore(writers=2)
    row = store.put(reservation("there"))
    router, reserves, swaps = Router(store), store.hold("reserve"), store.hold("swap")
    submit(router, reservation(), swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    reserves.wait()
    swaps.wait()
    waits: list[float] = []
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(PATIENCE if timeout is None else timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    ended = router.close(0.1)
    monkeypatch.undo()
    reserves.open()
    swaps.open()
    assert ended is False
    assert len(waits) == 2
    assert sum(waits) <= 0.101, "by the time that it would wait, not by the clock: a busy machine adds to that"


def test_closing_is_not_held_up_by_a_preparation_that_hangs() -> None:
    """A migration that waits for a hung server keeps its lane, not the caller of close."""
    begun, go_on = threading.Event(), threading.Event()

    def prepare() -> None:
        begun.set()
        go_on.wait(PATIENCE)

    router = Router(FakeStore(), prepare=prepare)
    submit(router, reservation())
    assert begun.wait(PATIENCE)
    ended: list[bool] = []
    closing = threading.Thread(target=lambda: ended.append(router.close(0.05)), daemon=True)
    closing.start()
    closing.join(1.0)
    in_time = not closing.is_alive()
    go_on.set()
    closing.join(PATIENCE)
    assert in_time
    assert ended == [False]


def test_a_coroutine_that_asks_in_the_turn_of_the_close_gets_an_outcome() -> None:
    """Every ticket gets an outcome: one that was taken just before the close is answered, not left to time out."""
    store = FakeStore()
    router = Router(store)
    submit(router, reservation("first"))[0].wait(PATIENCE)

    async def main() -> object:
        ticket = AsyncTicket(reservation("a"), (loop := asyncio.get_running_loop()), loop.time() + 3.0)
        router.submit(ticket)
        router.close(PATIENCE)
        try:
            return await ticket.future
        except StoreError as error:
            return str(error)

    assert "did not answer in time" not in str(asyncio.run(main()))


def test_a_thread_that_asks_during_the_close_gets_an_outcome() -> None:
    """A ticket that slips in behind the close is refused or answered at once, not left to time out."""
    router = Router(FakeStore())
    submit(router, reservation("first"))[0].wait(PATIENCE)

    class Slow(SyncTicket):
        """Its caller is interrupted by the close between finding a lane and queueing."""

        __slots__ = ("_work", "interrupted")

        @property
        def work(self) -> Any:
            if not getattr(self, "interrupted", False):
                self.interrupted = True
                router.close(PATIENCE)
            return self._work

        @work.setter
        def work(self, value: Any) -> None:
            self._work = value

    def ask() -> str:
        ticket = Slow(reservation("a"))
        try:
            router.submit(ticket)
            return str(ticket.wait(3.0))
        except StoreError as error:
            return str(error)

    assert "did not answer in time" not in ask()


# ---------------------------------------------------------------- processes


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_process_that_forgets_to_close_ends_all_the_same() -> None:
    """Lanes end with the interpreter, after what is queued was worked off."""
    assert run(
        """
import sys
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import QuietTicket
from oncekey.stores.memory import MemoryStore

class Loud(MemoryStore):
    def disconnect(self):
        sys.stdout.write("disconnected")
router = Router(Loud())
router.submit(QuietTicket(("tenant", "key"), lambda done: sys.stdout.write("answered, ")))
"""
    ) == ("answered, disconnected")


def test_a_forked_child_has_lanes_of_its_own(tmp_path: Path) -> None:
    """Parent and child go on with the same OnceKey after a fork beside running lanes and keeper (hazard 26)."""
    assert run(FORK_SCRIPT, f"sqlite:///{tmp_path}/keys.db") == FORK_RESULT


def test_a_child_that_was_forked_during_a_batch_does_not_wait_for_it() -> None:
    """The parent's lane is inside the store and holds every lock at the fork; the child's first question works."""
    assert run(
        """
import os, signal, threading, warnings
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import SyncTicket
from oncekey.stores.memory import MemoryStore

warnings.simplefilter("ignore", DeprecationWarning)
signal.alarm(25)
begun, go_on = threading.Event(), threading.Event()
def prepare():
    if not begun.is_set():
        begun.set()
        go_on.wait()
router = Router(MemoryStore(), prepare=prepare)
mine = SyncTicket(("tenant", "key"))
router.submit(mine)
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # not inherited
    ticket = SyncTicket(("tenant", "key"))
    router.submit(ticket)
    os._exit(0 if ticket.wait(10) is None else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")
go_on.set()
print(mine.wait(10), router.close())
"""
    ) == ("0 None True")


def test_a_child_that_was_forked_while_the_breaker_counted_is_not_stuck() -> None:
    """A thread of the parent is inside the breaker's lock at the fork: the child's requests do not wait for it."""
    assert run(
        """
import logging, os, signal, threading, warnings
from oncekey import OnceKey, SINGLE_TENANT
from oncekey.errors import StoreUnavailable

warnings.simplefilter("ignore", DeprecationWarning)
logging.disable()
once = OnceKey("memory://", scope=SINGLE_TENANT)
breaker = once.engine.breaker
begun, go_on = threading.Event(), threading.Event()
for _ in range(4):
    breaker.failed(StoreUnavailable("down"))
def clock():
    begun.set()
    go_on.wait()
    return 0.0
breaker._clock = clock
threading.Thread(target=breaker.failed, args=(StoreUnavailable("down"),)).start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(2)
    breaker._clock = lambda: 100.0
    breaker.failed(StoreUnavailable("down"))
    os._exit(0)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go_on.set()
print(ended)
"""
    ) == ("0")
