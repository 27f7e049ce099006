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
from oncekey.core.record import Reservation
from oncekey.core.steps import Find, StepsOf
from oncekey.core.swaps import Swap
from oncekey.errors import StoreUnavailable

Work = Reservation | Swap | tuple[str, str] | StepsOf | Find | DeferredTo
"""What one caller asks of a store: to reserve, swap, read (scope, key), list the steps of a key, find keys,
or name the job that a request was deferred to."""

GAVE_UP = "the store did not answer in time"


class Ticket:
    """A piece of work and its outcome: ``error``, or otherwise ``result``."""

    __slots__ = ("asked", "error", "result", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.result: Any = None
        self.error: Exception | None = None
        self.asked = False
        """The store was asked before, and its answer was lost: the work may be done already."""

    def left(self) -> bool:
        """Whether the caller has left, as far as can be told without a lock."""
        return False

    def deliver(self) -> bool:
        """Give the outcome to the caller; False: the caller has left."""
        raise NotImplementedError  # pragma: no cover


class AsyncTicket(Ticket):
    """A coroutine waits. The thread of its loop delivers, so waiting, giving up and delivery never race."""

    __slots__ = ("_delivered", "_future", "_timer", "deadline", "loop")

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self.work = work
        self.result = None
        self.error = None
        self.asked = False
        self.loop = loop
        self.deadline = loop.time() + timeout
        self._future: asyncio.Future[Any] = loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._delivered = False

    def arm(self) -> None:
        """Start a timer that gives up at the deadline. A loop lane needs none: it checks all its deadlines at once."""
        if self._timer is None:
            self._timer = timer = self.loop.call_at(self.deadline, self.give_up)
            self._future.add_done_callback(lambda _: timer.cancel())

    def give_up(self) -> None:
        if not self._future.done():
            self._future.set_exception(StoreUnavailable(GAVE_UP))

    def wait(self) -> asyncio.Future[Any]:
        """What to await: the future itself, because a coroutine around it costs time in every request."""
        return self._future

    def left(self) -> bool:
        return self._future.done() and not self._delivered

    def answered(self) -> bool:
        """Whether the caller has its answer already."""
        return self._future.done() and self._delivered

    def deliver(self) -> bool:
        if self._future.done():  # gave up, or its task was cancelled; after a bug, a lane delivers twice
            return self._delivered
        self._delivered = True
        if self.error is not None:
            self._future.set_exception(self.error)
        else:
            self._future.set_result(self.result)
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
