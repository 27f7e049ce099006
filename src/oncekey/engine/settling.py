"""Settles unknown outcomes: applies a verdict to a key by compare-and-set, and adds a line to the audit.

It is written as flows, as begin and finish are: the reconciler, a webhook in an async app and a webhook in a thread run
the same lines. The first verdict moves the key. A second one changes nothing, and its caller gets the state of the key.
So a verdict may arrive twice, from several callers, and in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.record import Audit, Record, Swap, swap
from oncekey.core.states import FINAL, MAY_RERUN, Actor, Event, State
from oncekey.core.steps import Find
from oncekey.core.verdicts import Confirmed, Outcome, Refuted, Settlement, StillUnknown, Verdict
from oncekey.engine.flows import Flow, Pause
from oncekey.errors import ConfigurationError, StoreUnavailable
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


def settle(engine: Engine, record: Record, verdict: Verdict, *, who: str) -> Flow[Settlement]:
    """Apply a verdict about ``record`` as it was read. It does not apply to another attempt at the same key."""
    if isinstance(verdict, StillUnknown):
        return Settlement(Outcome.UNDECIDED, record)
    at = (record.scope, record.key)
    early = early_by(record)
    if isinstance(verdict, Refuted) and early > 0:
        # When the provider was asked, it could not know yet. A late arrival of its answer does not change that.
        return Settlement(Outcome.TOO_EARLY, record, early)
    for tries in range(SETTLE_TRIES):
        moved: Record | None = yield _move(record, verdict, who)
        if moved is not None:
            engine.emitter.emit(events.ReconcileResolved(*about(moved), state=moved.state))
            return Settlement(Outcome.SETTLED, moved)
        seen: Record | None = yield at
        if seen is None or seen.state is not State.UNKNOWN or seen.owner != record.owner:
            return standing(seen)
        early = early_by(seen)
        if isinstance(verdict, Refuted) and early > 0:
            return Settlement(Outcome.TOO_EARLY, seen, early)
        yield Pause(at, 0.01 * 4**tries)
    raise StoreUnavailable("the key's row is held by another transaction")


def early_by(record: Record) -> float:
    """For how many seconds a Refuted is too early: a sent request may still be on its way to the provider."""
    return record.lease_until + record.quarantine - record.now


def _move(record: Record, verdict: Confirmed | Refuted, who: str) -> Swap:
    audit = Audit(who, kept_words(verdict.reason))
    if isinstance(verdict, Confirmed):
        return swap(record, Event.CONFIRM, Actor.RECONCILER, response=verdict.response, audit=audit)
    return swap(record, Event.REFUTE, Actor.RECONCILER, last_error=kept_words(verdict.reason), audit=audit)


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


def ingest(engine: Engine, asked: tuple[str, str] | Find, verdict: Verdict, *, who: str) -> Flow[Settlement]:
    """Find the key of a verdict, and apply the verdict to it."""
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
        _contradicted(engine, record, verdict, who)
        return standing(record)
    return (yield from settle(engine, record, verdict, who=who))


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


def _contradicted(engine: Engine, record: Record | None, verdict: Verdict, who: str) -> None:
    """Report a verdict that the work happened, about a key that a retry would run again: an operator must see it."""
    if (
        isinstance(verdict, Confirmed)
        and record is not None
        and record.state is State.FAILED_RETRYABLE
        and record.effects not in MAY_RERUN
    ):
        words = f"{who} confirmed a key that counts as not executed: a retry would do it a second time"
        engine.emitter.emit(events.ReconcileFailed(*about(record), tries=record.reconcile_tries, error=words))


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
