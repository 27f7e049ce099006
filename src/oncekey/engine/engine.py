"""Begin and finish: how a request moves through the state machine.

Each is written once, as a **flow**: a generator that yields a call of the store, and receives its answer from
``drivers.py``. The driver runs in a coroutine or in a thread, so async and sync apps run the very same lines. The
decisions are pure and live in ``core/decision.py``, batching lives in ``batching/``, and ``keeper.py`` renews leases.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from oncekey.core.audit import Audit
from oncekey.core.by_operation import worded
from oncekey.core.decision import Busy, Claim, Decision, Execute, TurnedAway, Unknown, decide
from oncekey.core.leases import overdue_lease
from oncekey.core.policy import Policy
from oncekey.core.record import Found, Record, Reservation, StoredResponse
from oncekey.core.states import STARTS, Actor, Effects, Event, State
from oncekey.core.swaps import swap
from oncekey.engine.admission import Admission
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import Work
from oncekey.engine.breaker import Breaker
from oncekey.engine.drivers import Drivers
from oncekey.engine.flows import Finished, Flow, Pause
from oncekey.engine.keeper import Keeper, Unfinished
from oncekey.engine.operation import Operation, _current
from oncekey.engine.process import Owners
from oncekey.engine.transactions import completion
from oncekey.errors import OperatorError, SchemaError, StoreOverloaded, StoreUnavailable
from oncekey.stores.api import NOT_SEALED, Sealing, Store, Transactions
from oncekey.stores.cache.front import Cache
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.events import about
from oncekey.telemetry.redaction import describe

_log = logging.getLogger("oncekey")

CLAIM_TRIES = 3
"""How often a request tries to claim a key that other requests are changing, before it answers 409."""
EFFECT_LEFT_OPEN = (
    "the handler answered with a success, but it called an effect that may not be repeated, and the result of that "
    "effect is not known: look for it at its provider"
)
"""Written into the key's audit when the key completes. `oncekey keys show` lists the open step beside it."""
EFFECT_BEGUN_LATE = (
    "the start of an effect that may not be repeated is stored, but this request did not wait for its result: the "
    "effect may have been called"
)
NOT_ENLISTED = (
    "%s is declared effects='transactional', and its {work} enlisted no transaction: if it crashes after its own "
    "commit, it runs again. Use {enlist}, or another declaration"
)
RAISED_BEFORE_ENLIST = (
    "%s is declared effects='transactional', and its {work} failed without having enlisted a transaction. If it had "
    "committed a write, that write stays, and the next try writes it again. Use {enlist} before the "
    "first write, or another declaration. This is said once per {unit}"
)
NOT_COMMITTED = (
    "%s: its {answer} could not be stored within %s s, because another connection has the write lock of the database "
    "file. {told}, and oncekey goes on trying. If this {work} wrote through a session or connection of "
    "its own and did not commit: commit before it returns, or use {enlist}, which stores both in one commit "
    "(docs/transactions.md). Otherwise look for another process that writes for long. This is said once per {unit}"
)
FINISH_TRIES = 5
"""How often an owner tries again while another transaction (a sweeper's, for example) holds the row."""
FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 1.0
"""A waiting request looks again after growing pauses: soon enough for a quick handler, rarely enough for a slow one."""


class Engine(Drivers):
    own_connection: Callable[[], Any] | None = None
    """Set by a framework that knows the app's own connection: what ``op.enlist()`` without an argument enlists."""
    in_own_block: Callable[[str], bool] | None = None
    """Set beside it: whether that connection is in a transaction, before the function of this name runs. EnlistError:
    the function cannot run in it."""
    how_to_enlist = "op.enlist(session)"
    """What a handler writes to enlist its transaction, for messages."""
    command = "oncekey"
    """The command line as this app's operators call it, for messages."""
    router_type: type[Router] = Router

    def __init__(
        self,
        store: Store,
        *,
        cache: Cache | None = None,
        emitter: Emitter | None = None,
        migrate: bool = False,
        max_queued: int = 10_000,
    ) -> None:
        self.store = store
        self.cache = cache
        self.transactions = store if isinstance(store, Transactions) else None
        self.sealing = store if isinstance(store, Sealing) else NOT_SEALED
        """What encrypts values that the engine writes on the app's own connection."""
        self.emitter = emitter or Emitter()
        self.breaker = Breaker(on_change=self._breaker_changed)
        prepare = (lambda: _ignore(store.migrate())) if migrate else None
        router = self.router_type(
            store, cache=cache, max_queued=max_queued, prepare=prepare, on_error=self._store_failed
        )
        super().__init__(router)
        self.keeper = Keeper(self)
        self.owners = Owners()
        self.enter: Callable[[Operation], object] = _current.set
        """Called with the operation, in the context in which its handler will run."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._opening = threading.Lock()

    # -- begin ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        wanted: Reservation,
        policy: Policy,
        first: Found | None = None,
        admission: Admission | None = None,
    ) -> Flow[Decision]:
        """Read or reserve the key, and decide. If the store fails, this raises StoreError and no handler runs (I7).

        ``first``: what the store has answered already. ``admission``: whether a key that is not known may be reserved;
        the row is read first then, so that a refusal writes nothing.
        """
        if first is None and not self.breaker.allows():
            raise StoreUnavailable(
                f"the store has failed repeatedly, so oncekey asks it again after a pause: {self.breaker.reason}"
            )
        wait_until = time.monotonic() + policy.wait.total_seconds() if policy.in_flight == "wait" else 0.0
        step, claims = FIRST_WAIT_SECONDS, 0
        decision: Decision
        try:
            while True:
                if first is None and admission is not None:
                    answer: Found | TurnedAway = yield from admission.first_answer(wanted)
                    if isinstance(answer, TurnedAway):
                        self.emitter.turned_away(wanted, answer)
                        decision = answer
                        break
                    first, admission = answer, None if admission.over else admission
                found: Found = first or (yield wanted)
                first = None
                decision = decide(found.record, wanted)
                if isinstance(decision, Claim):
                    claims += 1
                    moved: Record | None = yield _claim(decision, wanted)
                    if moved is not None:
                        self.emitter.claimed(decision, moved)
                    if moved is not None and decision.event is not Event.RELEASE:
                        decision = Unknown(moved) if decision.event is Event.DOUBT else Execute(moved)
                        break
                    # The key was released from a dead owner, or another request moved it or holds its row. Look again.
                    if claims < CLAIM_TRIES:
                        continue
                    decision = Busy(decision.record)
                if isinstance(decision, Busy) and (left := wait_until - time.monotonic()) > 0:
                    yield Pause((wanted.scope, wanted.key), min(left, step * random.uniform(0.7, 1.3)))
                    step, claims = min(step * 2, LONGEST_WAIT_SECONDS), 0
                    continue
                if isinstance(decision, Busy) and decision.record is not None:
                    decision = Busy(decision.record, self.overdue_lease(decision.record, policy))
                self.emitter.decided(decision, policy)
                break
        except OperatorError as error:
            self.begin_failed(error)
            raise
        self.breaker.succeeded()
        return decision

    def begin_failed(self, error: OperatorError) -> None:
        """The store did not say whose the key is."""
        if isinstance(error, StoreOverloaded):
            self.emitter.emit(events.QueueFull(verb="reserve", error=describe(error)))
            return
        self.emitter.send(events.StoreFailed(verb="reserve", error=describe(error)))
        if isinstance(error, StoreUnavailable | SchemaError):
            self.breaker.failed(error)
        # Any other StoreError is about this request only. The store answers, so it is no failure for the breaker.

    def overdue_lease(self, record: Record, policy: Policy) -> float | None:
        """The seconds that are left of a lease whose renewal is overdue. None: its owner may be alive.

        The keeper knows the live requests of this process, so their leases never count as overdue. In another process,
        a request that has enlisted a transaction holds its row, and its lease is not renewed: after half of the lease
        it counts as overdue although it is alive.
        """
        return None if self.keeper.keeps(record) else overdue_lease(record, policy.lease_seconds)

    # -- finish --------------------------------------------------------------------------------------------------

    def finish(
        self, operation: Operation, event: Event, response: StoredResponse | None = None, reason: str | None = None
    ) -> Flow[Finished]:
        """Move the owner's record. The result has ``stored`` set exactly when the store holds what was asked for."""
        if operation.enlisted is not None:
            return completion.finish(self, operation, event, response, reason)
        if operation.record.effects is Effects.TRANSACTIONAL and self.transactions is not None:
            if event is Event.COMPLETE:
                self.tell_once(operation.name, NOT_ENLISTED)
            elif event is Event.RELEASE and (seen := operation.evidence).calls and seen.raised_name != "EnlistError":
                self.tell_once(operation.name, RAISED_BEFORE_ENLIST)
        return self.move(operation, event, response, reason)

    def move(
        self, operation: Operation, event: Event, response: StoredResponse | None, reason: str | None
    ) -> Flow[Finished]:
        """Finish through a lane, for an operation that has no open transaction."""
        record = operation.record
        at = (record.scope, record.key)
        changed = record.effects is not operation.policy.effects_kind
        left_open = changed and event is Event.COMPLETE and operation.has_open_effect
        audit = Audit(who="oncekey", why=EFFECT_LEFT_OPEN) if left_open else None
        for tries in range(FINISH_TRIES):
            unless_begun = operation.judged_effects if event is Event.RELEASE else None
            change = swap(
                *(record, event, Actor.OWNER),
                response=response,
                last_error=reason,
                audit=audit,
                from_effects=unless_begun,
                lease_seconds=operation.doubt_lease if event is Event.DOUBT else None,
            )
            moved: Record | None = yield change
            if moved is None:
                seen: Record | None = yield at
                if seen is None and change.to_state is None:
                    moved = record  # this owner deleted it, and the answer was lost
                elif seen is None or seen.owner != record.owner:
                    return self._lost(operation, event, seen)
                elif seen.state is change.to_state and seen.response == response:
                    # This owner moved it, and the answer was lost (hazard 9). With another response, a verdict settled
                    # the key after the lease ran out: that response stands, and this owner's is never sent.
                    moved = seen
                elif seen.state is State.UNKNOWN and event in (Event.COMPLETE, Event.FAIL):
                    record = seen  # the lease ran out, but the handler did end: store its result
                    continue
                elif seen.state is not State.IN_PROGRESS:
                    return self._lost(operation, event, seen)
                elif unless_begun is not None and seen.effects is not unless_begun:
                    record, event, reason = seen, Event.DOUBT, EFFECT_BEGUN_LATE
                    continue
                else:
                    # The key still belongs to this owner: another transaction holds the row.
                    yield Pause(at, 0.01 * 4**tries)
                    continue
            self._finished(event, moved, response, reason)
            if left_open:
                self.emitter.emit(events.EffectLeftOpen(*about(moved)))
            return Finished(True, moved)
        raise StoreUnavailable("the key's row is held by another transaction")

    def _finished(self, event: Event, record: Record, response: StoredResponse | None, reason: str | None) -> None:
        """The store holds the end of an attempt: wake the requests that wait for this key, and report it."""
        if self.waiters:
            self.wake((record.scope, record.key))
        self.emitter.finished(event, record, response, reason)

    def adopt(self, unfinished: Unfinished) -> None:
        """Let the keeper store an outcome that could not be stored in time. If another connection holds the database
        file, the log says so."""
        operation = unfinished.operation
        self.keeper.adopt(unfinished)
        if self.transactions is None or operation.enlisted is not None:
            return
        if self.transactions.locked_elsewhere():
            self.tell_once(operation.name, NOT_COMMITTED, f"{operation.policy.begin_seconds:g}")

    def know_routes(self, operations: Callable[[], Sequence[str]]) -> None:
        """The routes of an app that is about to start: warnings name them, and so do metrics (``ObservedEngine``)."""
        self.emitter.warnings.know(operations)

    def tell_once(
        self, operation: str, message: str, *values: str, error: BaseException | None = None, kind: str = ""
    ) -> None:
        """Warn the developer about an operation, once per route, message and ``kind`` (``route_warnings.py``).

        ``message`` has a ``%s`` for the operation and one for each of ``values``, and may have ``{enlist}``,
        ``{unit}``, ``{work}`` and the like (``worded``). The traceback of ``error`` follows.
        """
        if (due := self.emitter.warnings.once(operation, message, kind)) is not None:
            text = worded(message.replace("{enlist}", self.how_to_enlist), operation)
            _log.warning(text + due.end, due.operation, *values, exc_info=error)

    def tell_paced(self, operation: str, message: str, *values: str) -> None:
        """As :meth:`tell_once`, and again after a minute. ``message`` has a second ``%s``, for ``Due.requests``."""
        if (due := self.emitter.warnings.paced(operation, message)) is not None:
            _log.warning(message + due.end, due.operation, due.requests, *values)

    def _lost(self, operation: Operation, event: Event, seen: Record | None) -> Finished:
        operation.lost = True
        self.emitter.emit(events.LeaseLost(*about(operation.record), move=event))
        return Finished(False, seen)

    def around_effect(self, operation: Operation, name: str, work: Callable[[], Any]) -> Callable[[], Any]:  # noqa: ARG002
        """The function that is called in place of an effect's own."""
        return work

    # -- trouble and the end -------------------------------------------------------------------------------------

    def _store_failed(self, verb: str, error: Exception, requests: int) -> None:
        failed = events.StoreFailed(verb=verb, error=describe(error), requests=requests)
        # The requests of a failed reservation count themselves, see begin_failed: here they are for the log alone.
        self.emitter.emit_paced(failed, replace(failed, requests=0) if verb == "reserve" else None)

    def _breaker_changed(self, is_open: bool, error: Exception | None) -> None:
        if is_open and error is not None:
            self.emitter.emit(events.BreakerOpened(verb="reserve", error=describe(error)))
        else:
            self.emitter.emit(events.BreakerClosed())

    def open(self) -> None:
        """Take requests again, after a close."""
        with self._opening:
            self.closed = False
            self.keeper.open()
            self.router.open()
            self.breaker.succeeded()  # failures while it was closed say nothing about the store

    def close(self, timeout: float = 10.0) -> bool:
        """Store unfinished outcomes, then end the threads and disconnect. False: a thread still waits for the store.

        The next use opens the engine again: an app may be used after its lifespan (in tests), and a handler that
        outlives the shutdown must be able to store its outcome.
        """
        self.keeper.close(timeout)
        self.closed = True
        drained = self.router.close(timeout)
        self.store.close()
        if self.cache is not None:
            self.cache.close()
        return drained


def _claim(decision: Claim, wanted: Reservation) -> Work:
    starts = decision.event in STARTS
    return swap(decision.record, decision.event, Actor.REQUEST, reservation=wanted if starts else None,
                last_error=None if starts else decision.reason)  # fmt: skip


def _ignore(_: object) -> None:
    return None
