"""Settles unknown outcomes: applies a verdict to a key by compare-and-set, and adds a line to the audit.

It is written as flows, as begin and finish are: the reconciler, a webhook in an async app and a webhook in a thread run
the same lines. The first verdict moves the key. A second one changes nothing, and its caller gets the state of the key.
So a verdict may arrive twice, from several callers, and in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core import doubts
from oncekey.core.audit import Audit
from oncekey.core.jobs import DeferredTo, Job
from oncekey.core.record import Record
from oncekey.core.states import FINAL, MAY_RERUN, Actor, Effects, Event, State
from oncekey.core.steps import Find, Step, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.core.verdicts import (
    VERDICTS,
    Confirmed,
    Happened,
    NotHappened,
    Outcome,
    Refuted,
    Settlement,
    StillUnknown,
    Verdict,
)
from oncekey.engine.flows import Flow, Pause
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.api import Outbox
from oncekey.telemetry import events
from oncekey.telemetry.events import about

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine

SETTLE_TRIES = 5
"""How often a verdict is tried again while another transaction holds the row."""
SETTLE_SECONDS = 10.0
"""How long each call of the store may take. No client waits for it, so it may take longer than in a request."""
RECONCILER = "reconciler"
"""The actor's name in the audit, if a resolver gave the verdict."""
_LONGEST_WORDS = 500
_Deciding = Confirmed | Refuted | Happened | NotHappened


def settle(
    engine: Engine, record: Record, verdict: Verdict, *, who: str, found_by: Find | None = None
) -> Flow[Settlement]:
    """Apply a verdict about ``record`` as it was read. It does not apply to another attempt at the same key.

    ``found_by``: the id by which a webhook found the key.
    """
    if isinstance(verdict, StillUnknown):
        return Settlement(Outcome.UNDECIDED, record)
    job: Job | None = None
    if isinstance(engine.store, Outbox) and (record.has_steps or not isinstance(verdict, Confirmed)):
        job = yield DeferredTo(record.scope, record.key, record.owner)
        if job is not None and not isinstance(verdict, Confirmed):
            return Settlement(Outcome.REFUSED, record, reason=doubts.words_of_deferral(job))
    early = early_by(record)
    if isinstance(verdict, Refuted | NotHappened) and early > 0:
        # When the provider was asked, it could not know yet. A late arrival of its answer does not change that.
        return Settlement(Outcome.TOO_EARLY, record, early)
    while True:
        settlement = yield from _settle_one(engine, record, verdict, who, found_by, deferred=job is not None)
        if settlement.outcome is not Outcome.PARTLY or not isinstance(verdict, Refuted) or settlement.record is None:
            return settlement
        record = settlement.record  # Refuted is about the whole request: go on with the next effect that is in doubt


def _settle_one(
    engine: Engine, record: Record, verdict: _Deciding, who: str, found_by: Find | None, *, deferred: bool
) -> Flow[Settlement]:
    """One move: of the whole key, or of one effect that is in doubt. The steps of a deferred request are all done."""
    at = (record.scope, record.key)
    steps: list[Step] = (yield StepsOf(*at)) if record.has_steps and not deferred else []
    change = _ruled(engine, record, steps, verdict, who, found_by)
    if isinstance(change, Settlement):
        seen: Record | None = yield at
        if seen is None or seen.state is not State.UNKNOWN or seen.owner != record.owner:
            return (yield from _standing(seen, verdict, found_by))
        return change
    for tries in range(SETTLE_TRIES):
        moved: Record | None = yield change
        if moved is not None:
            age = round(moved.now - moved.created_at, 3)
            engine.emitter.emit(events.ReconcileResolved(*about(moved), state=moved.state, age_seconds=age))
            if moved.state is State.UNKNOWN:
                settled = change.step.name if change.step else None
                left = [step for step in doubts.in_doubt(record, steps) if step.name != settled]
                return Settlement(Outcome.PARTLY, moved, reason=doubts.words_of(left))
            return Settlement(Outcome.SETTLED, moved)
        seen = yield at
        if seen is None or seen.state is not State.UNKNOWN or seen.owner != record.owner:
            return (yield from _standing(seen, verdict, found_by))
        early = early_by(seen)
        if isinstance(verdict, Refuted | NotHappened) and early > 0:
            return Settlement(Outcome.TOO_EARLY, seen, early)
        yield Pause(at, 0.01 * 4**tries)
    raise StoreUnavailable("the key's row is held by another transaction")


def early_by(record: Record) -> float:
    """For how many seconds a Refuted is too early: a sent request may still be on its way to the provider."""
    return record.lease_until + record.quarantine - record.now


def _ruled(
    engine: Engine, record: Record, steps: list[Step], verdict: _Deciding, who: str, found_by: Find | None
) -> Swap | Settlement:
    """The move that a verdict asks for, or why it is not made."""
    doubted = doubts.in_doubt(record, steps)
    if isinstance(verdict, Confirmed):
        if not verdict.final and (why := doubts.skips_phases(record, steps)) is not None:
            return Settlement(Outcome.REFUSED, record, reason=why)
        audit = Audit(who, kept_words(verdict.reason))
        return swap(record, Event.CONFIRM, Actor.RECONCILER, response=verdict.response, audit=audit)
    if isinstance(verdict, Refuted) and not doubted:
        audit = Audit(who, kept_words(verdict.reason))
        return swap(record, Event.REFUTE, Actor.RECONCILER, last_error=audit.why, audit=audit)
    chosen = doubted[0] if isinstance(verdict, Refuted) else doubts.choose(record, steps, verdict.effect, found_by)
    if isinstance(chosen, str):
        return Settlement(Outcome.REFUSED, record, reason=chosen)
    if chosen.state is StepState.DONE and isinstance(verdict, Happened) and _goes_on(record):
        audit = Audit(who, kept_words(f"effect '{chosen.name}' is done, and keeps its result: {verdict.reason}"))
        return doubts.goes_on(record, chosen, Actor.RECONCILER, new_owner=engine.owners.new(), audit=audit)
    if chosen.state is StepState.DONE:
        outcome = Outcome.ALREADY if isinstance(verdict, Happened) else Outcome.CONTRADICTED
        return Settlement(outcome, record, reason=f"effect '{chosen.name}' is done; {doubts.words_of(doubted)}")
    said = f"effect '{chosen.name}' {'happened' if isinstance(verdict, Happened) else 'did not happen'}"
    return doubts.settled(
        record,
        steps,
        chosen,
        verdict.result if isinstance(verdict, Happened) else None,
        Actor.RECONCILER,
        provider_id=verdict.provider_id if isinstance(verdict, Happened) else None,
        new_owner=engine.owners.new(),
        audit=Audit(who, kept_words(f"{said}: {verdict.reason}")),
    )


def _goes_on(record: Record) -> bool:
    """Whether a verdict about an effect that is done lets the request go on: it is phased, so all that it may have done
    is in its steps, and no effect is in doubt. Its client did not retry before the key expired."""
    return record.has_steps and record.effects is Effects.PHASED


def kept_words(text: str) -> str:
    """The reason as text that every store can keep: it may quote a provider, with any characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:_LONGEST_WORDS]


def standing(record: Record | None) -> Settlement:
    """The answer about a key that has nothing to settle."""
    if record is None or record.state is State.EXPIRED:
        return Settlement(Outcome.NOT_FOUND, record)
    if record.state in FINAL:
        return Settlement(Outcome.ALREADY, record)
    wait = max(0.0, record.lease_until - record.now) if record.state is State.IN_PROGRESS else None
    return Settlement(Outcome.OPEN, record, wait)


def _standing(record: Record | None, verdict: Verdict, found_by: Find | None) -> Flow[Settlement]:
    """As :func:`standing`; and whether what is stored agrees with the verdict."""
    if record is None or record.state in FINAL or record.state is State.EXPIRED:
        return standing(record)
    retryable = record.state is State.FAILED_RETRYABLE
    if isinstance(verdict, Happened | NotHappened) and record.has_steps:
        steps: list[Step] = yield StepsOf(record.scope, record.key)
        about = doubts.named(steps, verdict.effect, found_by) or doubts.only_effect(steps)
        if isinstance(about, Step) and (about.state is StepState.DONE or retryable):
            done = about.state is StepState.DONE
            agrees = done == isinstance(verdict, Happened)
            words = "is done" if done else "counts as not done, and the next attempt calls it"
            outcome = Outcome.ALREADY if agrees else Outcome.CONTRADICTED
            return Settlement(outcome, record, reason=f"effect '{about.name}' {words}")
    if retryable and isinstance(verdict, Refuted):
        return Settlement(Outcome.ALREADY, record, reason="the key counts as not executed")
    if retryable and isinstance(verdict, Confirmed) and record.effects not in MAY_RERUN:
        return Settlement(Outcome.CONTRADICTED, record, reason="the key counts as not executed, and a retry runs it")
    return standing(record)


def ingest(engine: Engine, asked: tuple[str, str] | Find, verdict: Verdict, *, who: str) -> Flow[Settlement]:
    """Find the key of a verdict, and apply the verdict to it."""
    found_by = asked if isinstance(asked, Find) else None
    if isinstance(asked, Find):
        found: list[tuple[str, str]] = yield asked
        if len(found) > 1:
            return Settlement(Outcome.AMBIGUOUS)
        if not found:
            return Settlement(Outcome.NOT_FOUND)
        asked = found[0]
    record: Record | None = yield asked
    if record is not None and record.state is State.IN_PROGRESS and record.lease_over:
        record = yield from _sweep(engine, record)
    if record is None or record.state is not State.UNKNOWN:
        settlement = yield from _standing(record, verdict, found_by)
    else:
        settlement = yield from settle(engine, record, verdict, who=who, found_by=found_by)
    if settlement.outcome in (Outcome.CONTRADICTED, Outcome.REFUSED):
        _not_applied(engine, settlement, verdict, who)
    return settlement


def _sweep(engine: Engine, record: Record) -> Flow[Record | None]:
    """Do the sweeper's work for this key now, because a webhook may come only once."""
    if record.effects in MAY_RERUN:
        return record  # a retry resumes it, or repeats it without harm
    moved: Record | None = yield swap(record, Event.DOUBT, Actor.SWEEPER, last_error="the lease ran out")
    if moved is None:
        seen: Record | None = yield (record.scope, record.key)
        return seen
    engine.emitter.emit(events.ZombieFound(*about(moved)))
    return moved


def _not_applied(engine: Engine, settlement: Settlement, verdict: Verdict, who: str) -> None:
    """Log a verdict that was refused, or that says the opposite of what is stored. The key is as it was."""
    if (record := settlement.record) is not None:
        words = f"{who} said {type(verdict).__name__}, and nothing was changed: {settlement.reason}"
        if settlement.outcome is Outcome.CONTRADICTED:
            words += "; find out which is true"
        engine.emitter.emit(events.ReconcileFailed(*about(record), tries=record.reconcile_tries, error=words))


def checked(verdict: object) -> Verdict:
    """The verdict of a webhook; ConfigurationError if it is none."""
    if not isinstance(verdict, VERDICTS):
        got = f"the class {verdict.__name__}" if isinstance(verdict, type) else type(verdict).__name__
        raise ConfigurationError(
            f"ingest({got}, …): a verdict is Confirmed(…), Refuted(…), Happened(…), NotHappened(…) or StillUnknown(…)"
        )
    return verdict


def asked_for(
    key: str | None, scope: str | None, downstream_key: str | None, provider_id: str | None
) -> tuple[str, str] | Find:
    """How a webhook names its key: in exactly one of the three ways."""
    named = [text for text in (key, downstream_key, provider_id) if text is not None]
    if len(named) != 1 or not all(text and text.isprintable() for text in named):
        raise ConfigurationError(
            "ingest(…): name the key in one way, as printable text: key= (with scope=), downstream_key= or provider_id="
        )
    if key is None:
        return Find(downstream_key, provider_id)
    if not scope:
        raise ConfigurationError("ingest(key=…): a key belongs to a scope: give scope= as well")
    return scope, key
