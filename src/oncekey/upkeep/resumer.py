"""The resumer continues half-done requests whose client did not retry, with functions of the app.

A phased key that is ``failed_retryable`` with steps is **half done**: for example, a ride is booked and not yet paid.
Usually its client retries. If it does not, or if a verdict has just settled the effect in doubt, the resumer begins the
next attempt itself and calls the function of ``once.resume``. This is an attempt like any other: it has its own owner
token and a lease that the keeper renews, and ``core/judgment.py`` judges its end. A retry of the client gets 409 while
it runs. If the retry comes first, the resumer finds that the key has moved, and skips it.

A try is counted when it begins, so that a try that kills the process counts too. The pause between tries grows
(``core/swaps.resume_in``); after ``max_tries`` the key is a dead letter, for an operator. If the operation has no
function here, or is not declared phased here, or something of the key is encrypted and does not open here, the resumer
leaves the key to other processes for a minute, and then looks again every ten minutes. That counts as no try. A key
that stays so becomes unknown when its retention is over, and the reconciler counts its tries.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from functools import partial
from typing import Any

from oncekey.core.audit import Audit
from oncekey.core.judgment import Move
from oncekey.core.policy import Policy
from oncekey.core.record import Record, Reservation, StoredResponse, tenant_of
from oncekey.core.responses import as_response
from oncekey.core.sealed import shown
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import Swap, swap
from oncekey.core.values import value
from oncekey.engine import last_move
from oncekey.engine.batching.ticket import Work
from oncekey.engine.flows import Finished, Flow
from oncekey.engine.keeper import Unfinished
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import _current
from oncekey.engine.resumption import ResumeFunction, Resumption
from oncekey.engine.settlement import SETTLE_SECONDS, kept_words
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Duty
from oncekey.telemetry import events
from oncekey.telemetry.events import about
from oncekey.telemetry.redaction import describe
from oncekey.upkeep.callers import ABOUT_THE_STORE, Callers, is_async
from oncekey.upkeep.unreadable import UnreadableWatch, is_left
from oncekey.upkeep.waiting import HalfDoneWatch
from oncekey.web.endings import answered, raised

BATCH = 100
COUNTED = 10_000
"""A dry run counts at most this many keys."""
NO_FUNCTION_SECONDS = 600.0
"""A key that has waited a minute for another process, and that has no function here or cannot be read here, is tried
again in this many seconds, so that it does not delay other keys. A deploy may add the function, or the encryption key,
meanwhile."""
RESUMER = "resumer"
"""The resumer's name in the audit."""

_NOT_PHASED = (
    "%s has half-done requests, and upkeep does not go on with them: they were taken while the route was declared "
    "effects='phased', and it is not declared so here. Declare it 'phased' until they have ended, or look at them with "
    "`oncekey keys list --state failed_retryable`. If @once.policy declares it at its handler, give this process the "
    "policy as well: once.resume(…, policy=…). This is said once per route"
)

_ENDED = {
    Event.COMPLETE: "completed",
    Event.FAIL: "failed",
    Event.DEFER: "deferred",
    Event.RELEASE: "retryable",
    Event.DOUBT: "unknown",
}


@value
class Resumed:
    """What one run did; with ``dry_run`` only how many keys are due (counted up to 10,000)."""

    due: int = 0
    completed: int = 0
    failed: int = 0
    """Ended with a 4xx, which is final."""
    deferred: int = 0
    retryable: int = 0
    """Tried, and to be tried again."""
    unknown: int = 0
    """Tried, and an effect is in doubt: on the reconciler's list."""
    dead: int = 0
    """Tried for the last time: an operator must look."""
    left: int = 0
    """No function is registered, the route is no longer phased, or the key cannot be read here."""

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Resumed.__slots__}  # type: ignore[attr-defined]


class Resumer:
    """Async functions run in the event loop that is passed to :meth:`run`, or in a new one; sync functions in threads.

    ``concurrency`` how many requests it resumes at once
    ``timeout``     seconds that an async function may take. A thread cannot be stopped: in a sync function, set
                    time-outs on its HTTP clients
    ``max_tries``   after so many tries the key is a dead letter. With the default that takes about half a day
    """

    def __init__(
        self, once: OnceKey, *, concurrency: int = 8, timeout: float = 300.0, max_tries: int = 20, batch: int = BATCH
    ) -> None:
        for name, number in (("concurrency", concurrency), ("timeout", timeout), ("max_tries", max_tries)):
            if number <= 0:
                raise ConfigurationError(f"Resumer({name}={number}): it must be more than 0")
        self._once = once
        self._engine = once.engine
        self._timeout = timeout
        self._max_tries = max_tries
        self._batch = batch
        self._callers = Callers(concurrency)
        self._unreadable = UnreadableWatch("resume")
        self._watch = HalfDoneWatch(once.store, once.resumes, route_of=once.engine.emitter.warnings.route_of)

    def run(
        self,
        stop: threading.Event | None = None,
        *,
        dry_run: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Resumed:
        """Resume all requests that are due, once. Without resume functions it does nothing.

        It blocks, so do not call it from an event loop. Without ``loop``, always call it from the same thread.
        """
        store = self._once.store
        if not self._once.resumes:
            if not dry_run:
                self._watch.look()
            return Resumed()
        if dry_run:
            return Resumed(len(store.due(Duty.RESUMABLE, COUNTED)))
        stop = stop or threading.Event()
        counts: Counter[str] = Counter()
        while not stop.is_set():
            due = store.due(Duty.RESUMABLE, self._batch)
            before = counts["moved"]
            self._callers.run(due, partial(self._one, counts, stop), loop)
            counts["due"] += len(due)
            if len(due) < self._batch or counts["moved"] == before:
                break
        counts["left"] += counts["put_off"]
        self._watch.look()
        return Resumed(**{name: counts[name] for name in Resumed.__slots__})  # type: ignore[attr-defined]

    def interrupt(self) -> None:
        """Stop waiting for functions. Any thread may call this. Running keys keep their leases, as after a crash."""
        self._callers.interrupt()

    def close(self) -> None:
        """Close the event loop and the threads. Call it in the thread that called :meth:`run`."""
        self._callers.close()

    # -- in the loop -----------------------------------------------------------------------------------------------

    async def _one(self, counts: Counter[str], stop: threading.Event, seen: Record) -> None:
        if stop.is_set():
            return
        record: Record | None = await self._run(_ask_store((seen.scope, seen.key)))
        if record is None or not _is_due(record):
            counts["moved"] += 1  # by its client, or by another upkeep
            return
        try:
            ended = await self._resume(record)
        except ABOUT_THE_STORE:
            raise
        except Exception:  # of this key alone. If its attempt has begun, it keeps its lease, and the sweeper finds it
            await self._postpone(record, "put_off", NO_FUNCTION_SECONDS)
            raise
        counts[ended] += 1
        counts["moved"] += ended not in ("overtaken", "left")

    async def _run(self, flow: Flow[Any]) -> Any:
        return await self._engine.run(flow, SETTLE_SECONDS)

    async def _resume(self, record: Record) -> str:
        """Begin the next attempt, or postpone it; return the name of the result."""
        registered = self._once.resumes.of(record.operation)
        policy = self._once.resumes_under(record.operation)
        if registered is not None and policy is None:
            self._engine.tell_once(record.operation, _NOT_PHASED)
        if registered is None or policy is None:
            return "left" if is_left(record) else await self._postpone(record, "put_off", NO_FUNCTION_SECONDS)
        found: list[Step] = await self._run(_ask_store(StepsOf(record.scope, record.key)))
        if self._unreadable.why(record, found) is not None:  # before the claim: this process could only abandon it
            return "left" if is_left(record) else await self._postpone(record, "put_off", NO_FUNCTION_SECONDS)
        if record.reconcile_tries >= self._max_tries:  # its last try killed the process
            return await self._give_up(record)
        claimed: Record | None = await self._run(_ask_store(claim(record, policy, self._engine.owners.new())))
        if claimed is None:
            return "overtaken"
        self._engine.emitter.emit(events.Resumed(*about(claimed), tries=claimed.reconcile_tries))
        loop = asyncio.get_running_loop()
        operation = Resumption(claimed, policy, tenant_of(claimed.scope), self._engine, loop, found)
        move = await self._work(operation, registered.function)
        finished = await self._finish(operation, move)
        if finished is None or not finished.stored or finished.record is None:
            return "overtaken"
        if move.event is Event.RELEASE and finished.record.reconcile_tries >= self._max_tries:
            return await self._give_up(finished.record)
        return _ENDED[move.event]

    async def _work(self, operation: Resumption, function: ResumeFunction) -> Move:
        """Call the function, and judge its end like a handler's."""
        context = contextvars.copy_context()
        context.run(_current.set, operation)
        call = self._callers.call(function, operation)
        task = asyncio.get_running_loop().create_task(call, context=context)
        may_be_cancelled = is_async(function)
        if may_be_cancelled:
            operation.task = asyncio.current_task()  # not only the call: this task also stores the end of the key
        evidence = operation.evidence
        self._engine.keeper.watch(operation)
        evidence.entered()
        try:
            await asyncio.wait([task], timeout=self._timeout if may_be_cancelled else None)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        except asyncio.CancelledError:
            # The caller no longer waits. What the function began may still run, so the key keeps its lease.
            self._engine.keeper.unwatch(operation)
            task.cancel()
            raise
        try:
            response = as_response(task.result())
            if response is None:
                raise ConfigurationError(
                    f"the resume function returned {type(task.result()).__name__}, not Response(status, json) or "
                    "(status, json)"
                )
        except (Exception, asyncio.CancelledError) as error:
            evidence.raised_with(error, None)
            move, _ = raised(operation, error, self._once)
            reason = f"the resume function raised {describe(error)}"
            if isinstance(error, asyncio.CancelledError):
                reason = f"the resume function was cancelled, or took longer than {self._timeout:g} s"
            self._tell(operation, error, reason)
            return Move(move.event, move.response, kept_words(reason))
        evidence.returned_with(response.status)
        return self._answered(operation, response)

    def _answered(self, operation: Resumption, response: StoredResponse) -> Move:
        headers = [(name.encode(), text.encode("latin-1")) for name, text in response.headers]
        move, _ = answered(operation, response.status, headers, response.body, self._once)
        if move.response is not None:
            # All headers of the function are stored; ``move.response`` has only those of the route's list.
            return Move(move.event, response, move.reason)
        reason = f"the resume function returned {response.status}; {move.reason}"
        self._tell(operation, None, reason)
        return Move(move.event, None, reason)

    def _tell(self, operation: Resumption, error: BaseException | None, reason: str) -> None:
        tries = operation.record.reconcile_tries
        event = events.ResumeFailed(*about(operation.record), tries=tries, error=reason)
        self._engine.emitter.emit(event, error=error)

    async def _finish(self, operation: Resumption, move: Move) -> Finished | None:
        item = Unfinished(operation, move.event, move.response, move.reason)
        return await last_move.make(self._engine, item, operation.policy.begin_seconds, app_has_returned=True)

    # -- putting it off ----------------------------------------------------------------------------------------------

    async def _give_up(self, record: Record) -> str:
        tries, error = record.reconcile_tries, shown(record.last_error or "")
        ended = await self._postpone(record, "dead", None, Audit(RESUMER, f"tried {tries} times, and no more: {error}"))
        if ended == "dead":
            self._engine.emitter.emit(events.ResumeGaveUp(*about(record), tries=tries, error=error))
        return ended

    async def _postpone(self, record: Record, ended: str, seconds: float | None, audit: Audit | None = None) -> str:
        move = swap(
            *(record, Event.POSTPONE, Actor.RESUMER), last_error=record.last_error, reconcile_in=seconds, audit=audit
        )
        return "overtaken" if await self._run(_ask_store(move)) is None else ended


def claim(record: Record, policy: Policy, owner: str) -> Swap:
    """The move that begins an attempt of this owner. The row keeps its fingerprint and its recipe."""
    wanted = Reservation(
        *(record.scope, record.key, record.operation, record.fingerprint, record.fingerprint_version),
        *(policy.effects_kind, owner, policy.lease_seconds, record.retention_seconds),
    )
    return swap(record, Event.RETRY, Actor.RESUMER, reservation=wanted)


def _ask_store(work: Work) -> Flow[Any]:
    return (yield work)


def _is_due(record: Record) -> bool:
    waits = record.state is State.FAILED_RETRYABLE and record.has_steps
    return waits and record.reconcile_at is not None and record.reconcile_at <= record.now
