"""The express: a lane without a thread, for stores that can answer in the caller's own event loop.

The same group commit as ``lane.py`` (what comes while a batch is under way is the next batch), but the loop itself
sends the statements and works on other requests until the answer is there: no thread to wake, no GIL to hand over. It
carries only what every request does, a reservation and the end of an attempt, both in one commit, and only while all
goes well. **Whatever goes wrong is handed to the lanes**: they ask again, find the one bad row, and give back what was
reserved for callers that have left. So there is one place that knows about trouble, and this is not it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from oncekey.core.record import Reservation, Swap
from oncekey.engine.batches import batches
from oncekey.engine.tickets import AsyncTicket, Ticket, Work
from oncekey.errors import StoreError, StoreUnavailable
from oncekey.stores.base import InLoop, LostRace

Places = Sequence[list[AsyncTicket]]
"""Callers of one key share a place in a batch (``batches.py``)."""

LOOK_SECONDS = 0.05
"""How often tickets are looked at for being overdue: one timer for all of them, since two for each request show."""
REST_SECONDS = 1.0
"""After trouble, for this long everything takes the lanes: they hold the knowledge of how bad it is."""


WORTH_IT = 0.5
"""A store that leaves most keys to the lanes (SQLite does, while the app's own transactions hold the file) is not asked
here: looking for them twice costs more than the others save."""
SAMPLE = 32
"""But one ticket in so many still goes this way, to notice when that has changed."""


def fits(work: Work) -> bool:
    """Whether the express takes it: a reservation, or the end of an attempt."""
    return isinstance(work, Reservation) or (isinstance(work, Swap) and work.ends)


class Express:
    """The hot verbs of one event loop.

    Where tickets go that it does not answer: ``fall_back`` takes those about which nothing is known to the lanes,
    ``send_on`` those that are not here, and ``orphaned`` undoes what nobody took. ``on_error`` is told of trouble.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: InLoop,
        fall_back: Callable[[list[AsyncTicket]], None],
        orphaned: Callable[[Ticket], None],
        send_on: Callable[[AsyncTicket], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.loop = loop
        self._store = store
        self._fall_back = fall_back
        self._orphaned = orphaned
        self._send_on = send_on
        self._on_error = on_error
        self._waiting: list[AsyncTicket] = []
        self._aboard: list[AsyncTicket] = []
        self._looking = False
        self._found = 1.0
        self._passed_by = 0
        self._rests_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.idle = threading.Event()
        self.idle.set()

    def put(self, ticket: AsyncTicket, max_queued: int) -> bool:
        """Take a ticket along; False: take the lanes. Called in the loop."""
        waiting = self._waiting
        if self._stopped or (self._rests_until and time.monotonic() < self._rests_until) or len(waiting) >= max_queued:
            return False
        if self._found < WORTH_IT:
            self._passed_by += 1
            if self._passed_by % SAMPLE:
                return False
        waiting.append(ticket)
        if self._task is None or self._task.done():
            self.idle.clear()
            self._task = self.loop.create_task(self._run())
            if not self._looking:
                self.loop.call_later(LOOK_SECONDS, self._look)
                self._looking = True
        return True

    def _look(self) -> None:
        """Let go of callers whose time is over: their place in the batch stays, and is undone when it is answered."""
        now = self.loop.time()
        for ticket in self._aboard + self._waiting:
            if ticket.deadline <= now:
                ticket.give_up()
        self._looking = self._task is not None
        if self._looking:
            self.loop.call_later(LOOK_SECONDS, self._look)

    async def _run(self) -> None:
        """Batch after batch, until nobody waits."""
        try:
            while self._waiting:
                begins, ends = [], []
                for ticket in self._waiting:
                    if not isinstance(ticket.work, Reservation):
                        ends.append(ticket)
                    elif not ticket.left():  # or nobody waits for it any more; what ends still matters
                        begins.append(ticket)
                self._aboard, self._waiting = begins + ends, []
                for together in zip_longest(batches(begins), batches(ends), fillvalue=()):
                    await self._ask(*together)
        except BaseException:
            # A bug of ours, or the loop is ending: nobody is left behind.
            self._rests_until = time.monotonic() + REST_SECONDS
            left, self._waiting = dict.fromkeys(self._aboard + self._waiting), []
            self._fall_back([ticket for ticket in left if not ticket.answered()])
            raise
        finally:
            self._task = None
            self._aboard = []
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
                self._rests_until = time.monotonic() + REST_SECONDS
            self._fall_back(_tickets((*begins, *ends)))
            self._forget((*begins, *ends))
            if trouble:  # told even where the lanes get by: a fast way that never works should not go unnoticed
                self._on_error("reserve" if wanted else "swap", error)
            return
        self._deliver(ends, moved)
        if all(found):
            self._deliver(begins, found)
            absent: Places = ()
        else:
            here = [(place, result) for place, result in zip(begins, found, strict=True) if result is not None]
            self._deliver([place for place, _ in here], [result for _, result in here])
            absent = [place for place, result in zip(begins, found, strict=True) if result is None]
            for ticket in _tickets(absent):
                self._send_on(ticket)
            self._forget(absent)
        if begins:
            self._found += 0.1 * (1 - len(absent) / len(begins) - self._found)

    def _forget(self, places: Places) -> None:
        """They are the lanes' now, and must not be left to them again. After that, not before: nobody may be lost, and
        who is asked about twice keeps the first answer."""
        gone = set(map(id, _tickets(places)))
        self._aboard = [ticket for ticket in self._aboard if id(ticket) not in gone]

    def _deliver(self, places: Places, results: Sequence[Any]) -> None:
        for place, result in zip(places, results, strict=True):
            for ticket in place:
                ticket.result = result
                if not ticket.deliver():
                    self._orphaned(ticket)

    def stop(self) -> None:
        """No more after this. Called from any thread; what is under way ends in its loop, the rest takes the lanes."""
        self._stopped = True
        if self.loop.is_closed() or self._task is None:
            rest, self._aboard, self._waiting = self._aboard + self._waiting, [], []
            try:
                if rest := [ticket for ticket in rest if not ticket.answered()]:
                    self._fall_back(rest)
            finally:
                self._store.abandon()
                self.idle.set()

    def here(self) -> bool:
        """Whether the calling thread is the one that runs this loop."""
        return asyncio._get_running_loop() is self.loop


def _tickets(places: Places) -> list[AsyncTicket]:
    return [ticket for place in places for ticket in place]


def _is_trouble(error: Exception) -> bool:
    """Whether it is about the store, and not about a row in it (damaged, or written by a newer version)."""
    return isinstance(error, StoreUnavailable) or not isinstance(error, StoreError)
