"""Runs the duties: each in a thread of its own, on its own schedule, for as long as the process lives.

A duty that fails, hangs or has a backlog does not delay the others. Schedules have jitter, so that instances that were
started together do not run at the same moments. Several instances may run: there is no leader and no lock, because
every move compares the row that it changes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from random import SystemRandom
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from oncekey.core.values import value
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError, OnceKeyError
from oncekey.stores.api import Store
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.redaction import describe
from oncekey.upkeep.health import DutyHealth, Health, look
from oncekey.upkeep.reaper import AUDIT_RETENTION, Reaper
from oncekey.upkeep.reconciler import Reconciler
from oncekey.upkeep.resumer import Resumer
from oncekey.upkeep.sweeper import Sweeper
from oncekey.upkeep.unasked import Reporter

if TYPE_CHECKING:
    from oncekey.telemetry.exporter import Exporter
    from oncekey.telemetry.registry import Telemetry

_log = logging.getLogger("oncekey")

random = SystemRandom()
"""For jitter. Not ``random`` itself: an app that has set a seed must get the same numbers as without oncekey."""

SWEEP_SECONDS = 10.0
REAP_SECONDS = 60.0
RECONCILE_SECONDS = 5.0
REPORT_SECONDS = 60.0
"""The pause between two looks at unknown keys, in an upkeep without the app."""
RESUME_SECONDS = 5.0
CUT_OFF_SECONDS = 1.0
"""How long a cancelled resume function may take to end."""
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0


class Result(Protocol):
    def as_json(self) -> dict[str, Any]: ...


@value
class Turn:
    """The result of one turn of a duty, or the error that ended it."""

    duty: str
    result: Result | None
    error: str | None = None


class Upkeep:
    """Sweeper, reaper, reconciler and resumer over one store.

    ``once``            the app's OnceKey, with its resolvers and resume functions; or only a Store: then the log
                        reports unknown outcomes, no resolver is asked, no try is counted, and half-done requests wait
                        for their clients
    ``sweep_every``     seconds between two turns, likewise ``reap_every``, ``reconcile_every`` and ``resume_every``. A
                        key is stuck for at most its lease and ``sweep_every``
    ``soft``            keep expired keys for a second retention, without their answers, instead of deleting them
    ``audit_retention`` how long a line of the audit is kept after its key is over; None: for ever
    ``telemetry``       exporters of metrics, in addition to those of the OnceKey. While it runs, all of them show the
                        numbers of the whole store (docs/metrics.md)
    ``sweeper``, ``reaper``, ``reconciler``, ``resumer``  your own, where a default does not fit

    ``with Upkeep(once):``, or in an event loop ``async with Upkeep(once):``; async resolvers and
    resume functions then run in that loop. In an app: ``protect(app, once, upkeep=True)``, which is the default where
    the store is embedded (``in_app.py``).
    """

    def __init__(
        self,
        once: OnceKey | Store,
        *,
        sweep_every: float = SWEEP_SECONDS,
        reap_every: float = REAP_SECONDS,
        reconcile_every: float = RECONCILE_SECONDS,
        resume_every: float = RESUME_SECONDS,
        soft: bool = False,
        audit_retention: timedelta | None = AUDIT_RETENTION,
        telemetry: Telemetry = None,
        sweeper: Sweeper | None = None,
        reaper: Reaper | None = None,
        reconciler: Reconciler | None = None,
        resumer: Resumer | None = None,
    ) -> None:
        for name, seconds in (
            ("sweep", sweep_every),
            ("reap", reap_every),
            ("reconcile", reconcile_every),
            ("resume", resume_every),
        ):
            if seconds <= 0:
                raise ConfigurationError(f"Upkeep({name}_every={seconds}): it must be more than 0 seconds")
        if soft and reaper is not None:
            raise ConfigurationError("Upkeep(soft=True, reaper=…): say it to the reaper, Reaper(store, soft=True)")
        if audit_retention != AUDIT_RETENTION and reaper is not None:
            raise ConfigurationError(
                "Upkeep(audit_retention=…, reaper=…): say it to the reaper, Reaper(store, audit_retention=…)"
            )
        app = once if isinstance(once, OnceKey) else None
        self.store: Store = once.store if isinstance(once, OnceKey) else once
        self._emitter = app.engine.emitter if app else Emitter()
        if telemetry is not None:
            self._emitter.add_all(telemetry)
        self._sweeper = sweeper or Sweeper(self.store, emitter=self._emitter)
        self._reaper = reaper or Reaper(
            self.store,
            soft=soft,
            audit_retention=audit_retention,
            profile=app.profile if app else "ietf",
            emitter=self._emitter,
        )
        self._reconciler = reconciler or (Reconciler(app) if app else None)
        self._resumer = resumer or (Resumer(app) if app else None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._duties = [
            _Duty("sweep", sweep_every, self._sweeper.run),
            _Duty("reap", reap_every, self._reaper.run),
        ]
        if self._reconciler is not None:
            self._duties.append(_Duty("reconcile", reconcile_every, self._in_loop(self._reconciler)))
        else:
            self._duties.append(_Duty("report", REPORT_SECONDS, Reporter(self.store).run))
        if self._resumer is not None:  # after the reconciler: the resumer can continue keys that it has just settled
            self._duties.append(_Duty("resume", resume_every, self._in_loop(self._resumer)))

    def _in_loop(self, caller: Reconciler | Resumer) -> Callable[..., Result]:
        """Wraps the run of a duty that calls functions of the app: it passes the loop that :meth:`start` found."""

        def run(stop: threading.Event, *, dry_run: bool) -> Result:
            return caller.run(stop, dry_run=dry_run, loop=self._loop)

        return run

    def _close(self, name: str | None = None) -> None:
        """Close the loops and threads in which functions of the app ran: of one duty, or of all."""
        for duty, caller in (("reconcile", self._reconciler), ("resume", self._resumer)):
            if caller is not None and name in (None, duty):
                caller.close()

    # -- for as long as the process lives --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the duties, and return at once. If an event loop is running, it runs the async functions of the app."""
        if any(thread.is_alive() for thread in self._threads):  # in a forked child no thread is alive
            raise ConfigurationError("this Upkeep is running already")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(duty, self._stop), name=f"oncekey-{duty.name}", daemon=True)
            for duty in self._duties
        ]
        for thread in self._threads:
            thread.start()
        if self._emitter.exporters:
            from oncekey.upkeep import gauges  # an upkeep without exporters does not import them

            gauges.show(self._emitter.exporters, self.store)

    def stop(self, timeout: float = 10.0) -> bool:
        """End after the running batch. Do not wait for resolvers; wait for resume functions until the time-out.
        False: a thread is still running.

        Blocks. From an event loop: ``await upkeep.astop()``.
        """
        self.ask_to_stop()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._resumer is not None and any(thread.is_alive() for thread in self._threads):
            self._resumer.interrupt()  # last, because it interrupts running requests
            for thread in self._threads:
                thread.join(CUT_OFF_SECONDS)
        left = any(thread.is_alive() for thread in self._threads)
        if self._threads and self._emitter.exporters:
            from oncekey.upkeep import gauges

            gauges.hide(self._emitter.exporters)
        self._threads = []
        return not left

    def ask_to_stop(self) -> None:
        """:meth:`stop` without waiting."""
        self._stop.set()
        if self._reconciler is not None:
            self._reconciler.interrupt()

    @property
    def exporters(self) -> tuple[Exporter, ...]:
        return self._emitter.exporters

    def export_to(self, exporter: Exporter) -> None:
        """Send events to this exporter, too. Before :meth:`start`: it then shows the numbers of the store."""
        self._emitter.add_all(exporter)

    @property
    def running(self) -> bool:
        """It was started, and has not been stopped since then."""
        return bool(self._threads)

    async def astop(self, timeout: float = 10.0) -> bool:
        """:meth:`stop` without blocking the loop: an async resolver may be running in it."""
        return await asyncio.to_thread(self.stop, timeout)

    def _serve(self, duty: _Duty, stop: threading.Event) -> None:
        # A short random pause, so that duties and instances do not start at once. A deploy must not delay due work.
        stop.wait(random.uniform(0.0, min(1.0, duty.every / 10)))
        while not stop.is_set():
            self._take_turn(duty, stop)
            stop.wait(duty.pause())
        self._close(duty.name)
        self.store.disconnect()

    def _take_turn(self, duty: _Duty, stop: threading.Event, *, dry_run: bool = False) -> Turn:
        began = time.monotonic()
        try:
            result = duty.run(stop, dry_run=dry_run)
        except Exception as error:
            duty.failed(describe(error))
            if not isinstance(error, OnceKeyError):
                _log.exception("%s failed unexpectedly; it goes on", duty.name)
            self._emitter.emit(events.DutyFailed(duty.name, describe(error), in_seconds=round(duty.retry_in, 1)))
            self.store.disconnect()
            return Turn(duty.name, None, describe(error))
        duty.succeeded()
        if self._emitter.wants(events.DutyDone):
            self._emitter.emit(events.DutyDone(duty.name, seconds=round(time.monotonic() - began, 3)))
        return Turn(duty.name, result)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.astop()

    # -- once, and how it goes -------------------------------------------------------------------------------------

    def run_once(self, *, dry_run: bool = False) -> list[Turn]:
        """One turn of each duty, in this thread: for cron and tests. A duty that fails does not stop the others."""
        try:
            return [self._take_turn(duty, threading.Event(), dry_run=dry_run) for duty in self._duties]
        finally:
            self._close()
            self.store.disconnect()

    def health(self) -> Health:
        """When each duty last succeeded in this process, and what has waited too long. Blocks: it asks the store."""
        return look(self.store, [duty.health() for duty in self._duties])


class _Duty:
    """The schedule and the last results of one duty. Only the duty's own thread writes it."""

    def __init__(self, name: str, every: float, run: Callable[..., Result]) -> None:
        self.name = name
        self.every = every
        self.run = run
        self.retry_in = 0.0
        self._succeeded_at: float | None = None
        self._failures = 0
        self._last_error: str | None = None

    def succeeded(self) -> None:
        self._succeeded_at = time.monotonic()
        self._failures, self._last_error, self.retry_in = 0, None, 0.0

    def failed(self, error: str) -> None:
        self._last_error = error
        pause = FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 16)
        self._failures += 1
        self.retry_in = min(LONGEST_RETRY_SECONDS, pause) * random.uniform(0.5, 1.0)

    def pause(self) -> float:
        """Seconds until the next turn."""
        return self.retry_in or self.every * random.uniform(0.8, 1.2)

    def health(self) -> DutyHealth:
        ago = None if self._succeeded_at is None else time.monotonic() - self._succeeded_at
        return DutyHealth(self.name, self.every, ago, self._failures, self._last_error)
