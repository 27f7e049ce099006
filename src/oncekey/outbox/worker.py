"""The worker: registers tasks, and runs the jobs of one store.

Tasks run in the event loop (async) or in a thread (sync). All calls of the store go through the pump. Any number of
workers may use one store, in any number of processes and hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from oncekey.core.jobs import Conclusion, JobEnd
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError, OutcomeUnknown, StoreUnavailable
from oncekey.outbox.attempts import Attempt, Counts
from oncekey.outbox.pump import Pump, Until
from oncekey.outbox.tasks import Context, Task, make_task, raised, returned
from oncekey.outbox.threads import Threads
from oncekey.stores.api import Outbox, Store
from oncekey.stores.registry import WITH_TRANSACTIONS, open_store
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter, Hook
from oncekey.telemetry.events import about_job
from oncekey.telemetry.redaction import describe

if TYPE_CHECKING:
    from oncekey.telemetry.exporter import Exporter
    from oncekey.telemetry.registry import Telemetry

_Function = TypeVar("_Function", bound=Callable[..., Any])

GRACE_SECONDS = 30.0
END_SECONDS = 5.0
"""How long the pump may store the last conclusions after the grace is over."""
CUT_OFF = "cut off because its worker stopped"


class Worker:
    """Runs the jobs that requests added to the outbox.

    ``store``        ``postgresql://…``, ``sqlite:///…``, a Store, or the app's OnceKey; None: ``run`` gets it
    ``concurrency``  how many jobs run at once
    ``lease``        seconds after which the jobs of a dead worker are free; a live worker renews, so it limits no task
    ``poll``         seconds between two claims while no job is due
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
        on_event: Hook | None = None,
        telemetry: Telemetry = None,
    ) -> None:
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
            self._shift = shift = Shift(self, opened, concurrency or self.concurrency, grace, until, self._emitter)
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
        opened = open_store(wanted) if isinstance(wanted, str) else wanted
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


class Shift:
    """One run of a worker: from the first claim to the last conclusion."""

    def __init__(
        self, worker: Worker, store: Outbox, concurrency: int, grace: float, until: Until, emitter: Emitter
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._grace = grace
        self._emitter = emitter
        self._threads = Threads()
        self._running: set[Attempt] = set()
        self._stopping = False
        self._over = asyncio.Event()
        self._pump = Pump(
            store,
            dict(worker.tasks),
            concurrency=concurrency,
            lease=worker.lease,
            poll=worker.poll,
            until=until,
            emitter=emitter,
            begin=lambda attempts: self._tell(self._begin, attempts),
            lose=lambda attempt: self._tell(self._lose, attempt),
            over=lambda: self._tell(self._over.set),
        )

    async def work(self, progress: Callable[[Counts], None] | None, interval: float, *, signals: bool) -> Counts:
        await asyncio.to_thread(self._check)
        with self._signals() if signals else contextlib.nullcontext():
            self._pump.start()
            while not self._over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), interval if progress else None)
                if progress and not self._over.is_set():
                    progress(self._pump.counts)
            self._threads.close()
            if left := [attempt.work for attempt in self._running if attempt.work and attempt.task.is_async]:
                await asyncio.wait(left, timeout=0.1)
        return self._pump.counts

    def _check(self) -> None:
        """Raise if tables are missing, because an operator must act. A store that is down will come back."""
        with contextlib.suppress(StoreUnavailable):
            self._store.check()
        self._store.disconnect()

    # -- the end ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            self._loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in numbers:
                self._loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        self._stop(0.0 if self._stopping else self._grace)

    def stop_from_outside(self, grace: float | None) -> None:
        self._tell(self._stop, self._grace if grace is None else grace)

    def _stop(self, grace: float) -> None:
        self._stopping = True
        self._pump.stop()
        self._loop.call_later(grace, self._cut)

    def _cut(self) -> None:
        """The grace is over: cancel async tasks, and release their jobs if those may be repeated.

        A thread cannot be cancelled. Its job keeps the lease until that runs out: if it were released, another worker
        would run it while the thread still runs.
        """
        for attempt in self._running:
            attempt.cut = True
            if attempt.task.is_async and attempt.work is not None:
                attempt.work.cancel()
        self._pump.abandon([attempt for attempt in self._running if not attempt.task.is_async])
        self._loop.call_later(END_SECONDS, self._pump.end)

    # -- attempts --------------------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(function, *arguments)

    def _begin(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            self._running.add(attempt)
            if self._emitter.wants(events.JobStarted):
                self._emitter.emit(events.JobStarted(*about_job(attempt.job), lag_seconds=attempt.job.lag))
            attempt.work = self._loop.create_task(self._attempt(attempt))

    def _lose(self, attempt: Attempt) -> None:
        """The lease is over. An async task is cancelled. A task in a thread goes on, and its result is dropped."""
        if attempt.task.is_async and attempt.work is not None:
            attempt.work.cancel()

    async def _attempt(self, attempt: Attempt) -> None:
        try:
            conclusion = await self._conclusion(attempt)
        finally:
            self._running.discard(attempt)
        self._pump.conclude(attempt, conclusion)

    async def _conclusion(self, attempt: Attempt) -> Conclusion | None:
        job, task, owner = attempt.job, attempt.task, attempt.owner
        try:
            return returned(job, owner, await self._result(attempt))
        except asyncio.CancelledError:
            if attempt.lost:
                return None
            if attempt.cut and task.max_attempts > 1:
                return Conclusion(job.id, owner, JobEnd.RELEASE, error=CUT_OFF)
            error: BaseException = TimeoutError("the lease ran out, because the store could not be reached to renew it")
            if attempt.cut:  # it has only one attempt, and may have acted or not
                error = OutcomeUnknown(CUT_OFF)
            elif not attempt.expired:
                error = asyncio.CancelledError("the task was cancelled, and not by its worker")
        except (Exception, SystemExit) as caught:
            error = attempt.error = caught
        attempt.failure = describe(error)
        return raised(job, owner, task, error, random.random())

    async def _result(self, attempt: Attempt) -> object:
        task = attempt.task
        context = Context(attempt.job, task, lambda provider_id: self._pump.note(attempt, provider_id))
        payload = orjson.loads(attempt.job.payload)
        function = task.function
        if self._emitter.exporters:
            function = self._observed(attempt, function)
        if task.is_async:
            limit = asyncio.timeout(task.timeout)
            try:
                async with limit:
                    return await function(context, payload)
            except TimeoutError as error:
                if limit.expired():
                    raise TimeoutError(f"took longer than {task.timeout:g} s") from error
                raise
        result = await self._in_thread(attempt, function, context, payload)
        if inspect.iscoroutine(result):
            result.close()
            raise ConfigurationError(
                f"task '{task.name}' returned a coroutine, which was not awaited: make it async def"
            )
        return result

    def _observed(self, attempt: Attempt, function: Callable[..., Any]) -> Callable[..., Any]:
        from oncekey.telemetry.exporter import answer  # a worker without exporters does not import it

        for exporter in self._emitter.exporters:
            function = answer(exporter, "around_job", function, attempt.job, function)
        return function

    async def _in_thread(
        self, attempt: Attempt, function: Callable[..., object], context: Context, payload: object
    ) -> object:
        future = asyncio.wrap_future(self._threads.submit(function, context, payload))
        done, _ = await asyncio.wait([future], timeout=attempt.task.timeout)
        if not done:
            attempt.renews = False
            self._emitter.emit(events.JobOverran(*about_job(attempt.job), seconds=attempt.task.timeout))
        return await future
