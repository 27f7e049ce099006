"""A caller's place in a batch, for each kind of caller: a coroutine, a thread, or nobody.

Owns how an answer gets from a lane's thread to whoever asked, and the one hard question in it: what if they have left?
An answer that nobody takes is handed back as *orphaned*, so that the lane can undo what it reserved.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from oncekey.core.record import Reservation, Swap
from oncekey.core.steps import Find, StepsOf
from oncekey.errors import StoreUnavailable

Work = Reservation | Swap | tuple[str, str] | StepsOf | Find
"""What one caller wants of a store: reserve, swap, read (scope, key), the steps of a key, or keys by something else."""

GAVE_UP = "the store did not answer in time"


class Ticket:
    """A piece of work and where its outcome goes: ``error``, or else ``result``."""

    __slots__ = ("asked", "error", "result", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.result: Any = None
        self.error: Exception | None = None
        self.asked = False
        """The store was asked before, and its answer was lost: it may have been done then."""

    def left(self) -> bool:
        """Whether the caller has gone already, as far as can be told without a lock."""
        return False

    def deliver(self) -> bool:
        """Hand the outcome over; False: nobody took it."""
        raise NotImplementedError  # pragma: no cover


class AsyncTicket(Ticket):
    """A coroutine waits. Its loop's thread delivers, so that waiting, giving up and delivery never race."""

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
        """Give up at the deadline by a timer of its own. Whoever sees to the deadline otherwise need not."""
        if self._timer is None:
            self._timer = timer = self.loop.call_at(self.deadline, self.give_up)
            self._future.add_done_callback(lambda _: timer.cancel())

    def give_up(self) -> None:
        if not self._future.done():
            self._future.set_exception(StoreUnavailable(GAVE_UP))

    def wait(self) -> asyncio.Future[Any]:
        """What to await: the future itself, since a coroutine around it would be one more for every request."""
        return self._future

    def left(self) -> bool:
        return self._future.done() and not self._delivered

    def answered(self) -> bool:
        """Whether the caller has its answer already."""
        return self._future.done() and self._delivered

    def deliver(self) -> bool:
        if self._future.done():  # gave up, or its task was cancelled; or a lane that stumbled delivers twice
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
    """Nobody waits; ``then`` is called in the lane's thread and must not block."""

    __slots__ = ("_then",)

    def __init__(self, work: Work, then: Callable[[Ticket], None] | None = None) -> None:
        super().__init__(work)
        self._then = then

    def deliver(self) -> bool:
        if self._then is not None:
            self._then(self)
        return True
