"""The worker: registers tasks, and opens the store whose jobs a shift runs (``shift.py``).

Any number of workers may use one store, in any number of processes and hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from oncekey.engine.once import OnceKey
from oncekey.engine.parts import keyring_of, store_of
from oncekey.errors import ConfigurationError
from oncekey.outbox.attempts import Counts
from oncekey.outbox.pump import Until
from oncekey.outbox.shift import Shift
from oncekey.outbox.tasks import Task, make_task
from oncekey.stores.api import Outbox, Sealing, Store
from oncekey.stores.registry import WITH_TRANSACTIONS
from oncekey.telemetry.emitter import Emitter, Hook

if TYPE_CHECKING:
    from oncekey.encryption import Keyring
    from oncekey.telemetry.exporter import Exporter
    from oncekey.telemetry.registry import Telemetry

_Function = TypeVar("_Function", bound=Callable[..., Any])

GRACE_SECONDS = 30.0


class Worker:
    """Runs the jobs that requests added to the outbox.

    ``store``        ``postgresql://…``, ``sqlite:///…``, a Store, or the app's OnceKey; None: ``run`` gets it
    ``concurrency``  how many jobs run at once
    ``lease``        seconds after which the jobs of a dead worker are free; a live worker renews, so it limits no task
    ``poll``         seconds between two claims while no job is due
    ``encryption``   the app's keyring, if ``store`` is not its OnceKey (docs/encryption.md)
    ``on_event``     called with every event (oncekey.telemetry.events)
    ``telemetry``    exporters of metrics and traces (docs/metrics.md), in addition to those of the OnceKey
    """

    def __init__(
        self,
        store: str | Store | OnceKey | None = None,
        *,
        concurrency: int = 8,
        lease: float = 30.0,
        poll: float = 0.5,
        encryption: Keyring | None = None,
        on_event: Hook | None = None,
        telemetry: Telemetry = None,
    ) -> None:
        self._keyring = keyring_of(encryption, "Worker")
        for name, number in (("concurrency", concurrency), ("lease", lease), ("poll", poll)):
            if number <= 0:
                raise ConfigurationError(f"Worker({name}={number}): it must be more than 0")
        self.concurrency = concurrency
        self.lease = lease
        self.poll = poll
        self.tasks: dict[str, Task] = {}
        self._store = store
        self._emitter = Emitter(on_event)
        if isinstance(store, OnceKey):
            self._store = store.store
            self._emitter = Emitter(on_event, store.engine.emitter.exporters) if on_event else store.engine.emitter
        if telemetry is not None:
            self._emitter.add_all(telemetry)
        self._shift: Shift | None = None

    @property
    def exporters(self) -> tuple[Exporter, ...]:
        return self._emitter.exporters

    def export_to(self, exporter: Exporter) -> None:
        """Send events to this exporter, too."""
        self._emitter.add_all(exporter)

    def task(
        self,
        name: str | None = None,
        *,
        max_attempts: int = 8,
        timeout: float = 30.0,
        backoff: float = 1.0,
        max_backoff: float = 600.0,
    ) -> Callable[[_Function], _Function]:
        """Register a function, sync or async, for the jobs of this name (default: the name of the function).

        After attempt n the job waits a random time up to ``backoff * 2**(n-1)`` seconds, at most ``max_backoff``. After
        ``max_attempts`` the job is a dead letter.
        """
        if callable(name):
            raise ConfigurationError("@worker.task needs brackets: write @worker.task() or @worker.task('name')")

        def register(function: _Function) -> _Function:
            known_as = name or str(getattr(function, "__name__", type(function).__name__))
            if known_as in self.tasks:
                raise ConfigurationError(f"task '{known_as}' is registered twice: give one of them another name")
            self.tasks[known_as] = make_task(
                known_as,
                function,
                max_attempts=max_attempts,
                timeout=timeout,
                backoff=backoff,
                max_backoff=max_backoff,
            )
            return function

        return register

    def run(
        self,
        *,
        store: str | Store | None = None,
        concurrency: int | None = None,
        grace: float = GRACE_SECONDS,
        until: Until = "stopped",
        progress: Callable[[Counts], None] | None = None,
        interval: float = 1.0,
    ) -> Counts:
        """Run jobs until SIGTERM or SIGINT, and return the counts. After a second signal no task is waited for.
        Blocks."""
        return asyncio.run(
            self.serve(
                store=store,
                concurrency=concurrency,
                grace=grace,
                until=until,
                progress=progress,
                interval=interval,
                signals=True,
            )
        )

    async def serve(
        self,
        *,
        store: str | Store | None = None,
        concurrency: int | None = None,
        grace: float = GRACE_SECONDS,
        until: Until = "stopped",
        progress: Callable[[Counts], None] | None = None,
        interval: float = 1.0,
        signals: bool = False,
    ) -> Counts:
        """As :meth:`run`, in a running event loop; :meth:`stop` ends it.

        ``until`` is ``stopped``, ``drained`` (no job is due any more) or ``once`` (one claim). ``progress`` is called
        with the counts every ``interval`` seconds.
        """
        if not self.tasks:
            raise ConfigurationError("this worker has no tasks: register functions with @worker.task()")
        if self._shift is not None:
            raise ConfigurationError(
                "this worker is running already: for more jobs at once, give it a higher concurrency"
            )
        with self._opened(store) as opened:
            self._shift = shift = Shift(
                opened,
                self.tasks,
                concurrency=concurrency or self.concurrency,
                lease=self.lease,
                poll=self.poll,
                grace=grace,
                until=until,
                emitter=self._emitter,
            )
            try:
                return await shift.work(progress, interval, signals=signals)
            finally:
                self._shift = None

    def stop(self, grace: float | None = None) -> None:
        """Claim no more jobs, give running tasks ``grace`` seconds, then release their jobs. Safe from any thread."""
        if self._shift is not None:
            self._shift.stop_from_outside(grace)

    @contextlib.contextmanager
    def _opened(self, given: str | Store | None) -> Iterator[Outbox]:
        """The store of this run. A store that was opened here is closed here."""
        wanted = given or self._store or os.environ.get("ONCEKEY_STORE")
        if not wanted:
            raise ConfigurationError(f"the worker has no store: give it one of {WITH_TRANSACTIONS}")
        if isinstance(wanted, OnceKey):
            wanted = wanted.store
        opened = wanted if isinstance(wanted, Sealing) else store_of(wanted, self._keyring)
        if not isinstance(opened, Outbox):
            raise ConfigurationError(
                "this store has no outbox, because no business write can be committed with it: "
                f"use one of {WITH_TRANSACTIONS}"
            )
        try:
            yield opened
        finally:
            if isinstance(wanted, str):
                opened.close()
