"""A ticket is a caller's place in a batch: of a coroutine, of a thread, or of a callback.

A ticket carries the result from a lane's thread to its caller. The caller may have left in the meantime. Then
``deliver()`` returns False, and the lane undoes what the ticket reserved.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from oncekey.core.jobs import DeferredTo
from oncekey.core.rates import Tally
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.steps import Find, StepsOf
from oncekey.core.swaps import End, Swap
from oncekey.errors import StoreUnavailable

Work = Reservation | Swap | End | tuple[str, str] | StepsOf | Find | DeferredTo | Tally
"""What one caller asks of a store: to reserve, swap, end its attempt, read (scope, key), list the steps of a key, find
keys, name the job that a request was deferred to, or count the keys of a tenant."""

GAVE_UP = "the store did not answer in time"


def answered(future: asyncio.Future[Any]) -> bool:
    """Whether the caller that awaits this future has an answer. False: it waits, or it has left."""
    return future.done() and not future.cancelled() and future.exception() is None


def whole(work: Work, answer: Any) -> Any:
    """An answer as a flow takes it: a Found for a reservation, a Record for a move. A loop lane may have answered with
    less: only the time at which it was done, or only the row."""
    if isinstance(work, Reservation):
        if type(answer) is float:
            return Found(work.record(answer))
        return Found(answer) if isinstance(answer, Record) else answer
    if type(answer) is float and isinstance(work, Swap | End):
        change = work.swap() if isinstance(work, End) else work
        return change.moved(change.seen, answer) if change.seen is not None else None
    return answer


class Ticket:
    """A piece of work and its outcome: ``error``, or otherwise ``result``."""

    __slots__ = ("asked", "error", "result", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.result: Any = None
        self.error: Exception | None = None
        self.asked = False
        """The store was asked before, and its answer was lost: the work may be done already."""

    def lost_claim(self) -> Swap | None:
        """The claim of a row whose answer was lost: asked again, it found nothing to move."""
        work = self.work
        asked_twice = self.asked and self.result is None
        return work if asked_twice and isinstance(work, Swap) and work.new_owner is not None else None

    def left(self) -> bool:
        """Whether the caller has left, as far as can be told without a lock."""
        return False

    def deliver(self) -> bool:
        """Give the outcome to the caller; False: the caller has left."""
        raise NotImplementedError  # pragma: no cover


def mark_asked(places: list[list[Ticket]]) -> None:
    """The store was asked for these tickets, and its answer may be lost."""
    for place in places:
        for ticket in place:
            ticket.asked = True


class AsyncTicket(Ticket):
    """A coroutine awaits ``future``. The thread of its loop delivers, so waiting, giving up and delivery never race."""

    __slots__ = ("_timer", "deadline", "future", "loop")

    def __init__(
        self, work: Work, loop: asyncio.AbstractEventLoop, deadline: float, future: asyncio.Future[Any] | None = None
    ) -> None:
        super().__init__(work)
        self.loop = loop
        self.deadline = deadline
        self.future: asyncio.Future[Any] = loop.create_future() if future is None else future
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Start a timer that gives up at the deadline. A loop lane needs none: it checks all its deadlines at once."""
        if self._timer is None:
            self._timer = timer = self.loop.call_at(self.deadline, self.give_up)
            self.future.add_done_callback(lambda _: timer.cancel())

    def give_up(self) -> None:
        if not self.future.done():
            self.future.set_exception(StoreUnavailable(GAVE_UP))

    def left(self) -> bool:
        return self.future.done() and not answered(self.future)

    def deliver(self) -> bool:
        if self.future.done():  # gave up, or its task was cancelled; after a bug, two tickets share the future
            return answered(self.future)
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)
        return True


class SyncTicket(Ticket):
    """A thread waits."""

    __slots__ = ("_lock", "_ready", "_taken")

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._taken: bool | None = None  # None: open; True: delivered; False: the caller left

    def wait(self, timeout: float) -> Any:
        self._ready.wait(timeout)
        with self._lock:
            if self._taken is None:
                self._taken = False
                raise StoreUnavailable(GAVE_UP)
        if self.error is not None:
            raise self.error
        return self.result

    def left(self) -> bool:
        return self._taken is False

    def deliver(self) -> bool:
        with self._lock:
            if self._taken is None:
                self._taken = True
        self._ready.set()
        return self._taken


class QuietTicket(Ticket):
    """No caller waits. The lane's thread calls ``then``, which must not block."""

    __slots__ = ("_then",)

    def __init__(self, work: Work, then: Callable[[Ticket], None] | None = None) -> None:
        super().__init__(work)
        self._then = then

    def deliver(self) -> bool:
        if self._then is not None:
            self._then(self)
        return True
