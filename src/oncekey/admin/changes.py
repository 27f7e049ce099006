"""The changes that an operator can make. Each follows the state table, and writes a line in the audit.

Every change takes the record that the operator has seen. If the row has changed since then, the change is refused: a
decision about one attempt is not valid for the next.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from oncekey.admin.encryption import plain_text_refused
from oncekey.admin.key_view import look_at
from oncekey.core import doubts
from oncekey.core.audit import Audit
from oncekey.core.jobs import DeferredTo, Job, JobState
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import FENCES, TABLE, Actor, Event, State
from oncekey.core.steps import Step, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.core.verdicts import Happened
from oncekey.engine.process import Owners
from oncekey.errors import IllegalTransition, KeyNotFound, MoveRefused
from oncekey.stores.api import Outbox, Store
from oncekey.stores.cache.client import CacheClient, CacheDown, Identified
from oncekey.stores.cache.front import mark_forgotten
from oncekey.telemetry.redaction import redact

WHY_CHARS = 500

_ASKED = {
    Event.CONFIRM: "only an unknown outcome can be confirmed",
    Event.GIVE_UP: "only an unknown outcome can be failed",
    Event.REFUTE: "only an unknown outcome can be refuted",
    Event.HAPPENED: "only an effect of an unknown outcome can be settled; --correct replaces the result of a done one",
    Event.NOT_HAPPENED: "only an effect of an unknown outcome can be settled",
    Event.CORRECT: "only the result of an effect of an unknown or half-done key can be corrected",
    Event.POSTPONE: "only an unknown outcome or a half-done request can be tried again",
    Event.FORGET: "only a final key can be forgotten, anything else may be in the middle of its work",
}
_NEXT = {
    State.IN_PROGRESS: "its owner ends it, or upkeep when the lease is over",
    State.PENDING: "its job in the outbox settles it; `oncekey keys show` names the job",
    State.COMPLETED: "it is final, and replayed until it expires; `oncekey keys forget` makes room",
    State.FAILED: "it is final, and replayed until it expires; `oncekey keys forget` makes room",
    State.FAILED_RETRYABLE: "the next retry runs it",
    State.UNKNOWN: "settle it with `oncekey keys resolve`",
    State.EXPIRED: "the next request runs as a new one",
}


def confirm(store: Store, seen: Record, response: StoredResponse, audit: Audit, *, final: bool = False) -> Record:
    """It happened, and this is its response. ``final``: also if the key has steps, and later phases are skipped."""
    if not final and (refusal := skips_phases(store, seen, "--confirm")) is not None:
        raise refusal
    return _move(store, seen, Event.CONFIRM, audit, response=response)


def skips_phases(store: Store, seen: Record, option: str) -> MoveRefused | None:
    """Why a key cannot be confirmed or failed without ``final``: it has steps, and later phases would be skipped."""
    if not any(not step.is_request for step in _steps(store, seen)) or was_deferred(store, seen) is not None:
        return None
    what, how = f"this key has steps, the last that is done is '{seen.recovery_point}'", "--refute"
    if doubted := in_doubt(store, seen):
        what, how = doubts.words_of(doubted), f"--happened {doubted[0].name} --result JSON"
    return MoveRefused(
        f"nothing was changed: {what}, and {option} skips every phase after it. Use `{how}` to let the request go on "
        "after it; or --final, if nothing is to follow, as after a declined payment"
    )


def happened(store: Store, seen: Record, verdict: Happened, audit: Audit) -> Record:
    """The effect in doubt happened, with this result: the next attempt continues after it."""
    return _settle_effect(store, seen, verdict.effect, verdict, audit, None)


def not_happened(
    store: Store, seen: Record, effect: str | None, audit: Audit, quarantine_seconds: float | None = None
) -> Record:
    """The effect in doubt did not happen and never will: the next attempt calls it. Only after the quarantine."""
    return _settle_effect(store, seen, effect, None, audit, quarantine_seconds)


def correct(store: Store, seen: Record, verdict: Happened, audit: Audit) -> Record:
    """Replace the result of an effect that is done: the next attempt gets this one. The key stays in its state."""
    step = done_effect(store, seen, verdict.effect or "")
    before, after = step.result or b"", verdict.result
    digest = hashlib.sha256(before).hexdigest()[:8]
    change = f"from {len(before)} bytes (SHA-256 {digest}…) to {len(after)} bytes"
    why = f"result of effect '{step.name}' corrected {change}: {audit.why}"[:WHY_CHARS]
    move = doubts.corrected(
        seen,
        replace(step, result=after, provider_id=verdict.provider_id),
        new_owner=Owners().new(),
        audit=Audit(audit.who, why),
    )
    (moved,) = store.swap([move])
    if moved is None:
        raise _why_not(store, seen, move)
    return moved


def done_effect(store: Store, seen: Record, effect: str) -> Step:
    """The effect whose result can be corrected; MoveRefused if there is none of this name, or it is not done."""
    if (refusal := refused(seen, Event.CORRECT)) is not None:
        raise refusal
    named = doubts.named(_steps(store, seen), effect, None)
    if isinstance(named, Step) and named.state is not StepState.DONE:
        named = f"effect '{effect}' is not done: it has no result yet"
    if not isinstance(named, Step):
        raise MoveRefused(f"nothing was changed: {named}; look at key {redact(seen.key)} with `oncekey keys show`")
    return named


def choose(store: Store, seen: Record, effect: str | None) -> Step:
    """The effect in doubt; MoveRefused if another effect is in doubt, or none."""
    chosen = doubts.choose(seen, _steps(store, seen), effect)
    if isinstance(chosen, Step) and chosen.state is StepState.DONE:
        chosen = (
            f"effect '{chosen.name}' is done, and keeps its result; --refute lets the request go on after it, "
            "--correct replaces the result"
        )
    if isinstance(chosen, str):
        raise MoveRefused(f"nothing was changed: {chosen}; look at key {redact(seen.key)} with `oncekey keys show`")
    return chosen


def in_doubt(store: Store, seen: Record) -> list[Step]:
    """The effects of a key that are in doubt."""
    return doubts.in_doubt(seen, _steps(store, seen)) if seen.state is State.UNKNOWN else []


def _settle_effect(
    store: Store,
    seen: Record,
    effect: str | None,
    verdict: Happened | None,
    audit: Audit,
    quarantine_seconds: float | None,
) -> Record:
    event = Event.NOT_HAPPENED if verdict is None else Event.HAPPENED
    if (refusal := refused(seen, event) or was_deferred(store, seen)) is not None:
        raise refusal
    step = choose(store, seen, effect)
    outcome = "did not happen" if verdict is None else "happened"
    why = f"effect '{step.name}' {outcome}: {cut_short(seen, quarantine_seconds)}{audit.why}"[:WHY_CHARS]
    change = doubts.settled(
        seen,
        _steps(store, seen),
        step,
        None if verdict is None else verdict.result,
        Actor.OPERATOR,
        provider_id=None if verdict is None else verdict.provider_id,
        new_owner=Owners().new(),
        audit=Audit(audit.who, why),
        quarantine_seconds=quarantine_seconds,
    )
    (moved,) = store.swap([change])
    if moved is None:
        raise _why_not(store, seen, change)
    return moved


def _steps(store: Store, seen: Record) -> list[Step]:
    return store.steps([StepsOf(seen.scope, seen.key)])[0] if seen.has_steps else []


def give_up(store: Store, seen: Record, response: StoredResponse, audit: Audit, *, final: bool = False) -> Record:
    """Settle the key as failed for good: clients get this response. ``final`` as in :func:`confirm`."""
    if not final and (refusal := skips_phases(store, seen, "--fail")) is not None:
        raise refusal
    return _move(store, seen, Event.GIVE_UP, audit, response=response)


def refute(store: Store, seen: Record, audit: Audit, quarantine_seconds: float | None = None) -> Record:
    """It did not happen and never will: a retry may run it.

    Allowed only after the quarantine: the row's own, or the one given.
    """
    while doubted := in_doubt(store, seen):
        seen = not_happened(store, seen, doubted[0].name, audit, quarantine_seconds)
        if seen.state is not State.UNKNOWN:
            return seen
    if (refusal := was_deferred(store, seen)) is not None:
        raise refusal
    why = audit.why[:WHY_CHARS]
    audit = Audit(audit.who, f"{cut_short(seen, quarantine_seconds)}{why}")
    return _move(store, seen, Event.REFUTE, audit, last_error=why, quarantine_seconds=quarantine_seconds)


def was_deferred(store: Store, seen: Record) -> MoveRefused | None:
    """Why no verdict lets this unknown key run again: its request is done, and only its job may not be."""
    if seen.state is not State.UNKNOWN or not isinstance(store, Outbox):
        return None
    job = store.deferred_to(DeferredTo(seen.scope, seen.key, seen.owner))
    return None if job is None else MoveRefused(f"nothing was changed: {doubts.words_of_deferral(job)}")


def cut_short(seen: Record, quarantine_seconds: float | None) -> str:
    """The audit's words for a quarantine that an operator made shorter than the row's; "" if it was not shorter."""
    if quarantine_seconds is None or quarantine_seconds >= seen.quarantine:
        return ""
    return f"quarantine cut short from {seen.quarantine:g} s to {quarantine_seconds:g} s: "


def forget(store: Store, seen: Record, audit: Audit) -> Record:
    """Delete a final key, so that the next request with it runs as new. If there is a cache in front of the store, call
    ``forget_in_cache`` first."""
    return _move(store, seen, Event.FORGET, audit)


def forget_in_cache(store: Store, scope: str, key: str, cache: CacheClient) -> bool:
    """Let no process replay this key from the cache. It is harmless: the next request asks the store. False: the cache
    had no answer to it."""
    try:
        return isinstance(store, Identified) and mark_forgotten(cache, store, scope, key)
    except CacheDown as error:
        raise MoveRefused(
            f"nothing was changed: the cache does not answer ({error}). Try again; or leave --cache out, and the "
            "app may replay the answer for up to its cache_ttl"
        ) from error
    finally:
        cache.close()


def ask_again(store: Store, seen: Record, audit: Audit) -> Record:
    """Let upkeep try a key again now, and count its tries from the start. The reconciler tries unknown keys, the
    resumer half-done ones.

    For a dead letter, and for a key that still waits although its resolver or its function has been corrected.
    """
    return _move(store, seen, Event.POSTPONE, audit, reconcile_in=0.0, last_error=seen.last_error)


def changeable(store: Store, scope: str, key: str, event: Event) -> Record:
    """The record as it is now. A move that is not possible is refused, before the operator is asked for a reason."""
    record = look_at(store, scope, key)
    if (refusal := refused(record, event) or plain_text_refused(store, record)) is not None:
        raise refusal
    return record


def refused(record: Record, event: Event) -> MoveRefused | None:
    """Why the operator cannot make this move; None: the state table has it."""
    try:
        if event not in FENCES:
            swap(record, event, Actor.OPERATOR)
        # The table's conditions on steps are checked when the effect is chosen.
        elif not any((move.source, move.event) == (record.state, event) for move in TABLE):
            raise IllegalTransition
    except IllegalTransition:
        return MoveRefused(f"key {redact(record.key)} is {record.state}: {_ASKED[event]}; {_NEXT[record.state]}")
    return None


def _move(store: Store, seen: Record, event: Event, audit: Audit, **what: Any) -> Record:
    if (refusal := refused(seen, event)) is not None:
        raise refusal
    change = swap(seen, event, Actor.OPERATOR, audit=Audit(audit.who, audit.why[:WHY_CHARS]), **what)
    if event is Event.POSTPONE:
        change = replace(change, reconcile_tries=0)
    (moved,) = store.swap([change])
    if moved is None:
        raise _why_not(store, seen, change)
    return moved


def _why_not(store: Store, seen: Record, change: Swap) -> MoveRefused:
    """The row did not meet the move's conditions: find out which."""
    name = redact(seen.key)
    try:
        there = look_at(store, seen.scope, seen.key)
    except KeyNotFound:
        return MoveRefused(f"nothing was changed: key {name} was deleted before this change")
    if (there.state, there.owner) != (seen.state, seen.owner):
        return MoveRefused(
            f"nothing was changed: key {name} changed before this, and is now {there.state} (attempt {there.attempt}); "
            "look at it again with `oncekey keys show`"
        )
    early = there.lease_until + (change.lease_over_by or 0.0) - there.now
    if change.lease_over_by is not None and early > 0:
        doubted = in_doubt(store, there)
        happened = f"`--happened {doubted[0].name} --result JSON`" if doubted else "--confirm"
        verdict = "refuted" if change.event is Event.REFUTE else "said not to have happened"
        return MoveRefused(
            f"nothing was changed: key {name} cannot be {verdict} for another {early:.0f} s: until the quarantine is "
            f"over, what was sent may still be on its way. Wait; or use {happened}, if it has happened; or, if you "
            "know that nothing is on its way, give --quarantine 0s and the reason"
        )
    return MoveRefused(f"nothing was changed: key {name} is held by a transaction right now; try again")


# -- jobs ----------------------------------------------------------------------------------------------------------


def retry_job(store: Store, job_id: str, audit: Audit) -> Job:
    """Let workers run a dead letter again, from attempt 1. Refused if its key was settled without it."""
    job = dead_job(store, job_id)
    if job.settles:
        (record,) = store.read([(job.scope, job.key)])
        if record is None or record.state is not State.UNKNOWN or record.owner != job.key_owner:
            now = "gone" if record is None else f"{record.state} by now"
            raise MoveRefused(
                f"job {job_id} was to settle key {redact(job.key)}, which is {now}: a second run could repeat what is "
                "settled; discard the job with `oncekey dead-letters discard`"
            )
    return _redirect(store, job_id, JobState.READY, audit)


def discard_job(store: Store, job_id: str, audit: Audit) -> Job:
    """Discard a dead letter: no worker will run it."""
    return _redirect(store, job_id, JobState.CANCELLED, audit)


def dead_job(store: Store, job_id: str) -> Job:
    """The job, which must be a dead letter."""
    job = store.job(job_id) if isinstance(store, Outbox) else None
    if job is None:
        raise KeyNotFound(
            f"there is no job {job_id}; see `oncekey dead-letters list`, and give --scope if this is a key"
        )
    if job.state is not JobState.DEAD:
        raise MoveRefused(f"job {job_id} is {job.state}, and no dead letter: nothing was changed")
    if (refusal := plain_text_refused(store, job)) is not None:
        raise refusal
    return job


def _redirect(store: Store, job_id: str, to_state: JobState, audit: Audit) -> Job:
    moved = None
    if isinstance(store, Outbox):
        moved = store.redirect(job_id, to_state, Audit(audit.who, audit.why[:WHY_CHARS]))
    if moved is None:
        dead_job(store, job_id)  # raises with the reason if it is no dead letter any more
        raise MoveRefused(f"nothing was changed: job {job_id} is held by a transaction right now; try again")
    return moved
