"""One run of a worker, from the first claim to the last conclusion.

Tasks run in the event loop (async) or in a thread (sync). All calls of the store go through the pump (``pump.py``), and
``places.py`` says which jobs run now.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from oncekey.core.jobs import Conclusion, JobEnd
from oncekey.core.sealed import readable
from oncekey.errors import ConfigurationError, OutcomeUnknown, StoreUnavailable
from oncekey.outbox.attempts import Attempt, Counts
from oncekey.outbox.places import Places
from oncekey.outbox.pump import Pump, Until
from oncekey.outbox.tasks import Context, Task, raised, returned
from oncekey.outbox.threads import Threads
from oncekey.stores.api import Outbox
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.events import about_job
from oncekey.telemetry.redaction import describe

END_SECONDS = 5.0
"""How long the pump may store the last conclusions after the grace is over."""
CUT_OFF = "cut off because its worker stopped"


class Shift:
    """``lease``, ``poll`` and ``tasks`` are the worker's; ``work`` returns what was done."""

    def __init__(
        self,
        store: Outbox,
        tasks: Mapping[str, Task],
        *,
        concurrency: int,
        lease: float,
        poll: float,
        grace: float,
        until: Until,
        emitter: Emitter,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._grace = grace
        self._emitter = emitter
        self._threads = Threads()
        self._places = Places(concurrency, self._loop, self._start, self._give_back)
        self._stopping = False
        self._over = asyncio.Event()
        self._pump = Pump(
            store,
            dict(tasks),
            concurrency=concurrency,
            lease=lease,
            poll=poll,
            until=until,
            emitter=emitter,
            begin=lambda attempts: self._tell(self._places.begin, attempts),
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
            if left := [attempt.work for attempt in self._places.running if attempt.work and attempt.task.is_async]:
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
        self._places.close()
        self._loop.call_later(grace, self._cut)

    def _cut(self) -> None:
        """The grace is over: cancel async tasks, and release their jobs if those may be repeated.

        A thread cannot be cancelled. Its job keeps the lease until that runs out: if it were released, another worker
        would run it while the thread still runs.
        """
        for attempt in self._places.running:
            attempt.cut = True
            if attempt.task.is_async and attempt.work is not None:
                attempt.work.cancel()
        self._pump.abandon([attempt for attempt in self._places.running if not attempt.task.is_async])
        self._loop.call_later(END_SECONDS, self._pump.end)

    # -- attempts --------------------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(function, *arguments)

    def _start(self, attempt: Attempt) -> None:
        if self._emitter.wants(events.JobStarted):
            self._emitter.emit(events.JobStarted(*about_job(attempt.job), lag_seconds=attempt.job.lag))
        attempt.work = self._loop.create_task(self._attempt(attempt))

    def _give_back(self, attempt: Attempt) -> None:
        """The job has not begun. The store says whether this worker still has it."""
        attempt.seconds = float("inf")  # the pump claims no more jobs ahead
        release = Conclusion(attempt.job.id, attempt.owner, JobEnd.RELEASE)
        self._pump.conclude(attempt, None if attempt.lost else release)

    def _lose(self, attempt: Attempt) -> None:
        """The lease is over. An async task is cancelled. A task in a thread goes on, and its result is dropped."""
        if attempt.task.is_async and attempt.work is not None:
            attempt.work.cancel()

    async def _attempt(self, attempt: Attempt) -> None:
        try:
            conclusion = await self._conclusion(attempt)
        finally:
            self._places.end(attempt)
        self._pump.conclude(attempt, conclusion)
        self._places.refill()

    async def _conclusion(self, attempt: Attempt) -> Conclusion | None:
        job, task, owner = attempt.job, attempt.task, attempt.owner
        try:
            return returned(job, owner, await self._result(attempt))
        except asyncio.CancelledError as cancelled:
            if attempt.lost:
                return None
            if attempt.cut and task.max_attempts > 1:
                return Conclusion(job.id, owner, JobEnd.RELEASE, error=CUT_OFF, of=(job.scope, job.key))
            error: BaseException = TimeoutError("the lease ran out, because the store could not be reached to renew it")
            if attempt.cut:  # it has only one attempt, and may have acted or not
                error = OutcomeUnknown(CUT_OFF)
            elif attempt.timed_out:
                error = attempt.error = _too_long(task, cancelled)
            elif not attempt.expired:
                error = asyncio.CancelledError("the task was cancelled, and not by its worker")
        except (Exception, SystemExit) as caught:
            error = attempt.error = caught
            if attempt.timed_out and isinstance(caught, TimeoutError):
                error = attempt.error = _too_long(task, caught)
        attempt.failure = describe(error)
        return raised(job, owner, task, error, random.random())

    async def _result(self, attempt: Attempt) -> object:
        task = attempt.task
        context = Context(attempt.job, task, lambda provider_id: self._pump.note(attempt, provider_id))
        payload = orjson.loads(readable(attempt.job.payload, "the payload of this job"))
        function = task.function
        if self._emitter.exporters:
            function = self._observed(attempt, function)
        if task.is_async:
            return await function(context, payload)
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


def _too_long(task: Task, cause: BaseException) -> TimeoutError:
    error = TimeoutError(f"took longer than {task.timeout:g} s")
    error.__cause__ = cause
    return error
