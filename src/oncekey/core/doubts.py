"""Which effects of an unknown key are in doubt, and the move that settles one of them. Pure.

An effect is **in doubt** if it was called, may not be repeated, and did not say how it ended: its step is ``intended``
and not ``repeatable``, and the record says ``external`` (see ``engine/steps.py``). A verdict says that it happened,
with its result, or that it did not. In both cases the key gets a new owner token, so that an owner that was only late
cannot write. When no effect is left in doubt, the key is retryable: the next attempt continues after the effects that
are done, and calls the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from oncekey.core.audit import Audit
from oncekey.core.jobs import Job, JobState
from oncekey.core.record import Record
from oncekey.core.sealed import is_sealed_text
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import Find, Step, StepKind, StepState
from oncekey.core.swaps import Swap, swap

WHY_UNKNOWN = "; it became unknown because: "
"""In ``last_error`` of an unknown key, between what the last try said and why the key became unknown."""
_OR_FINAL = "or Confirmed(…, final=True) if nothing is to follow, as after a declined payment"


def with_cause(last_answer: str, record: Record) -> str:
    """What the last try said about an unknown key, and why the key became unknown. Both stand in ``last_error``."""
    before = record.last_error or ""
    if is_sealed_text(before):
        return before  # this process cannot read the cause, and another one can
    _, mark, cause = before.rpartition(WHY_UNKNOWN)
    if not mark and record.reconcile_tries:
        cause = ""  # an earlier version of oncekey wrote over the cause
    return f"{last_answer}{WHY_UNKNOWN}{cause}" if cause else last_answer


def skips_phases(record: Record, steps: Sequence[Step]) -> str | None:
    """Why a final verdict about a phased request needs ``final=True``; None: the key has no steps."""
    if not any(not step.is_request for step in steps):
        return None
    doubted = in_doubt(record, steps)
    done = [step for step in steps if step.kind is StepKind.EFFECT and step.state is StepState.DONE]
    if doubted:
        return (
            f"{words_of(doubted)}, and Confirmed(…) skips every phase after it. Use Happened(result, "
            f"effect='{doubted[0].name}') to let the request go on after it; {_OR_FINAL}"
        )
    verdict = f"Happened(result, effect='{done[-1].name}')" if done else "Refuted(reason)"
    return (
        f"this key has steps, the last that is done is '{record.recovery_point}', and Confirmed(…) skips every phase "
        f"after it. Use {verdict} to let the request go on after it; {_OR_FINAL}"
    )


def words_of_deferral(job: Job) -> str:
    """Why no verdict lets a deferred request run again, and what to do instead."""
    again = (
        f"run it again with `oncekey dead-letters retry {job.id} --why TEXT`, or " if job.state is JobState.DEAD else ""
    )
    return (
        "the request itself is done: it was answered 202, and its rows are committed, so it is not run again. Only its "
        f"job {job.id} ('{job.task}', {job.state}) may not have done its work: {again}confirm or fail the key with the "
        "response that its client is to get"
    )


def in_doubt(record: Record, steps: Iterable[Step]) -> list[Step]:
    """The effects in doubt, in the order in which they were first called."""
    if not record.may_have_effect_in_doubt:
        return []
    return [
        step
        for step in steps
        if step.kind is StepKind.EFFECT and step.state is StepState.INTENDED and not step.repeatable
    ]


def cleared(step: Step) -> Step:
    """The step of an effect that is proven not to have happened: it is in doubt no more, and may be called."""
    return replace(step, repeatable=True)


def words_of(doubted: Sequence[Step]) -> str:
    """Which effects are in doubt, as part of a sentence."""
    names = ", ".join(f"'{step.name}'" for step in doubted)
    match len(doubted):
        case 0:
            return "no effect of this key is in doubt"
        case 1:
            return f"effect {names} is in doubt"
    return f"effects {names} are in doubt"


def named(steps: Sequence[Step], effect: str | None, found_by: Find | None) -> Step | str | None:
    """The step of the effect that a verdict is about. None: it names no effect. A sentence: it names none of this key.

    ``found_by``: the id by which a webhook found the key. It belongs to one of the key's effects, or to a job.
    """
    effects = _effects(steps)
    if found_by is not None:
        found = next((step for step in effects if _carries(step, found_by)), None)
        if found is None:
            return "the id belongs to a job of this key, and to none of its effects"
        if effect not in (None, found.name):
            return f"the id belongs to effect '{found.name}', and the verdict is about '{effect}'"
        return found
    if effect is None:
        return None
    return next((step for step in effects if step.name == effect), f"this key has no effect '{effect}'")


def only_effect(steps: Sequence[Step]) -> Step | None:
    """The effect of a key that has one; None: it has none, or several."""
    effects = _effects(steps)
    return effects[0] if len(effects) == 1 else None


def _effects(steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if step.kind is StepKind.EFFECT and not step.is_request]


def _carries(step: Step, found_by: Find) -> bool:
    return (found_by.downstream_key is not None and step.downstream_key == found_by.downstream_key) or (
        found_by.provider_id is not None and step.provider_id == found_by.provider_id
    )


def choose(record: Record, steps: Sequence[Step], effect: str | None, found_by: Find | None = None) -> Step | str:
    """The effect that a verdict settles, or the sentence that says why it settles none. It may be done already."""
    doubted = in_doubt(record, steps)
    about = named(steps, effect, found_by)
    if isinstance(about, str):
        return f"{about}; {words_of(doubted)}"
    if about is None:
        return doubted[0] if len(doubted) == 1 else f"{words_of(doubted)}{': name one' if doubted else ''}"
    if about.state is StepState.DONE or about in doubted:
        return about
    return f"effect '{about.name}' is not in doubt; {words_of(doubted)}"


def goes_on(record: Record, step: Step, by: Actor, *, new_owner: str, audit: Audit) -> Swap:
    """The move that lets a request go on: a verdict said that ``step`` happened, which is done and stays as it is."""
    return swap(record, Event.GO_ON, by, last_error=audit.why, step=step, audit=audit, new_owner=new_owner)


def corrected(record: Record, step: Step, *, new_owner: str, audit: Audit) -> Swap:
    """The move by which an operator replaces the result of an effect that is done. The key stays as it is."""
    return swap(
        *(record, Event.CORRECT, Actor.OPERATOR),
        last_error=record.last_error,
        step=step,
        audit=audit,
        new_owner=new_owner,
    )


def settled(
    record: Record,
    steps: Sequence[Step],
    step: Step,
    result: bytes | None,
    by: Actor,
    *,
    provider_id: str | None = None,
    new_owner: str,
    audit: Audit,
    quarantine_seconds: float | None = None,
) -> Swap:
    """The move that settles ``step``, which is in doubt: it happened with this result, or (None) it did not."""
    last = len(in_doubt(record, steps)) == 1
    written = cleared(step)
    if result is not None:
        written = replace(step, state=StepState.DONE, result=result, provider_id=provider_id)
    return swap(
        record,
        Event.NOT_HAPPENED if result is None else Event.HAPPENED,
        by,
        to_state=State.FAILED_RETRYABLE if last else State.UNKNOWN,
        last_error=audit.why if last else with_cause(audit.why, record),
        recovery_point=None if result is None else step.name,
        effects=Effects.PHASED if last else None,
        quarantine_seconds=quarantine_seconds,
        step=written,
        audit=audit,
        new_owner=new_owner,
    )
