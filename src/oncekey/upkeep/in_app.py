"""Upkeep inside an app: whether it runs there, and how it starts and ends with it.

``upkeep="auto"``, the default of every ``protect()`` and middleware, runs it where the database is part of the app's
own processes (SQLite, memory), because nothing else would. A server's database has many apps and hosts: there
``oncekey upkeep`` runs beside them, or an app says ``upkeep=True``. Several processes over one SQLite file may all run
it, since every move compares what it changes.

ASGI apps start it in their lifespan. WSGI has no start-up event: there it starts at the first protected request of a
process, so after a fork, and ends with ``once.close()`` or with the process.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Literal

from oncekey.engine import forks
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError
from oncekey.upkeep.service import Upkeep

_log = logging.getLogger("oncekey")

UpkeepChoice = bool | Upkeep | Literal["auto"]


def chosen(once: OnceKey, upkeep: UpkeepChoice) -> Callable[[], Upkeep] | None:
    """How to make the Upkeep that an app runs; None: it runs none. Each lifespan makes one: an app may have several."""
    if isinstance(upkeep, Upkeep):
        return lambda: upkeep
    if upkeep not in (True, False, "auto"):
        raise ConfigurationError(f"upkeep={upkeep!r}: it takes 'auto', True, False or an Upkeep")
    runs = once.store.capabilities.embedded if upkeep == "auto" else upkeep
    return (lambda: Upkeep(once)) if runs else None


def never_started(once: OnceKey, upkeep: UpkeepChoice) -> None:
    """Say that an ASGI app was not told of its start. With ``"auto"``, keys in memory are not worth a word."""
    if upkeep == "auto" and not once.store.capabilities.durable:
        return
    _log.warning(
        "upkeep never started: this app got no lifespan startup, because it is mounted in another app, or its server "
        "runs without the lifespan protocol. Expired leases and unknown keys wait. Protect the outermost app, or start "
        "the server with its lifespan (uvicorn --lifespan on), or run `oncekey upkeep MODULE:ONCE` beside it and say "
        "upkeep=False here"
    )


class LazyUpkeep:
    """Upkeep of a WSGI app: :meth:`start` at each protected request, of which the first one of a process counts."""

    def __init__(self, once: OnceKey, upkeep: UpkeepChoice) -> None:
        self._once = once
        self._make = chosen(once, upkeep)
        self._lock = threading.Lock()
        self._running: Upkeep | None = None
        self.settled = self._make is None
        """There is nothing to start (any more) in this process."""
        forks.enroll(self)

    def start(self) -> None:
        with self._lock:
            if self.settled or self._make is None:
                return
            self._running = self._make()
            self._running.start()
            self._once.on_close(self.stop)
            atexit.register(self.stop)
            self.settled = True

    def stop(self) -> None:
        """The next request starts it again: a closed OnceKey opens again, too."""
        with self._lock:
            running, self._running = self._running, None
            self.settled = self._make is None
        if running is not None:
            atexit.unregister(self.stop)
            running.stop()

    def after_fork(self) -> None:
        """In the child: the threads stayed with the parent."""
        self._lock = threading.Lock()
        self._running = None
        self.settled = self._make is None
