"""Finish, by hand: what an owner's move becomes of a row that is its own, held, lost, or moved already."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from oncekey.core.record import StoredResponse
from oncekey.core.states import Effects, Event, State
from oncekey.core.swaps import Swap
from oncekey.engine.engine import EFFECT_BEGUN_LATE, FINISH_TRIES, Engine
from oncekey.engine.flows import Finished, Pause
from oncekey.engine.transactions import outcome
from oncekey.engine.transactions.stages import Stage
from oncekey.errors import StoreUnavailable
from oncekey.telemetry import events
from tests.engine.doubles import RESPONSE, FakeStore, listening, operation_of, play, record_of, reservation

MINE = reservation(owner="mine")
RECORD = record_of(MINE)
RIVAL = record_of(reservation(owner="rival"))
COMPLETED = record_of(MINE, State.COMPLETED, response=RESPONSE)
AT = ("tenant-1", "key-1")


class Flows:
    def __init__(self) -> None:
        self.engine, self.heard = listening(FakeStore())
        self.operation = operation_of(RECORD)

    def finish(
        self,
        event: Event,
        *answers: Any,
        response: StoredResponse | None = None,
        reason: str | None = None,
    ) -> Any:
        return play(self.engine.finish(self.operation, event, response, reason), *answers)

    def complete(self, *answers: Any) -> Any:
        return self.finish(Event.COMPLETE, *answers, response=RESPONSE)


@pytest.fixture
def flows() -> Flows:
    return Flows()


# ---------------------------------------------------------------- stored


def test_a_completion_is_one_question(flows: Flows) -> None:
    """The swap compares state and owner, carries the response, and what it returns is the end."""
    played = flows.complete(COMPLETED)
    (change,) = played.asked
    assert isinstance(change, Swap)
    assert (change.from_state, change.owner, change.to_state) == (State.IN_PROGRESS, "mine", State.COMPLETED)
    assert change.response == RESPONSE
    assert played.result == Finished(True, COMPLETED)
    assert flows.heard.kinds() == ["Completed"]
    assert flows.heard.of(events.Completed)[0].status == 201


@pytest.mark.parametrize(
    ("event", "to_state", "response", "kinds"),
    [
        (Event.FAIL, State.FAILED, StoredResponse(422, (), b""), ["Failed"]),
        (Event.RELEASE, State.FAILED_RETRYABLE, None, ["Released"]),
        (Event.DOUBT, State.UNKNOWN, None, ["Doubted", "ReconcileScheduled"]),
        (Event.DISCARD, None, None, ["Discarded"]),
        (Event.COMPLETE, State.COMPLETED, StoredResponse(200, (), None), ["Completed", "Tombstoned"]),
    ],
)
def test_every_move_is_made_and_reported(
    flows: Flows, event: Event, to_state: State | None, response: StoredResponse | None, kinds: list[str]
) -> None:
    """Each way for a handler to end: the right target, the reason in the row, the right events."""
    moved = record_of(MINE, to_state or State.IN_PROGRESS, response=response)
    played = flows.finish(event, moved, response=response, reason="because")
    assert (played.asked[0].to_state, played.asked[0].last_error) == (to_state, "because")
    assert played.result == Finished(True, moved)
    assert flows.heard.kinds() == kinds
    if hasattr(flows.heard[-1], "reason"):
        assert flows.heard[-1].reason == "because"
    if event is Event.DOUBT:
        assert played.asked[0].reconcile_in == 0.0


def test_a_tombstone_without_a_reason_has_one(flows: Flows) -> None:
    """The event of a response that was not kept always says something; so do a release and a doubt without one."""
    flows.finish(Event.COMPLETE, COMPLETED, response=StoredResponse(200, (), None))
    assert flows.heard.of(events.Tombstoned)[0].reason == "the response could not be kept"
    flows.finish(Event.RELEASE, record_of(MINE, State.FAILED_RETRYABLE))
    assert flows.heard.of(events.Released)[0].reason == ""


def test_flow_without_a_listener_builds_no_quiet_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a listener the moves are made, and the quiet events are not built."""
    engine = Engine(FakeStore())
    emitted: list[str] = []
    monkeypatch.setattr(type(engine.emitter), "wants", lambda self, kind: False)
    monkeypatch.setattr(type(engine.emitter), "emit", lambda self, event: emitted.append(type(event).__name__))
    operation = operation_of(RECORD)
    assert play(engine.finish(operation, Event.COMPLETE, RESPONSE), COMPLETED).result.stored
    assert play(engine.finish(operation, Event.DISCARD), RECORD).result.stored
    assert play(engine.finish(operation, Event.DEFER), record_of(MINE, State.PENDING)).result.stored
    assert emitted == []


# ---------------------------------------------------------------- not moved: what does the row say?


def test_a_completion_whose_answer_was_lost_is_recognised(flows: Flows) -> None:
    """The row is where we wanted it and still ours: stored, whatever the first answer was (hazard 9)."""
    played = flows.complete(None, COMPLETED)
    assert played.asked[1] == AT
    assert played.result == Finished(True, COMPLETED)
    assert flows.heard.kinds() == ["Completed"]


def test_a_discard_whose_answer_was_lost_is_recognised(flows: Flows) -> None:
    """We wanted the row gone, and it is gone."""
    played = flows.finish(Event.DISCARD, None, None)
    assert played.result == Finished(True, RECORD)
    assert flows.heard.kinds() == ["Discarded"]


def test_a_late_owner_of_an_unknown_key_completes_it(flows: Flows) -> None:
    """Given up for dead, and only late: the truth arrives after all, from the state that is there now."""
    unknown = record_of(MINE, State.UNKNOWN)
    played = flows.complete(None, unknown, COMPLETED)
    assert (played.asked[2].from_state, played.asked[2].owner) == (State.UNKNOWN, "mine")
    assert played.asked[2].to_state is State.COMPLETED
    assert played.result == Finished(True, COMPLETED)


def test_a_late_owner_of_an_unknown_key_may_fail_it(flows: Flows) -> None:
    """A final error is as true as a success."""
    unknown, failed = record_of(MINE, State.UNKNOWN), record_of(MINE, State.FAILED)
    played = flows.finish(Event.FAIL, None, unknown, failed, response=StoredResponse(400, (), b""))
    assert played.result == Finished(True, failed)


def test_doubt_counts_as_stored_if_the_sweeper_was_first(flows: Flows) -> None:
    """The sweeper made it unknown before us: that is what we wanted."""
    unknown = record_of(MINE, State.UNKNOWN)
    assert flows.finish(Event.DOUBT, None, unknown).result == Finished(True, unknown)


@pytest.mark.parametrize(
    ("event", "seen"),
    [
        (Event.COMPLETE, None),
        (Event.COMPLETE, RIVAL),
        (Event.COMPLETE, record_of(reservation(owner="rival"), State.COMPLETED, response=RESPONSE)),
        # The reconciler settled the key meanwhile, because the lease had run out: its response stands.
        (Event.COMPLETE, record_of(MINE, State.COMPLETED, response=StoredResponse(201, (), b"confirmed"))),
        (Event.COMPLETE, record_of(MINE, State.FAILED)),
        (Event.COMPLETE, record_of(MINE, State.FAILED_RETRYABLE)),
        (Event.RELEASE, record_of(MINE, State.UNKNOWN)),
        (Event.DISCARD, RIVAL),
        (Event.DISCARD, record_of(MINE, State.FAILED_RETRYABLE)),
    ],
)
def test_a_lost_lease_writes_nothing_more(flows: Flows, event: Event, seen: Any) -> None:
    """Another owner, another state, or no row: not stored, the operation knows it, and it is reported (I3)."""
    played = flows.finish(event, None, seen, response=RESPONSE if event is Event.COMPLETE else None)
    assert played.result == Finished(False, seen)
    assert len(played.asked) == 2
    assert flows.operation.lost
    assert flows.heard.kinds() == ["LeaseLost"]
    assert flows.heard.of(events.LeaseLost)[0].move == event


@pytest.mark.parametrize("body", [RESPONSE.body, b"confirmed"])
def test_a_commit_that_was_not_heard_of_is_ours_by_its_response(flows: Flows, body: bytes) -> None:
    """Enlisted: a key that is completed under our token may also have been settled by the reconciler, after the lease
    ran out. The response tells the two apart."""
    there = record_of(MINE, State.COMPLETED, response=replace(RESPONSE, body=body))
    operation: Any = flows.operation
    link = SimpleNamespace(free=lambda: None)
    operation.enlisted = SimpleNamespace(release=lambda: None, link=link, stage=Stage.COMMITTING)
    played = play(outcome.settle(flows.engine, operation, Event.COMPLETE, RESPONSE, None), there)
    assert played.result == Finished(body == RESPONSE.body, there)


# ---------------------------------------------------------------- a row that another transaction holds


def test_a_row_that_is_held_for_a_moment_is_tried_again(flows: Flows) -> None:
    """Still ours and in progress, so another transaction holds the row: a short pause, then the same move."""
    played = flows.complete(None, RECORD, None, COMPLETED)
    assert played.asked[2] == Pause(AT, 0.01)
    assert played.asked[3] == played.asked[0]
    assert played.result == Finished(True, COMPLETED)


def test_a_row_that_stays_held_is_an_outage(flows: Flows) -> None:
    """After its tries, with growing pauses, the owner gives up; the keeper will go on from there."""
    flow = flows.engine.finish(flows.operation, Event.COMPLETE, RESPONSE)
    pauses = []

    def drive() -> None:
        step = next(flow)
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
            step = flow.send(RECORD if step == AT else None)

    with pytest.raises(StoreUnavailable, match="held by another transaction"):
        drive()
    assert len(pauses) in (FINISH_TRIES - 1, FINISH_TRIES)
    assert pauses[:4] == pytest.approx([0.01, 0.04, 0.16, 0.64])
    assert not flows.operation.lost
    assert flows.heard == []


def test_a_store_that_fails_is_not_a_lost_lease(flows: Flows) -> None:
    """The error reaches the caller, which gives the outcome to the keeper. The breaker counts begins only."""
    for answers in ([StoreUnavailable("down")], [None, StoreUnavailable("down")]):
        for _ in range(5):
            with pytest.raises(StoreUnavailable, match="down"):
                flows.complete(*answers)
    assert not flows.operation.lost
    assert flows.engine.breaker.allows()


# ---------------------------------------------------------------- answered for while it runs


def test_release_is_refused_if_an_effect_began_after_the_judgment(flows: Flows) -> None:
    """The handler was answered for and still runs. Its effect may not be repeated, so the key becomes unknown."""
    flows.operation.judged_effects = Effects.PHASED
    begun = replace(RECORD, effects=Effects.EXTERNAL, recovery_point="started")
    doubted = replace(begun, state=State.UNKNOWN)
    played = flows.finish(Event.RELEASE, None, begun, doubted)
    release, _, doubt = played.asked
    assert (release.to_state, release.from_effects) == (State.FAILED_RETRYABLE, Effects.PHASED)
    assert (doubt.to_state, doubt.last_error) == (State.UNKNOWN, EFFECT_BEGUN_LATE)
    assert played.result == Finished(True, doubted)
    assert flows.heard.kinds() == ["Doubted", "ReconcileScheduled"]


def test_release_whose_row_is_only_held_is_tried_again(flows: Flows) -> None:
    """The effects are as they were judged."""
    flows.operation.judged_effects = RECORD.effects
    released = replace(RECORD, state=State.FAILED_RETRYABLE)
    played = flows.finish(Event.RELEASE, None, RECORD, None, released)
    assert [type(asked) for asked in played.asked] == [Swap, tuple, Pause, Swap]
    assert played.result == Finished(True, released)
