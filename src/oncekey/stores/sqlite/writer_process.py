"""SQLite's writer as a process of its own: ``sqlite:///app.db?writer=process``.

A thread that commits takes turns at the GIL with the event loop, several times per batch. A process does not. The loop
packs a batch, sends it over a socket, and goes on with other requests until the answer comes (``writer_program.py`` is
the other end). The first batch starts the process; while it starts, the lanes do the work.

**The gate of the file is taken before a batch is sent, and given back after the answer.** SQLite's own lock is unfair,
and the app's enlisted transactions write in another process than the batches. If no answer comes (the process died, or
the time is up, or the caller was cancelled), the outcome is not known. Then the process is killed, and the gate is
given back when the kernel says that it is dead: nothing can be written late, behind the back of a lane that reads the
rows again. A new process starts only after that. Each start after a failure waits longer than the one before.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.api import LostRace
from oncekey.stores.sqlite.connections import BUSY, Connections
from oncekey.stores.sqlite.gate import GateHeld
from oncekey.stores.sqlite.writer_helper import Helper

if TYPE_CHECKING:
    from oncekey.stores.sqlite.batch import Packed
    from oncekey.stores.sqlite.store import SqliteStore

_log = logging.getLogger("oncekey")

AGAIN_SECONDS, MOST_SECONDS = 1.0, 60.0
"""The pause before the next start after one failure, and the longest pause; it doubles with each failure."""


class ProcessWriter:
    """The writer process of one event loop, and of one file in this app process."""

    def __init__(self, store: SqliteStore, reading: Connections, lock_seconds: float) -> None:
        """``reading``: the connection on which the event loop reads."""
        self._store = store
        self._reading = reading
        self._lock_seconds = lock_seconds
        self._helper: Helper | None = None
        self._failures = 0
        self._next_start = 0.0
        self._closed = False
        _ALL.add(self)

    @property
    def pid(self) -> int | None:
        """The id of the process, once it has opened the file."""
        helper = self._helper
        return None if helper is None or helper.files is None or helper.over else helper.process.pid

    def ready(self) -> bool:
        """Whether a batch can be written now. If not, start the process, so that it can be soon."""
        helper = self._helper
        if helper is None or helper.dead:
            self._start()
            return False
        return helper.files is not None and not helper.over

    async def write(self, packed: Packed) -> tuple[float, bool]:
        """Commit a batch: the time of its rows, and whether all of them changed."""
        helper, gate = self._helper, self._store.gate
        # The first way does not wait. The second one waits in the line, and the loop goes on.
        if not (gate.acquire(0.0, lane=True) or await gate.acquire_in_loop(self._lock_seconds, lane=True)):
            raise GateHeld(f"{self._store.path} was held by another transaction of this process")
        if helper is None or not helper.take_gate():
            gate.release()
            raise LostRace("the writer process is not there, so the lanes write this batch")
        now = self._store.clock()
        number, text = await helper.ask(now, packed)
        if number < 0:
            if -number not in BUSY:  # its connection may be damaged
                helper.kill()
                self._failed(f"met an error of SQLite ({text})")
            raise self._reading.in_words(-number, text, self._lock_seconds)
        self._failures = 0
        try:
            self._reading.compare_files(*helper.opened)
        except StoreUnavailable:
            helper.kill()
            raise
        return now, number == packed.rows

    def timed_out(self) -> None:
        """A batch took too long. If the process had it, ``Helper.ask`` has killed the process."""
        if self._helper is not None and self._helper.over:
            self._failed(f"did not answer within {self._store.timeout:g} s, and was killed")

    def _start(self) -> None:
        if self._closed or time.monotonic() < self._next_start:
            return
        with self._reading.use():  # the tables are as this version needs them, and the file's id is known
            pass
        try:
            self._helper = Helper(self._store, self._reading.file_id, self._lock_seconds, self._failed)
        except OSError as error:
            self._failed(f"could not be started ({error})")

    def _failed(self, why: str) -> None:
        pause = min(AGAIN_SECONDS * 2**self._failures, MOST_SECONDS)
        self._failures = min(self._failures + 1, 10)
        self._next_start = time.monotonic() + pause
        _log.warning(
            "the writer process of %s %s. The lanes write in its place, which is slower. It is started again after "
            "%g s; without ?writer=process in the URL, a thread writes",
            self._store.path,
            why,
            pause,
        )

    def in_use(self) -> bool:
        """Whether it may still have a process, now or later."""
        return not self._closed and (self._helper is None or not self._helper.loop.is_closed())

    def close(self) -> None:
        """End the process. From any thread."""
        self._closed = True
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def after_fork_in_child(self) -> None:
        """The process is the parent's. The child closes its copy of the socket, or it would keep that process alive."""
        helper, self._helper = self._helper, None
        if helper is not None:
            _INHERITED.append(helper)
            helper.disown()


def writer_of(store: SqliteStore, reading: Connections, lock_seconds: float) -> ProcessWriter | None:
    """None: another event loop of this process has the writer process of this file."""
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "fork"):
        raise ConfigurationError("writer=process needs Linux, macOS or another Unix: leave it out, and a thread writes")
    real = os.path.realpath(store.path)
    with _registry:
        there = _BY_FILE.get(real)
        if there is not None and there.in_use():
            return None
        made = _BY_FILE[real] = ProcessWriter(store, reading, lock_seconds)
        return made


_ALL: WeakSet[ProcessWriter] = WeakSet()
_BY_FILE: WeakValueDictionary[str, ProcessWriter] = WeakValueDictionary()
_registry = threading.Lock()
_INHERITED: list[Helper] = []
"""Processes of a parent. This process neither talks to them nor ends them."""


def _after_fork_in_child() -> None:
    global _registry  # noqa: PLW0603 - a lock that another thread held at the fork never opens again
    _registry = threading.Lock()
    _BY_FILE.clear()
    for writer in list(_ALL):
        writer.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
