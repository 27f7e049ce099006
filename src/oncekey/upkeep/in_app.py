"""Upkeep inside of an app: whether it runs there, and how it starts and ends with the app.

``upkeep="auto"`` is the default of every ``protect()`` and middleware. It runs upkeep if the database is part of the
app's own processes (SQLite, memory), because no other process would. A database server has many apps and hosts: there
``oncekey upkeep`` runs beside them, or an app sets ``upkeep=True``. Several processes with one SQLite file may all run
it, since every move compares the row that it changes.

ASGI apps start it in their lifespan. WSGI has no start-up event: there the first protected request of a process starts
it, so it starts after a fork. It ends with ``once.close()`` or with the process.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Literal

from oncekey.engine import process
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError
from oncekey.upkeep.service import Upkeep

_log = logging.getLogger("oncekey")

UpkeepChoice = bool | Upkeep | Literal["auto"]


def chosen(once: OnceKey, upkeep: UpkeepChoice) -> Callable[[], Upkeep] | None:
    """A function that makes the Upkeep of an app; None: the app runs none. Each lifespan of the app makes a new one."""
    if isinstance(upkeep, Upkeep):
        return lambda: upkeep
    if upkeep not in (True, False, "auto"):
        raise ConfigurationError(f"upkeep={upkeep!r}: it takes 'auto', True, False or an Upkeep")
    runs = once.store.capabilities.embedded if upkeep == "auto" else upkeep
    return (lambda: Upkeep(once)) if runs else None


def never_started(once: OnceKey, upkeep: UpkeepChoice) -> None:
    """Log that an ASGI app got no lifespan start. With ``"auto"`` and keys in memory it logs nothing."""
    if upkeep == "auto" and not once.store.capabilities.durable:
        return
    _log.warning(
        "upkeep never started: this app got no lifespan startup, because it is mounted in another app, or its server "
        "runs without the lifespan protocol. Expired leases and unknown keys wait. Protect the outermost app, or start "
        "the server with its lifespan (uvicorn --lifespan on), or run `oncekey upkeep MODULE:ONCE` beside it and say "
        "upkeep=False here"
    )


class LazyUpkeep:
    """Upkeep of a WSGI app. Each protected request calls :meth:`start`; the first one of a process starts it.

    It ends with ``once.close()``, with the process, or when the app is collected: a test suite makes many apps.
    """

    def __init__(self, once: OnceKey, upkeep: UpkeepChoice) -> None:
        self._once = once
        self._make = chosen(once, upkeep)
        self._lock = threading.Lock()
        self._running: Upkeep | None = None
        process.enroll(self)
        _of_this_process.add(self)

    def start(self) -> None:
        if self._make is None or (self._running is not None and self._running.running):
            return
        with self._lock:
            if self._running is None or not self._running.running:
                self._running = self._make()
                self._running.start()
                self._once.on_close(self._running.stop)
                weakref.finalize(self, self._running.ask_to_stop).atexit = False

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()

    def after_fork(self) -> None:
        """In the child: the threads exist only in the parent."""
        self._lock = threading.Lock()
        self._running = None


_of_this_process: weakref.WeakSet[LazyUpkeep] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for each in list(_of_this_process):
        each.stop()
