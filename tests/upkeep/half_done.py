"""Half-done requests, and functions that resume them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncekey import OnceKey
from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects, Event
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.engine.resumption import Answer, Resumption
from oncekey.upkeep import Resumer
from tests.upkeep.key_store import OPERATION, KeyStore

Function = Callable[[Resumption], Any]
CHARGED = Step("charge", StepKind.EFFECT, StepState.DONE, False, b'{"id":"ch_1"}', "down-1", "ch_1")


def half_done(rows: KeyStore, *, released: bool = True, **how: Any) -> Record:
    """A key whose first attempt charged, and then fell."""
    (record,) = rows.reserved(effects=Effects.PHASED, **how)
    (record,) = rows.moved([record], Event.ADVANCE, Actor.OWNER, recovery_point="charge", step=CHARGED)
    return rows.moved([record], Event.RELEASE, Actor.OWNER, last_error="it fell")[0] if released else record


def resume(once: OnceKey, function: Function | None = None, **how: Any) -> dict[str, int]:
    """One run with this function: what it did."""
    if function is not None:
        once.resume(OPERATION, function)
    resumer = Resumer(once, **how)
    try:
        return {name: number for name, number in resumer.run().as_json().items() if number}
    finally:
        resumer.close()
        once.store.disconnect()  # of this thread


def counts(calls: list[Any]) -> Function:
    """Must not be called, or notes whose it is."""

    def go_on(op: Resumption) -> Answer:
        calls.append(op.scope)
        return 201, None

    return go_on


def phased(rows: KeyStore, **policy: Any) -> OnceKey:
    return rows.once(effects="phased", **policy)


def finishes(op: Resumption) -> Answer:
    return 201, {"charge": op.result("charge")["id"], "attempt": op.attempt}


def raises(error: BaseException) -> Function:
    def go_on(op: Resumption) -> Answer:
        raise error

    return go_on
