"""The router of one store: starts its lanes, chooses one for each ticket, and ends them.

Group commit itself is in ``thread_lane.py``. If the store can answer in an event loop without a thread, each loop has
a loop lane (``loop_lane.py``). Threads start with the first ticket and belong to one process id: after a fork the child
starts its own (hazard 26).
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable
from functools import partial
from typing import Any

from oncekey.core.record import Reservation
from oncekey.core.swaps import End, Swap
from oncekey.engine import process
from oncekey.engine.batching.loop_lane import ALWAYS_FIT, Entry, Failure, LoopLane, fits
from oncekey.engine.batching.thread_lane import CLOSED, ThreadLane
from oncekey.engine.batching.ticket import AsyncTicket, Ticket, Work, whole
from oncekey.engine.batching.verbs import Report
from oncekey.errors import StoreOverloaded, StoreUnavailable
from oncekey.stores.api import EventLoops, InLoop, Store
from oncekey.stores.cache.front import Cache, CachedInLoop


class Router:
    """The lanes of one store in this process, and the way of each ticket to one of them."""

    def __init__(
        self,
        store: Store,
        *,
        cache: Cache | None = None,
        max_queued: int = 10_000,
        prepare: Callable[[], None] | None = None,
        on_error: Report | None = None,
    ) -> None:
        self._store = store
        self._cache = cache
        self._in_loop = store if isinstance(store, EventLoops) else None
        self._max_queued = max_queued
        self._prepare = prepare
        self._on_error = on_error or (lambda verb, error, requests: None)
        self._lock = threading.Lock()
        self._preparing = threading.Lock()  # a lock of its own: a migration that hangs must not block close()
        self._closed = False
        self._lanes: tuple[ThreadLane, ...] | None = None
        self._loop_lanes: dict[AbstractEventLoop, LoopLane] = {}
        _alive.add(self)
        process.enroll(self)

    def ask(self, work: Work, loop: AbstractEventLoop, timeout: float) -> Future[Any]:
        """Queue work of a coroutine; what to await for the answer (see ``LoopLane.ask``). Raises as ``submit`` does."""
        if self._in_loop is not None:
            lane = self._loop_lanes.get(loop) or self._open_loop_lane(loop)
            if lane is not None and (type(work) in ALWAYS_FIT or fits(work)):
                future = lane.ask(work, timeout)  # type: ignore[arg-type]  # what fits is of these types
                if future is not None:
                    return future  # the loop lane answers it, without a thread
        ticket = AsyncTicket(work.swap() if isinstance(work, End) else work, loop, loop.time() + timeout)
        self.submit(ticket)
        return ticket.future

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket for a thread lane. Raises StoreOverloaded if the queue is full, and StoreUnavailable after a
        close."""
        lane = self._lane_for(ticket)
        # A full queue refuses reservations only: a request that has begun must always be able to end.
        if lane.queued >= self._max_queued and isinstance(ticket.work, Reservation):
            raise StoreOverloaded(f"{self._max_queued} requests are waiting for the store already")
        if isinstance(ticket, AsyncTicket):
            lane.gather(ticket)
        else:
            lane.enqueue([ticket])

    def _open_loop_lane(self, loop: AbstractEventLoop) -> LoopLane | None:
        lanes = self._lanes
        if lanes is None or not lanes[0].ready:
            # The first reservations take a thread lane, which prepares and checks the tables. It does so for all lanes:
            # where every handler enlists its transaction, no swap ever comes to the others.
            return None
        with self._lock:
            if self._closed or self._in_loop is None:
                return None
            connection = self._in_loop.in_loop()
            if connection is None:
                self._in_loop = None
                return None
            for gone in [other for other in self._loop_lanes if other.is_closed()]:
                self._loop_lanes.pop(gone).stop()
            opened = LoopLane(
                loop,
                self._connected(connection),
                self._max_queued,
                partial(_take_over, lanes, loop),
                lanes[0].undo,
                lambda entry: lanes[0].gather(AsyncTicket(entry[0], loop, entry[2], entry[1])),
            )
            self._loop_lanes[loop] = opened
            return opened

    def give_up(self, work: Work, answer: Any) -> None:
        """The caller was cancelled when its answer was already there: undo what its work reserved or claimed."""
        ticket = Ticket(work)
        ticket.result = whole(work, answer)
        self._lane_for(ticket).caller_left(ticket)

    def _lane_for(self, ticket: Ticket) -> ThreadLane:
        return _lane_of(ticket, self._lanes or self._start())

    def _start(self) -> tuple[ThreadLane, ...]:
        with self._lock:
            if self._closed:
                raise StoreUnavailable(CLOSED)
            if self._lanes is None:
                count = min(2, self._store.capabilities.writers)
                self._lanes = tuple(self._new_lane() for _ in range(count))
            return self._lanes

    def _new_lane(self) -> ThreadLane:
        return ThreadLane(self._store, self._on_error, self.prepare, self._cache)

    def _connected(self, connection: InLoop) -> InLoop:
        """The connection of a loop lane, as its lane uses it."""
        return connection if self._cache is None else CachedInLoop(connection, self._cache)

    def prepare(self) -> None:
        """Run the migrations once, in the first lane that gets here."""
        if self._prepare is not None:
            with self._preparing:
                if self._prepare is not None:
                    self._prepare()
                    self._prepare = None

    def open(self) -> None:
        """Take tickets again, after a close."""
        with self._lock:
            self._closed = False

    def close(self, timeout: float = 10.0) -> bool:
        """Refuse new tickets, finish the queued ones, disconnect. False: the store hung for over ``timeout``."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            lanes, self._lanes = self._lanes or (), None
            loop_lanes = list(self._loop_lanes.values())
            self._loop_lanes.clear()
        for each in loop_lanes:
            each.stop()
        for each in loop_lanes:
            if not each.runs_in_this_thread():  # while this thread waits, the loop in it cannot run
                each.idle.wait(max(0.0, deadline - time.monotonic()))
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(lane.thread.is_alive() for lane in lanes)

    def after_fork(self) -> None:
        """In a child: the threads are gone and the queued tickets are the parent's."""
        if self._cache is not None:
            self._cache.after_fork()
        self._lanes = None
        _inherited.append(self._loop_lanes)  # not used and not closed here: the sockets are the parent's
        self._loop_lanes = {}
        self._lock = threading.Lock()
        self._preparing = threading.Lock()


_inherited: list[object] = []
_alive: weakref.WeakSet[Router] = weakref.WeakSet()


def _at_exit() -> None:
    for lanes in list(_alive):
        lanes.close(timeout=2.0)


atexit.register(_at_exit)


def _lane_of(ticket: Ticket, lanes: tuple[ThreadLane, ...]) -> ThreadLane:
    return lanes[-1] if isinstance(ticket.work, Swap) else lanes[0]


def _take_over(
    lanes: tuple[ThreadLane, ...], loop: AbstractEventLoop, entries: list[Entry], failure: Failure | None
) -> None:
    """Give work that a loop lane could not answer to the thread lane of its verb. The first of them reports the
    failure."""
    tickets = [
        AsyncTicket(work.swap() if isinstance(work, End) else work, loop, deadline, future)
        for work, future, deadline in entries
    ]
    for lane in lanes:
        if theirs := [ticket for ticket in tickets if _lane_of(ticket, lanes) is lane]:
            lane.take_over(theirs, failure)
            failure = None
