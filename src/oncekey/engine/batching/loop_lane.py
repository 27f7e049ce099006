"""The loop lane: group commit without a thread, for stores that can answer in the caller's own event loop.

It does the same group commit as ``thread_lane.py``: work that arrives while a batch runs is the next batch. But the
loop itself sends the statements, and works on other requests until the answer is there: no thread to wake, no GIL to
hand over. It takes only what every request does, a reservation and the end of an attempt, both in one commit. **It
handles no failures.** The thread lanes get all the work of a failed batch: they ask again, find the one bad row, and
undo reservations whose caller has left.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.engine.batching import batch
from oncekey.engine.batching.ticket import GAVE_UP, Work, answered
from oncekey.errors import StoreError, StoreUnavailable
from oncekey.stores.api import InLoop, LostRace

Entry = tuple[Reservation | Swap | End, "asyncio.Future[Any]", float]
"""One caller's work, the future that it awaits, and the time of the loop's clock at which it gives up. A tuple, because
every request makes two (docs/performance.md)."""

Failure = tuple[str, Exception]
"""The verb that the store failed in, and the error."""

CHECK_SECONDS = 0.05
"""How often a loop lane looks for overdue callers. One timer for all costs less than two per request
(docs/performance.md)."""
PAUSE_SECONDS = 1.0
"""How long all work goes to the thread lanes after a failure of the store."""


WORTH_IT = 0.5
"""The share of keys that the store must answer here. SQLite leaves keys to the thread lanes while the app's own
transactions hold the file. Below this share, asking twice for those keys costs more than the loop lane saves for the
others."""
SAMPLE = 32
"""Below ``WORTH_IT``, one reservation in so many still takes the loop lane, to notice a change."""


ALWAYS_FIT = frozenset({Reservation, End})


def fits(work: Work) -> TypeGuard[Reservation | Swap | End]:
    """Whether a loop lane takes it: a reservation, or the end of an attempt."""
    return type(work) in ALWAYS_FIT or (isinstance(work, Swap) and work.ends)


class LoopLane:
    """Reservations and ends of attempts in one event loop.

    ``fall_back`` gives the work of a failed batch to the thread lanes, with the verb and the error if the store failed.
    They report it, once: also if they succeed, since a loop lane that never works must not stay unnoticed. ``send_on``
    gives them a reservation that the store did not answer here. ``undo`` gives back what a caller that has left had
    reserved.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: InLoop,
        max_queued: int,
        fall_back: Callable[[list[Entry], Failure | None], None],
        undo: Callable[[Reservation], None],
        send_on: Callable[[Entry], None],
    ) -> None:
        self.loop = loop
        self._store = store
        self._max_queued = max_queued
        self._fall_back = fall_back
        self._undo = undo
        self._send_on = send_on
        self._begins: list[Entry] = []
        self._ends: list[Entry] = []
        self._in_batch: list[Entry] = []
        self._checking = False
        self._answered_share = 1.0
        self._not_sampled = 0
        self._paused_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.idle = threading.Event()
        self.idle.set()

    def ask(self, work: Reservation | Swap | End, timeout: float) -> asyncio.Future[Any] | None:
        """Queue work for the next batch. None: it must take a thread lane. Called in the loop.

        The answer to a reservation is the time at which it was inserted, or the Record that was there. The answer to an
        end is the time at which the row was moved, or None. From a thread lane it is a Found, or a Record or None.
        """
        if (
            self._stopped
            or (self._paused_until and self._pauses())
            or (self._answered_share < WORTH_IT and self._steps_aside())
        ):
            return None
        queue = self._begins if type(work) is Reservation else self._ends
        if len(queue) >= self._max_queued:
            return None
        loop = self.loop
        future: asyncio.Future[Any] = loop.create_future()
        queue.append((work, future, loop.time() + timeout))
        task = self._task
        if task is None or task.done():
            self._start()
        return future

    def _pauses(self) -> bool:
        if time.monotonic() < self._paused_until:
            return True
        self._paused_until = 0.0
        return False

    def _steps_aside(self) -> bool:
        self._not_sampled += 1
        return self._not_sampled % SAMPLE != 0

    def _start(self) -> None:
        self.idle.clear()
        self._task = self.loop.create_task(self._run())
        if not self._checking:
            self.loop.call_later(CHECK_SECONDS, self._check_deadlines)
            self._checking = True

    def _check_deadlines(self) -> None:
        """Fail the callers that are overdue. Their work stays in the batch, and is undone after its answer."""
        now = self.loop.time()
        for _, future, deadline in self._in_batch + self._begins + self._ends:
            if deadline <= now and not future.done():
                future.set_exception(StoreUnavailable(GAVE_UP))
        self._checking = self._task is not None
        if self._checking:
            self.loop.call_later(CHECK_SECONDS, self._check_deadlines)

    async def _run(self) -> None:
        """Run batch after batch, until no work waits."""
        try:
            while self._begins or self._ends:
                begins, ends = self._next_batch()
                if begins or ends:
                    await self._send(begins, ends)
        except BaseException:
            # A bug of ours, or the loop is ending: all work without an answer goes to the thread lanes.
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            self._fall_back(self._take_unanswered(), None)
            raise
        finally:
            self._task = None
            self._in_batch = []
            if self._stopped:
                self._store.abandon()
            self.idle.set()

    def _next_batch(self) -> tuple[list[Entry], list[Entry]]:
        """Take from the queues what fits into one statement each. A reservation whose caller has left is dropped."""
        begins = [entry for entry in self._begins if not entry[1].done()]
        ends = self._ends
        some, few = batch.MAX_BATCH, len(ends)
        if few > 1 and not _fit(ends):
            few = _fitting(ends)
        later = begins[some:], ends[few:]
        begins, ends = begins[:some], ends[:few]
        self._in_batch = begins + ends
        self._begins, self._ends = later
        return begins, ends

    async def _send(self, begins: list[Entry], ends: list[Entry]) -> None:
        wanted: list[Any] = [entry[0] for entry in begins]
        twins: dict[tuple[str, str], list[Entry]] | None = None
        if len(wanted) > 1 and len({work.key for work in wanted}) < len(wanted):
            twins = _twins(begins)
            begins = [place[0] for place in twins.values()]
            wanted = [entry[0] for entry in begins]
        changes: list[Any] = [entry[0] for entry in ends]
        found: Sequence[float | Record | None] = ()
        moved: Sequence[float | None] = ()
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
            given = _all(begins, twins) + ends
            self._fall_back(given, ("reserve" if wanted else "swap", error) if trouble else None)
            self._forget(given)
            return
        for (_, future, _), time_moved in zip(ends, moved, strict=True):
            if not future.done():
                future.set_result(time_moved)
        absent: list[Entry] = []
        for entry, there in zip(begins, found, strict=True):
            work, future, _ = entry
            if there is None:
                absent.append(entry)
            elif not future.done():
                future.set_result(there)
            elif isinstance(work, Reservation) and _took(work, there):
                self._undo(work)  # its caller has left
        if twins is not None:
            _answer_twins(twins, found)
        if absent:
            for entry in (given := _all(absent, twins)):
                self._send_on(entry)
            self._forget(given)
        if begins:
            self._answered_share += 0.1 * (1 - len(absent) / len(begins) - self._answered_share)

    def _forget(self, given: list[Entry]) -> None:
        """Remove work that was given to the thread lanes, so that it is not given twice. Call this after the hand-over,
        so that no work is lost. A caller whose work is in two queues keeps its first answer."""
        gone = set(map(id, given))
        self._in_batch = [entry for entry in self._in_batch if id(entry) not in gone]

    def _take_unanswered(self) -> list[Entry]:
        """All work whose caller has no answer, each once. It stays in no queue."""
        left = {id(entry): entry for entry in self._in_batch + self._begins + self._ends}
        self._in_batch, self._begins, self._ends = [], [], []
        return [entry for entry in left.values() if not answered(entry[1])]

    def stop(self) -> None:
        """Refuse work from now on. Called from any thread. If a batch is running, its loop still answers all waiting
        callers; otherwise their work goes to the thread lanes."""
        self._stopped = True
        if self.loop.is_closed() or self._task is None:
            try:
                if rest := self._take_unanswered():
                    self._fall_back(rest, None)
            finally:
                self._store.abandon()
                self.idle.set()

    def runs_in_this_thread(self) -> bool:
        """Whether the calling thread is the one that runs this loop."""
        return asyncio._get_running_loop() is self.loop


def _fit(ends: list[Entry]) -> bool:
    """Whether all fit into one statement: nearly always, and cheaper to find out than how many fit."""
    works: list[Any] = [entry[0] for entry in ends]
    if len({work.key for work in works}) < len(works) or len(works) > batch.MAX_BATCH:
        return False
    try:
        return sum([len(work.response.body) for work in works]) <= batch.MAX_BATCH_BYTES
    except (AttributeError, TypeError):  # one has no response, or no body
        return False


def _fitting(ends: list[Entry]) -> int:
    """How many of these, from the first on, fit into one statement: each key once, and bodies of a bounded size."""
    keys: set[str] = set()
    size = 0
    for number, (work, _, _) in enumerate(ends):
        response = None if isinstance(work, Reservation) else work.response
        if work.key in keys or number == batch.MAX_BATCH or size >= batch.MAX_BATCH_BYTES:
            return number
        keys.add(work.key)
        if response is not None and response.body is not None:
            size += len(response.body)
    return len(ends)


def _twins(begins: list[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """The reservations by key. The store gets the first one of each."""
    places: dict[tuple[str, str], list[Entry]] = {}
    for entry in begins:
        places.setdefault((entry[0].scope, entry[0].key), []).append(entry)
    return places


def _answer_twins(twins: dict[tuple[str, str], list[Entry]], found: Sequence[float | Record | None]) -> None:
    """Answer the callers whose key another one reserved in the same batch: the owner token is the first one's."""
    for place, there in zip(twins.values(), found, strict=True):
        first = place[0][0]
        row = first.record(there) if type(there) is float and isinstance(first, Reservation) else there
        for _, future, _ in place[1:]:
            if row is not None and not future.done():
                future.set_result(row)


def _all(firsts: list[Entry], twins: dict[tuple[str, str], list[Entry]] | None) -> list[Entry]:
    if twins is None:
        return firsts
    return [entry for first in firsts for entry in twins[first[0].scope, first[0].key]]


def _took(work: Reservation, there: float | Record) -> bool:
    """Whether the reservation took its key."""
    return type(there) is float or (isinstance(there, Record) and there.owner == work.owner)


def _is_trouble(error: Exception) -> bool:
    """Whether the error is about the store, and not about one row (damaged, or written by a newer version)."""
    return isinstance(error, StoreUnavailable) or not isinstance(error, StoreError)
