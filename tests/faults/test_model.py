"""The model sees what is broken: one guard is taken away, and the way to the broken promise is printed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from oncekey.core.decision import Busy, Claim, Decision, Replay, decide
from oncekey.core.record import Record, Reservation
from oncekey.core.states import FINAL, Effects, Event, State
from oncekey.core.swaps import Swap
from oncekey.engine import settlement
from oncekey.engine.flows import Flow
from oncekey.engine.known_steps import Steps
from oncekey.stores.memory import MemoryStore
from tests.faults import model, model_flows
from tests.faults.campaign import Run
from tests.faults.model_machine import Machine

KINDS = {kind.name: kind for kind in (*model_flows.KINDS, *model_flows.CHANGED, *model_flows.RESUMED)}
SEARCHED = 60_000


class AnyOwner(MemoryStore):
    """Compares the state, and not whose it is."""

    def _compare_and_set(self, change: Swap, now: float) -> Record | None:
        row = self._rows.get((change.scope, change.key))
        return super()._compare_and_set(change if row is None else replace(change, owner=row.owner), now)


class AnyLease(MemoryStore):
    """Moves a key that has an owner, lease or not."""

    def _compare_and_set(self, change: Swap, now: float) -> Record | None:
        return super()._compare_and_set(replace(change, lease_over_by=None), now)


class ReapsAll(MemoryStore):
    """Its reaper looks at the time and not at the state."""

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        gone = [at for at, row in self._rows.items() if row.lease_until <= 0.0]
        for at in gone:
            del self._rows[at]
        return len(gone)


class ForgetsTheList(MemoryStore):
    """Makes a key unknown, and schedules nothing."""

    def _compare_and_set(self, change: Swap, now: float) -> Record | None:
        moved = super()._compare_and_set(change, now)
        if moved is not None and moved.state is State.UNKNOWN:
            moved = self._rows[moved.scope, moved.key] = replace(moved, reconcile_at=None)
        return moved


def everything_may_rerun() -> AbstractContextManager[Any]:
    every = frozenset(Effects)
    return patch.multiple("oncekey.core.swaps", MAY_RERUN=every)


def state_first(record: Record | None, wanted: Reservation) -> Decision:
    if record is not None and record.owner != wanted.owner and record.state is State.IN_PROGRESS:
        return decide(replace(record, fingerprint=wanted.fingerprint), wanted)
    return decide(record, wanted)


def no_fingerprint(record: Record | None, wanted: Reservation) -> Decision:
    if record is not None and record.state in FINAL and record.fingerprint != wanted.fingerprint:
        return Replay(record)
    return decide(record, wanted)


def always_busy(record: Record | None, wanted: Reservation) -> Decision:
    if record is not None and record.state is State.FAILED_RETRYABLE:
        return Busy(record)
    return decide(record, wanted)


def any_time(engine: Any, record: Record, *others: Any, **more: Any) -> Flow[Any]:
    """A verdict counts from when it arrives, not from when it was asked for."""
    return settle(engine, replace(record, lease_until=-1000.0), *others, **more)


def same_declaration(record: Record | None, wanted: Reservation) -> Decision:
    """As if no deploy could change a route's effects."""
    if record is None or record.state not in (State.FAILED_RETRYABLE, State.IN_PROGRESS):
        return decide(record, wanted)
    before = Effects.PHASED if record.has_steps else record.effects
    return decide(record, replace(wanted, effects=before))


def taken_over_at_once(record: Record | None, wanted: Reservation) -> Decision:
    """Without releasing it first from an owner that may still write a step."""
    decision = decide(record, wanted)
    released = isinstance(decision, Claim) and decision.event is Event.RELEASE
    return Claim(decision.record, Event.TAKE_OVER) if released and decision.record is not None else decision


settle = settlement.settle

Patch = Callable[[], AbstractContextManager[Any]]


def deciding(wrong: Callable[..., Decision]) -> Patch:
    return lambda: patch.multiple("oncekey.engine.engine", decide=wrong)


BREAKS: tuple[tuple[str, str, str, type[MemoryStore], Patch], ...] = (
    ("the store does not compare the owner", "external", "I3", AnyOwner, nullcontext),
    ("the store does not compare the lease", "repeatable", "I3", AnyLease, nullcontext),
    ("the reaper deletes what is in flight", "external", "I1", ReapsAll, nullcontext),
    ("an unknown outcome is not on the reconciler's list", "external", "I4", ForgetsTheList, nullcontext),
    ("409 before 422", "external", "I5", MemoryStore, deciding(state_first)),
    ("any request is replayed to", "external", "I5", MemoryStore, deciding(no_fingerprint)),
    ("a retry is never let in", "repeatable", "I4", MemoryStore, deciding(always_busy)),
    ("steps are forgotten", "phased, unrepeatable, then external", "I1", MemoryStore, deciding(same_declaration)),
    ("a first step comes late", "phased, unrepeatable, then external", "I1", MemoryStore, deciding(taken_over_at_once)),
    ("what is repeatable is not repeated", "repeatable, then external", "I1", MemoryStore, deciding(same_declaration)),
    (
        "an external key is taken over",
        "external",
        "I1",
        MemoryStore,
        lambda: patch.multiple("oncekey.core.decision", MAY_RERUN=frozenset(Effects)),
    ),
    (
        "the sweeper releases an external key",
        "external",
        "I1",
        MemoryStore,
        lambda: patch.multiple("oncekey.upkeep.sweeper", MAY_RERUN=frozenset(Effects)),
    ),
    (
        "refuted before the quarantine, applied after it",
        "external",
        "I1",
        MemoryStore,
        lambda: patch.multiple("oncekey.engine.settlement", settle=any_time),
    ),
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("oncekey")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(("what", "kind", "promise", "store", "broken"), BREAKS, ids=[each[0] for each in BREAKS])
def test_broken_guard_is_found_by_the_model(
    what: str, kind: str, promise: str, store: type[MemoryStore], broken: Patch
) -> None:
    with broken(), everything_may_rerun() if "external key" in what else nullcontext():
        machine = Machine(KINDS[kind], store=store, same=2, other=int(promise == "I5"))
        found = model.search(machine, states=SEARCHED)
    assert found.broken is not None, f"not seen in {found.states} states"
    assert found.broken[0] == promise, found.broken
    assert "a1 is sent" in found.broken[1], "the way there"


def test_the_residue_that_the_promises_name() -> None:
    """An owner that is paused before its call for longer than the quarantine: two charges, and nothing else does it."""
    found = model.search(Machine(KINDS["external"], held=False, same=2, other=0), states=SEARCHED)
    assert found.broken is not None
    promise, way = found.broken
    assert promise == "I1"
    assert way.index("the quarantine is over") < way.index("a1: outside")


@pytest.mark.parametrize("kind", model_flows.CHANGED, ids=lambda kind: kind.name)
def test_deploys_between_two_requests_break_nothing(kind: model_flows.Kind) -> None:
    """Each pair of declarations, as deep as the ways that were found there: a first step that comes late."""
    found = model.search(Machine(kind, same=2, other=0), states=4_500)
    assert found.broken is None, found.broken


@pytest.mark.parametrize("kind", model_flows.RESUMED, ids=lambda kind: kind.name)
def test_upkeep_that_goes_on_beside_a_client_breaks_nothing(kind: model_flows.Kind) -> None:
    found = model.search(Machine(kind, same=2, other=0), states=8_000)
    assert found.broken is None, found.broken


def test_upkeep_that_forgets_the_steps_is_seen() -> None:
    def forgetful(found: Any) -> Steps:
        steps = Steps()
        steps.loaded = True
        return steps

    with patch.object(Steps, "remembering", forgetful):
        found = model.search(Machine(KINDS["phased, unrepeatable, resumed"], same=2, other=0), states=SEARCHED)
    assert found.broken is not None
    assert found.broken[0] == "I1"


def test_a_small_world_to_its_end() -> None:
    found = model.search(Machine(KINDS["transactional"], same=2, other=0), states=10**9)
    assert (found.broken, found.exhausted) == (None, True)
    assert found.states > 10_000


@pytest.mark.faults
def test_broken_promise_is_reported(tmp_path: Path) -> None:
    every = frozenset(Effects)
    with patch.multiple("oncekey.upkeep.sweeper", MAY_RERUN=every), everything_may_rerun():
        told = Run("-", 6_000, 1, tmp_path)
        model.run(told)
    assert told.hits >= told.count
    assert told.violations
    assert all(line.startswith("I1") for line in told.violations)
