"""The loop lane: group commit without a thread, for stores that can answer in the caller's own event loop.

It does the same group commit as ``thread_lane.py``: tickets that arrive while a batch runs are the next batch. But the
loop itself sends the statements, and works on other requests until the answer is there: no thread to wake, no GIL to
hand over. It takes only what every request does, a reservation and the end of an attempt, both in one commit. **It
handles no failures.** The thread lanes get every ticket of a failed batch: they ask again, find the one bad row, and
undo reservations whose caller has left.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from oncekey.core.record import Reservation
from oncekey.core.swaps import Swap
from oncekey.engine.batching.batch import batches
from oncekey.engine.batching.ticket import AsyncTicket, Ticket, Work
from oncekey.errors import StoreError, StoreUnavailable
from oncekey.stores.api import InLoop, LostRace

Places = Sequence[list[AsyncTicket]]
"""Tickets of one key share a place in a batch (``batch.py``)."""

CHECK_SECONDS = 0.05
"""How often a loop lane looks for overdue tickets. One timer for all costs less than two per request
(docs/performance.md)."""
PAUSE_SECONDS = 1.0
"""How long all tickets go to the thread lanes after a failure of the store."""


WORTH_IT = 0.5
"""The share of keys that the store must answer here. SQLite leaves keys to the thread lanes while the app's own
transactions hold the file. Below this share, asking twice for those keys costs more than the loop lane saves for the
others."""
SAMPLE = 32
"""Below ``WORTH_IT``, one ticket in so many still takes the loop lane, to notice a change."""


def fits(work: Work) -> bool:
    """Whether a loop lane takes it: a reservation, or the end of an attempt."""
    return isinstance(work, Reservation) or (isinstance(work, Swap) and work.ends)


class LoopLane:
    """Reservations and ends of attempts in one event loop.

    ``fall_back`` gives the tickets of a failed batch to the thread lanes. ``send_on`` gives them a ticket that the
    store did not answer here. ``caller_left`` undoes what such a ticket reserved. ``on_error`` reports failures of the
    store.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: InLoop,
        fall_back: Callable[[list[AsyncTicket]], None],
        caller_left: Callable[[Ticket], None],
        send_on: Callable[[AsyncTicket], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.loop = loop
        self._store = store
        self._fall_back = fall_back
        self._caller_left = caller_left
        self._send_on = send_on
        self._on_error = on_error
        self._waiting: list[AsyncTicket] = []
        self._in_batch: list[AsyncTicket] = []
        self._checking = False
        self._answered_share = 1.0
        self._not_sampled = 0
        self._paused_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.idle = threading.Event()
        self.idle.set()

    def put(self, ticket: AsyncTicket, max_queued: int) -> bool:
        """Queue a ticket for the next batch. False: it must take a thread lane. Called in the loop."""
        waiting = self._waiting
        if (
            self._stopped
            or (self._paused_until and time.monotonic() < self._paused_until)
            or len(waiting) >= max_queued
        ):
            return False
        if self._answered_share < WORTH_IT:
            self._not_sampled += 1
            if self._not_sampled % SAMPLE:
                return False
        waiting.append(ticket)
        if self._task is None or self._task.done():
            self.idle.clear()
            self._task = self.loop.create_task(self._run())
            if not self._checking:
                self.loop.call_later(CHECK_SECONDS, self._check_deadlines)
                self._checking = True
        return True

    def _check_deadlines(self) -> None:
        """Fail the callers of overdue tickets. The tickets stay in the batch, and are undone after its answer."""
        now = self.loop.time()
        for ticket in self._in_batch + self._waiting:
            if ticket.deadline <= now:
                ticket.give_up()
        self._checking = self._task is not None
        if self._checking:
            self.loop.call_later(CHECK_SECONDS, self._check_deadlines)

    async def _run(self) -> None:
        """Run batch after batch, until no ticket waits."""
        try:
            while self._waiting:
                begins, ends = [], []
                for ticket in self._waiting:
                    if not isinstance(ticket.work, Reservation):
                        ends.append(ticket)
                    elif not ticket.left():  # drop a reservation whose caller has left
                        begins.append(ticket)
                self._in_batch, self._waiting = begins + ends, []
                for together in zip_longest(batches(begins), batches(ends), fillvalue=()):
                    await self._ask(*together)
        except BaseException:
            # A bug of ours, or the loop is ending: every ticket without a result goes to the thread lanes.
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            left, self._waiting = dict.fromkeys(self._in_batch + self._waiting), []
            self._fall_back([ticket for ticket in left if not ticket.answered()])
            raise
        finally:
            self._task = None
            self._in_batch = []
            if self._stopped:
                self._store.abandon()
            self.idle.set()

    async def _ask(self, begins: Places, ends: Places) -> None:
        wanted: list[Any] = [place[0].work for place in begins]
        changes: list[Any] = [place[0].work for place in ends]
        found: Sequence[Any] = ()
        moved: Sequence[Any] = ()
        try:
            if not changes:
                found = await self._store.reserve(wanted)
            elif not wanted:
                moved = await self._store.swap(changes)
            else:
                found, moved = await self._store.both(wanted, changes)
        except Exception as error:
            trouble = not isinstance(error, LostRace) and _is_trouble(error)
            if trouble:
                self._paused_until = time.monotonic() + PAUSE_SECONDS
            self._fall_back(_tickets((*begins, *ends)))
            self._forget((*begins, *ends))
            if trouble:  # also if the thread lanes succeed: a loop lane that never works must not stay unnoticed
                self._on_error("reserve" if wanted else "swap", error)
            return
        self._deliver(ends, moved)
        if all(found):
            self._deliver(begins, found)
            absent: Places = ()
        else:
            present = [(place, result) for place, result in zip(begins, found, strict=True) if result is not None]
            self._deliver([place for place, _ in present], [result for _, result in present])
            absent = [place for place, result in zip(begins, found, strict=True) if result is None]
            for ticket in _tickets(absent):
                self._send_on(ticket)
            self._forget(absent)
        if begins:
            self._answered_share += 0.1 * (1 - len(absent) / len(begins) - self._answered_share)

    def _forget(self, places: Places) -> None:
        """Remove tickets that were given to the thread lanes, so that they are not given twice. Call this after the
        hand-over, so that no ticket is lost. A ticket in two queues keeps its first answer."""
        gone = set(map(id, _tickets(places)))
        self._in_batch = [ticket for ticket in self._in_batch if id(ticket) not in gone]

    def _deliver(self, places: Places, results: Sequence[Any]) -> None:
        for place, result in zip(places, results, strict=True):
            for ticket in place:
                ticket.result = result
                if not ticket.deliver():
                    self._caller_left(ticket)

    def stop(self) -> None:
        """Refuse tickets from now on. Called from any thread. If a batch is running, its loop still answers all waiting
        tickets; otherwise they go to the thread lanes."""
        self._stopped = True
        if self.loop.is_closed() or self._task is None:
            rest, self._in_batch, self._waiting = self._in_batch + self._waiting, [], []
            try:
                if rest := [ticket for ticket in rest if not ticket.answered()]:
                    self._fall_back(rest)
            finally:
                self._store.abandon()
                self.idle.set()

    def runs_in_this_thread(self) -> bool:
        """Whether the calling thread is the one that runs this loop."""
        return asyncio._get_running_loop() is self.loop


def _tickets(places: Places) -> list[AsyncTicket]:
    return [ticket for place in places for ticket in place]


def _is_trouble(error: Exception) -> bool:
    """Whether the error is about the store, and not about one row (damaged, or written by a newer version)."""
    return isinstance(error, StoreUnavailable) or not isinstance(error, StoreError)
