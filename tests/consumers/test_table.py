"""The table of what a broker is told, and the way from the end of an attempt to a row of it: both exhaustively."""

from __future__ import annotations

from itertools import product

import pytest

from oncekey.consumers.message import ended
from oncekey.consumers.table import LONG_SECONDS, TABLE, Action, OnUnknown, Situation, delay_seconds, outcome
from oncekey.core.judgment import Move
from oncekey.core.record import Record
from oncekey.core.states import Effects, Event, State
from oncekey.engine.flows import Finished

ACK, RETRY, PARK, DEAD = Action

EXPECTED = {
    # situation: (unknown="park", unknown="keep")
    "handled": (ACK, ACK),
    "duplicate": (ACK, ACK),
    "deferred": (ACK, ACK),
    "failed": (RETRY, RETRY),
    "not_stored": (RETRY, RETRY),
    "in_flight": (RETRY, RETRY),
    "no_store": (RETRY, RETRY),
    "not_comparable": (RETRY, RETRY),
    "unknown": (PARK, RETRY),
    "refused": (DEAD, DEAD),
    "exhausted": (DEAD, DEAD),
    "given_up": (DEAD, DEAD),
    "other_body": (DEAD, DEAD),
    "answer_lost": (DEAD, DEAD),
    "bad_id": (DEAD, DEAD),
    "too_large": (DEAD, DEAD),
}


def test_every_situation_has_the_expected_action() -> None:
    assert {str(situation): (row.park, row.keep) for situation, row in TABLE.items()} == EXPECTED
    assert set(TABLE) == set(Situation)


@pytest.mark.parametrize("situation", Situation)
@pytest.mark.parametrize("unknown", ["park", "keep"])
def test_outcome_has_a_delay_exactly_if_the_message_is_delivered_again(
    situation: Situation, unknown: OnUnknown
) -> None:
    said = outcome(situation, unknown)
    assert (said.delay > 0) == (said.action is RETRY)
    assert said.reason == TABLE[situation].reason
    assert outcome(situation, unknown, detail="more").reason == "more"


def test_delay_grows_with_attempts_up_to_a_limit() -> None:
    assert [delay_seconds("growing", attempt) for attempt in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert delay_seconds("growing", 1_000_000) == LONG_SECONDS
    assert [delay_seconds("short", attempt, 0.5) for attempt in (1, 9)] == [0.5, 0.5]
    assert (delay_seconds("long", 1), delay_seconds("none", 1)) == (LONG_SECONDS, 0.0)


def record(state: State) -> Record:
    of_the_key = ("single-tenant", "k", "message q", b"", 2, Effects.EXTERNAL)
    return Record(*of_the_key, state, 1, "owner", 0.0, None, None, None, None, 0, 0.0, None, 1.0, 1.0, 0.0)


OWNERS_EVENTS = {
    Event.COMPLETE: Situation.HANDLED,
    Event.DEFER: Situation.DEFERRED,
    Event.FAIL: Situation.GIVEN_UP,
    Event.DISCARD: Situation.REFUSED,
    Event.RELEASE: Situation.FAILED,
    Event.DOUBT: Situation.UNKNOWN,
}
STATES = {
    State.COMPLETED: Situation.DUPLICATE,
    State.FAILED: Situation.GIVEN_UP,
    State.PENDING: Situation.DEFERRED,
    State.UNKNOWN: Situation.UNKNOWN,
    State.IN_PROGRESS: Situation.IN_FLIGHT,
    State.FAILED_RETRYABLE: Situation.IN_FLIGHT,
    State.EXPIRED: Situation.IN_FLIGHT,
}


@pytest.mark.parametrize(("event", "refused"), list(product(OWNERS_EVENTS, (True, False))))
def test_end_of_an_attempt_is_one_situation(event: Event, refused: bool) -> None:
    move = Move(event, None, None)
    stored = OWNERS_EVENTS[event]
    if event is Event.RELEASE and refused:  # on a later attempt, a refusal gives the key back and keeps its history
        stored = Situation.REFUSED
    assert ended(move, Finished(True, None), refused=refused) is stored
    assert ended(move, None, refused=refused) is Situation.NOT_STORED
    assert ended(None, None, refused=refused) is Situation.NOT_STORED
    assert ended(move, Finished(False, None, undone=True), refused=refused) is Situation.FAILED
    assert ended(move, Finished(False, None), refused=refused) is Situation.IN_FLIGHT
    for state in State:  # another attempt has the key, or had it
        assert ended(move, Finished(False, record(state)), refused=refused) is STATES[state]


def test_no_situation_acknowledges_a_message_whose_outcome_is_not_stored() -> None:
    acknowledged = {situation for situation, row in TABLE.items() if ACK in (row.park, row.keep)}
    assert acknowledged == {Situation.HANDLED, Situation.DUPLICATE, Situation.DEFERRED}
