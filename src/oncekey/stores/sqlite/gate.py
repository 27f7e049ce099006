"""One write gate per file and process: a fair lock in front of SQLite's unfair one.

SQLite's waiting writers poll, and the one that polls at the right moment writes next: a writer that writes without a
pause starved the lane for seconds. So all writers of one process queue here before they ask SQLite. **Lanes go
first**: batches of a lane (``lane=True``) pass before the transactions of users, which hold the gate for as long as a
handler runs. A waiting user is overtaken at most ``OVERTAKES`` times, so two busy lanes cannot starve it.

Owns the order of writers within this process. Knows nothing of SQLite; SQLite orders the processes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from pathlib import Path
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from oncekey.errors import StoreUnavailable
from oncekey.stores.api import LostRace

OVERTAKES = 8
"""How many lane turns may pass a user's transaction that waits."""


class Turn(Protocol):
    """A place in the queue of the gate."""

    def release(self) -> None:
        """The gate calls this once, when the turn comes."""
        ...


class Gate:
    """Hand-over lock: ``release`` gives it to the next in the queue, so a newcomer cannot overtake the queue."""

    def __init__(self) -> None:
        self.reset()
        _ALL.add(self)

    def reset(self) -> None:
        """Forget holder and queue after a fork: their threads are in the parent process."""
        self._mutex = threading.Lock()
        self._held = False
        self._by_user = False
        self._lanes: deque[Turn] = deque()
        self._users: deque[Turn] = deque()
        self._overtaken = 0

    def acquire(self, timeout: float, *, lane: bool) -> bool:
        """True: the caller holds the gate until ``release``. False: it did not get it within ``timeout`` seconds."""
        with self._mutex:
            if not self._held:
                self._held, self._by_user = True, not lane
                return True
            turn = threading.Lock()
            turn.acquire()
            queue = self._lanes if lane else self._users
            queue.append(turn)
        if turn.acquire(timeout=max(timeout, 0.0)):
            return True
        with self._mutex:
            if turn in queue:
                queue.remove(turn)
                return False
        return True  # the turn came between the time-out and the mutex, so the caller holds the gate

    async def acquire_in_loop(self, timeout: float, *, lane: bool) -> bool:
        """``acquire`` without a thread that waits: waiters could use up the threads that the gate's holder needs."""
        turn = LoopTurn(self, asyncio.get_running_loop())
        if self.line_up(turn, lane=lane):
            return True
        try:
            await asyncio.wait_for(asyncio.shield(turn.come), timeout)
        except BaseException as error:
            if not self.leave(turn):
                self.release()  # the turn came at the last moment: pass it on
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def line_up(self, turn: Turn, *, lane: bool) -> bool:
        """An ``acquire`` that does not block.

        True: the caller holds the gate now. False: the caller holds it when the gate calls ``turn.release``.
        """
        with self._mutex:
            if self._held:
                (self._lanes if lane else self._users).append(turn)
                return False
            self._held, self._by_user = True, not lane
            return True

    def leave(self, turn: Turn) -> bool:
        """Stop waiting. False: the caller already holds the gate, and must release it."""
        with self._mutex:
            for queue in (self._lanes, self._users):
                if turn in queue:
                    queue.remove(turn)
                    return True
            return False

    def release(self) -> None:
        with self._mutex:
            user_waits_too_long = self._users and self._overtaken >= OVERTAKES
            if self._lanes and not user_waits_too_long:
                self._overtaken += 1 if self._users else 0
                self._by_user = False
                self._lanes.popleft().release()
            elif self._users:
                self._overtaken = 0
                self._by_user = True
                self._users.popleft().release()
            else:
                self._held = False

    @property
    def held_by_user(self) -> bool:
        """Whether a user's transaction holds the gate, which may last as long as a handler runs."""
        return self._held and self._by_user

    @property
    def waiting(self) -> int:
        """How many turns are in the queues."""
        return len(self._lanes) + len(self._users)


class LoopTurn:
    """A coroutine's place in the queue of the gate."""

    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self._gate = gate
        self._loop = loop
        self.come: asyncio.Future[None] = loop.create_future()

    def release(self) -> None:
        """Called by the gate, in the thread that leaves the gate."""
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop is closed: pass the turn on, but not from within the gate
            threading.Thread(target=self._gate.release).start()

    def _set(self) -> None:
        if not self.come.done():
            self.come.set_result(None)


class GateHeld(StoreUnavailable, LostRace):
    """Another transaction of this process holds the gate."""


_ALL: WeakSet[Gate] = WeakSet()
_BY_FILE: WeakValueDictionary[str, Gate] = WeakValueDictionary()
_registry = threading.Lock()


def gate_of(path: Path) -> Gate:
    """The one gate of this file. Every path to the file gives the same gate."""
    real = os.path.realpath(path)
    with _registry:
        gate = _BY_FILE.get(real)
        if gate is None:
            gate = _BY_FILE[real] = Gate()
        return gate


def _after_fork() -> None:
    global _registry  # noqa: PLW0603 - a lock that another thread held at the fork never opens again
    _registry = threading.Lock()
    for gate in list(_ALL):
        gate.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
