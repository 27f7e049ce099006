"""Phases and effects: the steps of a request that must survive ``kill -9``.

``op.phase`` runs local work and commits it together with its result and the recovery point: all of it, or nothing.
``op.effect`` makes one call outside of the database. It writes its intent, calls, and writes the result. On a later
attempt a step that is done returns its remembered result and is not run again.

A crash between intent and result is not a special case. While an effect that may not be repeated is under way, the
*record itself* has ``effects='external'``. A request or the sweeper that finds its lease over treats it as every
external key, and makes it ``unknown``. When the result is written, the record is ``phased`` again. An effect that may
be repeated does not change the record, and the next attempt calls it again with the same downstream key. So the owner
of a key may always call a step that is only intended: either the effect may be repeated, or a verdict has proven that
the call did not happen.

Steps run one after another, because the recovery point is a place in their order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core.doubts import cleared
from oncekey.core.kept_request import as_step
from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import (
    STARTED,
    Step,
    StepKind,
    StepsOf,
    StepState,
    checked_provider_id,
    remembered_result,
)
from oncekey.core.swaps import Swap, swap
from oncekey.engine.flows import Call, Flow, Pause
from oncekey.engine.known_steps import Steps, enter
from oncekey.engine.transactions import completion, enlistment, outcome
from oncekey.engine.transactions.enlistment import Enlisted
from oncekey.engine.transactions.stages import Happened
from oncekey.errors import LeaseLost, NotExecuted, StepError, StoreOverloaded, StoreUnavailable

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine
    from oncekey.engine.operation import Operation

ADVANCE_TRIES = 5
AGAIN_SECONDS = 0.25
"""The pause between two tries to write the result of an effect, while the store is down."""


# -- phase -------------------------------------------------------------------------------------------------------------


def phase(operation: Operation, name: str, work: Callable[[], Any], on: Any, *, blocking: bool) -> Flow[Any]:
    """Run ``work`` in the transaction of ``on``, and commit it with its result. Or return the remembered result."""
    engine, steps = enter(operation, name)
    try:
        if (remembered := (yield from _remembered(operation, steps, name, StepKind.PHASE))) is not None:
            return orjson.loads(remembered.result or b"null")
        opened = operation.enlisted = enlistment.prepare(engine, operation, on, "engine", blocking=blocking)
        yield from enlistment.enlist(operation, opened, waits=not blocking, ends_here=True)
        steps.phase = name
        step = yield from _work(engine, operation, opened, name, work)
        yield from _commit(operation, opened, name)
        operation.record = replace(operation.record, recovery_point=name)
        return orjson.loads(step.result or b"null")
    except NotExecuted as error:
        steps.not_executed.append(error)
        raise
    finally:
        steps.under_way = steps.phase = None


def _work(engine: Engine, operation: Operation, opened: Enlisted, name: str, work: Callable[[], Any]) -> Flow[Step]:
    """Run ``work`` and write its step in the same transaction. If anything fails, all of it is rolled back."""
    link = opened.link
    try:
        result = yield Call(work)
        step = Step(name, StepKind.PHASE, StepState.DONE, True, remembered_result(name, result))
        statements = link.database.transaction_statements
        written = engine.sealing.sealed_step(operation.record.scope, operation.record.key, step)
        rows = yield Call(partial(link.complete, statements.advance, _parameters(operation, written)))
        if not rows:
            raise StepError(f"phase '{name}' ended its own transaction: {link.leave_it}")
    except (Exception, asyncio.CancelledError) as error:
        yield from completion.roll_back(opened)
        if (yield from outcome.nothing_written(engine, opened, opened.stage)):
            operation.enlisted = None  # otherwise the end of the request finds out whether it was committed
        if opened.held_too_long and isinstance(error, Exception):
            raise StoreUnavailable(f"{opened.held_too_long}, so it was rolled back") from error
        raise
    return step


def _commit(operation: Operation, opened: Enlisted, name: str) -> Flow[None]:
    opened.saw(Happened.COMMIT_SENT)
    try:
        yield Call(opened.link.commit)
    except Exception as error:
        yield Call(opened.link.roll_back)
        opened.release()
        operation.enlisted = None
        # The commit was refused, or its answer was lost: the stored steps show which.
        if not (yield from _is_done(operation, name)):
            raise StoreUnavailable(f"phase '{name}' could not be committed") from error
    else:
        opened.saw(Happened.COMMIT_ANSWERED)
        opened.release()
        operation.enlisted = None


def _is_done(operation: Operation, name: str) -> Flow[bool]:
    """Whether a commit whose answer was lost has happened. That is decided when the key's row is no longer locked."""
    record = operation.record
    for tries in range(ADVANCE_TRIES):
        renewed = yield swap(record, Event.RENEW, Actor.OWNER, lease_seconds=operation.policy.lease_seconds)
        if renewed is not None:
            break
        yield Pause((record.scope, record.key), 0.01 * 4**tries)
    found: list[Step] = yield StepsOf(record.scope, record.key)
    return any(step.name == name and step.state is StepState.DONE for step in found)


# -- effect ------------------------------------------------------------------------------------------------------------


def effect(
    operation: Operation,
    name: str,
    work: Callable[[], Any],
    repeatable: bool,
    provider_id: Callable[[Any], str] | None,
) -> Flow[Any]:
    """Call ``work`` once, with its intent on disk before and its result on disk after. Or return the stored result."""
    engine, steps = enter(operation, name)
    try:
        if (remembered := (yield from _remembered(operation, steps, name, StepKind.EFFECT))) is not None:
            return orjson.loads(remembered.result or b"null")
        step = Step(name, StepKind.EFFECT, StepState.INTENDED, repeatable, None, operation.downstream_key(name))
        # If the result of an earlier effect is not known, this effect does not change that.
        without = Effects.EXTERNAL if operation.has_open_effect else Effects.PHASED
        yield from _intend(operation, step, without if repeatable else Effects.EXTERNAL)
        if not repeatable:
            steps.open_effects.append(name)
        result = yield from _call(operation, step, without, engine.around_effect(operation, name, work))
        kept = remembered_result(name, result)
        taken = None if provider_id is None else checked_provider_id(name, provider_id(result))
        done = replace(step, state=StepState.DONE, result=kept, provider_id=taken)
        yield from _conclude(operation, done, without)
        if not repeatable:
            steps.open_effects.remove(name)
        return orjson.loads(kept)
    except NotExecuted as error:
        steps.not_executed.append(error)
        if name in steps.open_effects and operation.evidence.speaks(error):
            steps.open_effects.remove(name)
        raise
    finally:
        steps.under_way = None


def _intend(operation: Operation, step: Step, effects: Effects) -> Flow[None]:
    """Write the intent of the effect, with a lease that is long enough for a call."""
    began = time.monotonic()
    yield from _advance(operation, step, _point(operation), effects)
    if time.monotonic() - began > operation.policy.lease_seconds / 2:
        # The write took so long (a pause, a slow store) that the lease may be over before the call returns: renew it.
        yield from _advance(operation, step, _point(operation), effects)
    if operation.lost:
        raise LeaseLost(f"the key went to another attempt before effect '{step.name}' was called")


def _call(operation: Operation, step: Step, without: Effects, work: Callable[[], Any]) -> Flow[Any]:
    try:
        return (yield Call(work))
    except NotExecuted as error:
        # Proven: it did not happen, so the next attempt may call it. The NotExecuted of a protected function that the
        # effect called proves nothing about the effect.
        if not step.repeatable and operation.evidence.speaks(error):
            yield from _advance(operation, cleared(step), _point(operation), without)
        raise
    except asyncio.CancelledError:
        if operation.steps is not None:
            operation.steps.cut_off = True
        raise


def _conclude(operation: Operation, step: Step, effects: Effects) -> Flow[None]:
    """Write the result. Only this attempt knows it, so it tries for as long as it may have the lease."""
    until = time.monotonic() + operation.policy.lease_seconds
    while True:
        try:
            return (yield from _advance(operation, step, step.name, effects))
        except (StoreUnavailable, StoreOverloaded):
            if time.monotonic() > until:
                raise
        yield Pause((operation.record.scope, operation.record.key), AGAIN_SECONDS)


def _point(operation: Operation) -> str:
    return operation.record.recovery_point or STARTED


def _advance(operation: Operation, step: Step, recovery_point: str | None, effects: Effects | None) -> Flow[None]:
    """Write a step and renew the lease, if this attempt still owns the key. A second write has the same effect."""
    record = operation.record
    at = (record.scope, record.key)
    change: Swap = swap(
        record,
        Event.ADVANCE,
        Actor.OWNER,
        lease_seconds=operation.policy.lease_seconds,
        recovery_point=recovery_point,
        effects=effects,
        step=step,
    )
    for tries in range(ADVANCE_TRIES):
        moved: Record | None = yield change
        if moved is not None:
            operation.record = moved
            return
        seen: Record | None = yield at
        if seen is None or seen.owner != record.owner or seen.state is not State.IN_PROGRESS:
            operation.lost = True
            raise LeaseLost(f"the key went to another attempt at step '{step.name}'")
        yield Pause(at, 0.01 * 4**tries)
    raise StoreUnavailable("the key's row is held by another transaction")


# -- what both share ---------------------------------------------------------------------------------------------------


def _remembered(operation: Operation, steps: Steps, name: str, kind: StepKind) -> Flow[Step | None]:
    """The step of this name, if an earlier attempt has done it. None: this attempt must run it."""
    if not steps.loaded:
        yield from _load(operation, steps)
    return steps.reach(name, kind)


def _load(operation: Operation, steps: Steps) -> Flow[None]:
    """Before the first step of an attempt: read the steps of earlier attempts, and store the request if asked to."""
    found: list[Step] = []
    if operation.attempt > 1:
        found = yield StepsOf(operation.record.scope, operation.record.key)
    steps.remember(found)
    if operation.request is not None and len(found) == len(steps.known):
        # Without a recovery point: a key with a stored request and no step has done nothing.
        yield from _advance(operation, as_step(operation.request), None, None)
    steps.loaded = True


def _parameters(operation: Operation, step: Step) -> dict[str, Any]:
    record = operation.record
    return {
        "scope": record.scope,
        "key": record.key,
        "owner": record.owner,
        "name": step.name,
        "kind": step.kind.value,
        "result": (step.result or b"null").decode(),
        "lease_seconds": operation.policy.lease_seconds,
        "now": time.time(),
    }
