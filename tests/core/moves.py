"""Rows, and the moves that can be made from them."""

from __future__ import annotations

from typing import Any

from oncekey.core.record import Record, Reservation
from oncekey.core.states import FENCES, STARTS, Actor, Effects, Event, State, Transition
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.core.swaps import Swap, swap


def make_record(**changes: Any) -> Record:
    """A row in progress, attempt 1, its lease running."""
    values: dict[str, Any] = {
        "scope": "acme",
        "key": "key-1",
        "operation": "POST /payments",
        "fingerprint": b"f" * 32,
        "fingerprint_version": 1,
        "effects": Effects.EXTERNAL,
        "state": State.IN_PROGRESS,
        "attempt": 1,
        "owner": "owner-1",
        "lease_until": 1060.0,
        "recovery_point": None,
        "response": None,
        "last_error": None,
        "reconcile_at": None,
        "reconcile_tries": 0,
        "created_at": 1000.0,
        "finished_at": None,
        "retention_seconds": 86400.0,
        "expires_at": 87400.0,
        "now": 1001.0,
    }
    return Record(**(values | changes))


def make_reservation() -> Reservation:
    """Another request for the same key."""
    return Reservation("acme", "key-1", "POST /payments", b"f" * 32, 1, Effects.EXTERNAL, "owner-2", 60.0, 86400.0)


CHARGE = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=False)
NEEDS_STEPS = {"has steps", "has steps or repeatable effects", "one effect in doubt", "several effects in doubt"}


def fitting(move: Transition, effects: Effects = Effects.REPEATABLE) -> Record:
    """A row from which the move can be made, as far as (state, owner) decides it."""
    steps = "half_done" if move.when & NEEDS_STEPS else None
    if move.event in FENCES:
        effects = Effects.PHASED if "no effect in doubt" in move.when else Effects.EXTERNAL
    return make_record(state=move.source, effects=effects, recovery_point=steps)


def build(record: Record, event: Event, by: Actor, **more: Any) -> Swap:
    """``swap`` with a reservation exactly where the event wants one, and an effect and a new owner where it does."""
    if event in FENCES:
        more = {"step": CHARGE, "new_owner": "owner-2"} | more
    return swap(record, event, by, reservation=make_reservation() if event in STARTS else None, **more)
