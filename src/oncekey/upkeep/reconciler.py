"""The reconciler asks the app's resolvers about keys whose outcome is unknown, until a resolver knows.

It asks about a key when its ``reconcile_at`` has come. If the resolver does not know yet, the reconciler asks again
later, after growing pauses with jitter. After ``max_tries`` the key is a dead letter: it stays unknown, the reconciler
asks no more, and an operator must look. A resolver that raises, takes too long, or returns something else counts as not
knowing. So does a missing resolver: its keys must neither block the others for ever, nor be forgotten. So does a kept
request that is encrypted and does not open here, after it was left to other processes for a minute.

Several reconcilers may run at once. Each reads the key again before it asks, so two rarely ask about the same key. If
they do, the first verdict counts and the second finds nothing to move (``engine/settlement.py``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from random import SystemRandom
from typing import Any

from oncekey.core.audit import Audit
from oncekey.core.by_operation import delivered_again
from oncekey.core.doubts import with_cause
from oncekey.core.health import NO_RESOLVER
from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import swap
from oncekey.core.values import value
from oncekey.core.verdicts import (
    VERDICTS,
    Confirmed,
    Happened,
    Inquiry,
    NotHappened,
    Outcome,
    Refuted,
    Settlement,
    StillUnknown,
    Verdict,
)
from oncekey.engine import settlement
from oncekey.engine.batching.ticket import Work
from oncekey.engine.flows import Flow
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Duty
from oncekey.telemetry import events
from oncekey.telemetry.events import about
from oncekey.telemetry.redaction import describe, redact
from oncekey.upkeep.callers import ABOUT_THE_STORE, Callers, is_async
from oncekey.upkeep.unasked import ResolverWatch
from oncekey.upkeep.unreadable import UnreadableWatch, is_left
from oncekey.web.unknown_outcomes import show_command

_log = logging.getLogger("oncekey")

BATCH = 100
_COUNTS = ("due", "confirmed", "refuted", "happened", "not_happened", "postponed", "dead")
_COUNTED_AS: Mapping[type, str] = {
    Confirmed: "confirmed",
    Refuted: "refuted",
    Happened: "happened",
    NotHappened: "not_happened",
}
_REFUSALS = (Outcome.REFUSED, Outcome.ALREADY, Outcome.CONTRADICTED)
LEFT_BACKOFFS = 6
"""A process that has no resolver for a key leaves it to other processes for this many times ``backoff``. A process that
has the resolver looks every few seconds, so the tries are not used up by one that has not. The first try is counted
without this delay: ``oncekey doctor`` finds the operation by it."""
COUNTED = 10_000
"""A dry run counts at most this many keys."""


@value
class _Failed(StillUnknown):
    """A resolver that raised or took too long."""

    error: Exception | None = None


@value
class Reconciled:
    """What one run did; with ``dry_run`` only how many keys are due (counted up to 10,000)."""

    due: int = 0
    confirmed: int = 0
    refuted: int = 0
    happened: int = 0
    not_happened: int = 0
    postponed: int = 0
    dead: int = 0

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTS}


class Reconciler:
    """Async resolvers run in the event loop that is passed to :meth:`run`, or in a new one; sync resolvers in threads.

    ``concurrency`` how many resolvers are asked at once
    ``timeout``     seconds that an async resolver may take. A thread cannot be stopped: in a sync resolver, set a
                    time-out on its HTTP client
    ``max_tries``   after so many tries the key is a dead letter. With the defaults that takes about twelve hours
    ``backoff``     seconds before the second try; doubled for each further try up to ``max_backoff``
    """

    def __init__(
        self,
        once: OnceKey,
        *,
        concurrency: int = 8,
        timeout: float = 30.0,
        max_tries: int = 20,
        backoff: float = 10.0,
        max_backoff: float = 3600.0,
        batch: int = BATCH,
    ) -> None:
        for name, number in (("concurrency", concurrency), ("timeout", timeout), ("max_tries", max_tries)):
            if number <= 0:
                raise ConfigurationError(f"Reconciler({name}={number}): it must be more than 0")
        self._once = once
        self._engine = once.engine
        self._timeout = timeout
        self._max_tries = max_tries
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._batch = batch
        self._watch = ResolverWatch(route_of=once.engine.emitter.warnings.route_of)
        self._unreadable = UnreadableWatch("reconcile")
        self._callers = Callers(concurrency)

    def run(
        self,
        stop: threading.Event | None = None,
        *,
        dry_run: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Reconciled:
        """Ask once about all keys that are due. A key without a resolver counts as asked, and the log says so.

        It blocks, so do not call it from an event loop. Without ``loop``, always call it from the same thread.
        """
        store = self._once.store
        if dry_run:
            return Reconciled(len(store.due(Duty.UNKNOWNS, COUNTED)))
        stop = stop or threading.Event()
        counts: Counter[str] = Counter()
        while not stop.is_set():
            due = store.due(Duty.UNKNOWNS, self._batch)
            if due:
                before = counts["moved"]
                self._callers.run(due, partial(self._one, counts), loop)
                counts["due"] += len(due)
                if counts["moved"] == before:
                    break
            if len(due) < self._batch:
                break
        if counts["unasked"]:
            self._watch.look(store.counts().unknowns, self._once.resolvers)
        return Reconciled(*(counts[name] for name in _COUNTS))

    def interrupt(self) -> None:
        """Stop waiting for resolvers. Any thread may call this; unsettled keys are asked about again later."""
        self._callers.interrupt()

    def close(self) -> None:
        """Close the event loop and the threads. Call it in the thread that called :meth:`run`."""
        self._callers.close()

    # -- in the loop -----------------------------------------------------------------------------------------------

    async def _one(self, counts: Counter[str], seen: Record) -> None:
        record: Record | None = await self._run(_ask_store((seen.scope, seen.key)))
        if record is None or not _is_due(record):
            counts["moved"] += 1  # another process has moved it
            return
        if self._once.resolvers.of(record.operation) is None:
            counts["unasked"] += 1
            if record.reconcile_tries and record.now - (record.reconcile_at or 0.0) < LEFT_BACKOFFS * self._backoff:
                return  # another process may have the resolver
        try:
            found: list[Step] = await self._run(_ask_store(StepsOf(record.scope, record.key)))
            if self._unreadable.why(record, found) is not None and is_left(record):
                return  # another process may have the encryption key
            ended = await self._apply(record, await self._ask(record, found))
        except ABOUT_THE_STORE:
            raise
        except Exception as error:  # of this key alone: it counts as a try, and the other keys go on
            ended = await self._postpone(record, describe(error), self._retry_in(record), error)
        counts[ended] += 1
        counts["moved"] += ended != "overtaken"

    async def _run(self, flow: Flow[Any]) -> Any:
        return await self._engine.run(flow, settlement.SETTLE_SECONDS)

    async def _ask(self, record: Record, found: Sequence[Step]) -> Verdict:
        resolver = self._once.resolvers.of(record.operation)
        if resolver is None:
            return StillUnknown(NO_RESOLVER)
        inquiry = Inquiry(record, tuple(found))
        limit = asyncio.timeout(self._timeout if is_async(resolver) else None)
        try:
            async with limit:
                verdict = await self._callers.call(resolver, inquiry)
        except Exception as error:
            if limit.expired() and isinstance(error, TimeoutError):
                return _Failed(f"the resolver took longer than {self._timeout:g} s", error)
            return _Failed(f"the resolver raised {describe(error)}", error)
        if not isinstance(verdict, VERDICTS):
            return StillUnknown(
                f"the resolver returned {type(verdict).__name__}, not Confirmed, Refuted, Happened, NotHappened or "
                "StillUnknown"
            )
        return verdict

    # -- what follows from an answer ---------------------------------------------------------------------------------

    async def _apply(self, record: Record, verdict: Verdict) -> str:
        """Settle or postpone the key; return the name of what was done."""
        if isinstance(verdict, StillUnknown):
            error = verdict.error if isinstance(verdict, _Failed) else None
            return await self._postpone(record, verdict.reason, self._retry_in(record), error)
        settled: Settlement = await self._run(
            settlement.settle(self._engine, record, verdict, who=settlement.RECONCILER)
        )
        if settled.outcome is Outcome.TOO_EARLY:
            reason = f"refuted too early, to be asked again after the quarantine: {verdict.reason}"
            return await self._postpone(record, reason, settled.retry_in)
        if settled.reason is not None and settled.outcome in _REFUSALS:
            # The key is as it was, so the resolver would say the same at once.
            reason = f"the verdict was refused: {settled.reason}"
            return await self._postpone(record, reason, self._retry_in(record))
        if settled.outcome not in (Outcome.SETTLED, Outcome.PARTLY):
            return "overtaken"
        if settled.outcome is Outcome.SETTLED and not isinstance(verdict, Confirmed):
            self._tell_of_delivery(record)
        return _COUNTED_AS[type(verdict)]

    @staticmethod
    def _tell_of_delivery(record: Record) -> None:
        """A client repeats its request by itself. A message that was parked does not come back by itself."""
        if again := delivered_again(record.operation):
            command = show_command(record.scope, record.key)
            name, key = record.operation, redact(record.key)
            _log.warning("the resolver of %s settled key %s. It runs %s. Look at it: `%s`", name, key, again, command)

    def _retry_in(self, record: Record) -> float | None:
        """Seconds until the next try; None: no more tries. The exponent is bounded: 2.0**1100 is an error."""
        if record.reconcile_tries + 1 >= self._max_tries:
            return None
        pause = min(self._max_backoff, self._backoff * 2.0 ** min(record.reconcile_tries, 64))
        return pause * SystemRandom().uniform(0.75, 1.25)

    async def _postpone(
        self, record: Record, reason: str, retry_in: float | None, error: Exception | None = None
    ) -> str:
        reason = settlement.kept_words(reason)
        words = with_cause(reason, record)
        tries = record.reconcile_tries + 1
        audit = None
        if retry_in is None:
            audit = Audit(settlement.RECONCILER, f"asked {tries} times, and no more: {reason}")
        move = swap(record, Event.POSTPONE, Actor.RECONCILER, last_error=words, reconcile_in=retry_in, audit=audit)
        if await self._run(_ask_store(move)) is None:
            return "overtaken"
        emit = self._engine.emitter.emit
        wait = None if retry_in is None else round(retry_in, 1)
        if reason == NO_RESOLVER:
            emit(events.ReconcileUnasked(*about(record), tries=tries))
        else:
            failed = events.ReconcileFailed(*about(record), tries=tries, error=reason, in_seconds=wait)
            emit(failed, error=error)
        if retry_in is None:
            emit(events.ReconcileGaveUp(*about(record), tries=tries, error=reason))
            return "dead"
        emit(events.ReconcileScheduled(*about(record), in_seconds=round(retry_in, 1)))
        return "postponed"


def _ask_store(work: Work) -> Flow[Any]:
    return (yield work)


def _is_due(record: Record) -> bool:
    return record.state is State.UNKNOWN and record.reconcile_at is not None and record.reconcile_at <= record.now
