"""The express: a lane without a thread, for stores that can answer in the caller's own event loop.

The same group commit as ``lanes.py`` (what comes while a batch is under way is the next batch), but the loop itself
sends the statement and works on other requests until the answer is there: no thread to wake, no GIL to hand over. It
carries only the two hot verbs, and only while all goes well. **Whatever goes wrong is handed to the lanes**: they ask
again, find the one bad row, and give back what was reserved for callers that have left. So there is one place that
knows about trouble, and this is not it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from oncekey.core.record import Reservation, Swap
from oncekey.engine.batches import pieces, rounds
from oncekey.engine.tickets import AsyncTicket, Ticket
from oncekey.stores.base import InLoop, LostRace

LOOK_SECONDS = 0.05
"""How often tickets are looked at for being overdue: one timer for all of them, since two for each request show."""
REST_SECONDS = 1.0
"""After trouble, for this long everything takes the lanes: they hold the knowledge of how bad it is."""


WORTH_IT = 0.5
"""A store that only reads in the loop is asked there while at least this share of the keys was found. New keys are the
lane's business, and looking for them twice costs more than the replays save."""
SAMPLE = 32
"""Otherwise one ticket in so many still goes that way, to notice when replays come."""


def fits(ticket: Ticket) -> bool:
    """Whether the express takes it: a reservation, or an owner's plain move of a row that it has seen."""
    work = ticket.work
    if isinstance(work, Reservation):
        return True
    return isinstance(work, Swap) and work.seen is not None and work.plain


class Express:
    """One verb of one event loop.

    Where tickets go that it does not answer: ``fall_back`` takes those about which nothing is known to the lanes,
    ``send_on`` those that are not here, and ``orphaned`` undoes what nobody took.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: InLoop,
        verb: str,
        fall_back: Callable[[list[AsyncTicket]], None],
        orphaned: Callable[[Ticket], None],
        send_on: Callable[[AsyncTicket], None],
    ) -> None:
        self.loop = loop
        self._store = store
        self._reserves = verb == "reserve"
        self._call: Callable[[list[Any]], Awaitable[Sequence[Any]]] = store.reserve if self._reserves else store.swap
        self._fall_back = fall_back
        self._orphaned = orphaned
        self._send_on = send_on
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

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def put(self, ticket: AsyncTicket) -> bool:
        """Take a ticket along; False: take the lanes. Called in the loop."""
        if self._stopped or (self._rests_until and time.monotonic() < self._rests_until):
            return False
        if self._found < WORTH_IT:
            self._passed_by += 1
            if self._passed_by % SAMPLE:
                return False
        self._waiting.append(ticket)
        if self._task is None:
            self.idle.clear()
            self._task = self.loop.create_task(self._run())
            if not self._looking:
                self._looking = True
                self.loop.call_later(LOOK_SECONDS, self._look)
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
                # Nobody waits any more for a reservation whose caller has left; everything else still matters.
                self._aboard = [t for t in self._waiting if not (isinstance(t.work, Reservation) and t.left())]
                self._waiting = []
                for places in rounds(self._aboard):
                    for piece in pieces(places):
                        await self._ask(piece)
        finally:
            self._task = None
            self._aboard = []
            if self._stopped:
                self._store.abandon()
            self.idle.set()

    async def _ask(self, places: list[list[AsyncTicket]]) -> None:
        try:
            results = await self._call([place[0].work for place in places])
        except BaseException as error:
            if not isinstance(error, LostRace):
                self._rests_until = time.monotonic() + REST_SECONDS
            self._fall_back([ticket for place in places for ticket in place])
            if not isinstance(error, Exception):
                raise  # cancelled: the loop is ending
            return
        absent: list[AsyncTicket] = []
        for place, result in zip(places, results, strict=True):
            if result is None and self._reserves:
                absent += place
                continue
            for ticket in place:
                ticket.result = result
                if not ticket.deliver():
                    self._orphaned(ticket)
        if self._reserves:
            self._found += 0.1 * ((len(places) - len(absent)) / len(places) - self._found)
        for ticket in absent:
            self._send_on(ticket)

    def stop(self) -> None:
        """No more after this. Called from any thread; what is under way ends in its loop, the rest takes the lanes."""
        self._stopped = True
        if self.loop.is_closed() or self._task is None:
            rest, self._waiting = self._waiting, []
            if rest:
                self._fall_back(rest)
            self._store.abandon()
            self.idle.set()

    def here(self) -> bool:
        """Whether the calling thread is the one that runs this loop."""
        return asyncio._get_running_loop() is self.loop
