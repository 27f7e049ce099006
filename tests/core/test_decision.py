"""What a request gets for every row there can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from oncekey.core.decision import (
    LEASE_RAN_OUT,
    Busy,
    Claim,
    Decision,
    Deferred,
    Execute,
    Mismatch,
    Replay,
    Unknown,
    Unreadable,
    decide,
)
from oncekey.core.record import Record, Reservation
from oncekey.core.states import STARTS, Actor, Condition, Effects, Event, State, find
from oncekey.core.swaps import swap

NOW = 5000.0
WANTED = Reservation("acme", "key-1", "POST /payments", b"same" * 8, 1, Effects.EXTERNAL, "mine", 60.0, 86400.0)


def make_record(
    state: State = State.IN_PROGRESS,
    *,
    lease_over: bool = False,
    past_expiry: bool = False,
    same_fingerprint: bool = True,
    same_version: bool = True,
    effects: Effects = Effects.EXTERNAL,
    steps: bool = False,
    mine: bool = False,
) -> Record:
    """A row with exactly these properties, as seen at NOW on the store's clock."""
    return Record(
        scope="acme",
        key="key-1",
        operation="POST /payments",
        fingerprint=(b"same" if same_fingerprint else b"diff") * 8,
        fingerprint_version=1 if same_version else 9,
        effects=effects,
        state=state,
        attempt=1,
        owner="mine" if mine else "theirs",
        lease_until=NOW - 1 if lease_over else NOW + 30,
        recovery_point="ride_created" if steps else None,
        response=None,
        last_error=None,
        reconcile_at=None,
        reconcile_tries=0,
        created_at=NOW - 100,
        finished_at=None,
        retention_seconds=86400.0,
        expires_at=NOW - 1 if past_expiry else NOW + 86400,
        now=NOW,
    )


def every_row() -> Iterator[tuple[dict[str, Any], Record]]:
    """The whole product: 7 states, 4 effects, and 6 yes-or-no properties."""
    flags = ("lease_over", "past_expiry", "same_fingerprint", "same_version", "steps", "mine")
    for state, effects, *values in product(State, Effects, *([(False, True)] * len(flags))):
        row: dict[str, Any] = {"state": state, "effects": effects, **dict(zip(flags, values, strict=True))}
        yield row, make_record(**row)


ROWS = [(row, record, decide(record, WANTED)) for row, record in every_row()]


def free(row: dict[str, Any]) -> bool:
    """Whether the key has had its time: final, or retryable with nothing half done, past expiry."""
    if row["state"] is State.EXPIRED:
        return True
    over = row["state"] in (State.COMPLETED, State.FAILED)
    over = over or (row["state"] is State.FAILED_RETRYABLE and not row["steps"])
    return bool(over and row["past_expiry"])


def own(row: dict[str, Any]) -> bool:
    """Whether this very request holds the lease."""
    return bool(row["mine"] and row["state"] is State.IN_PROGRESS)


def test_every_row_of_the_product_gets_one_decision() -> None:
    """All 1,792 rows are there, and each gets one of the seven decisions about itself."""
    assert len(ROWS) == 7 * 4 * 2**6
    for _, record, decision in ROWS:
        assert isinstance(decision, Decision)
        assert decision.record is record


def test_only_the_owner_executes() -> None:
    """The handler runs for the request whose token is in the row in progress, and for no other."""
    for row, _, decision in ROWS:
        assert isinstance(decision, Execute) == own(row), row


def test_a_row_that_could_not_be_read_is_busy() -> None:
    """Neither a row nor a free place: the request may not go on."""
    assert decide(None, WANTED) == Busy(None)


def test_a_key_past_its_time_starts_over() -> None:
    """Whatever its fingerprint, an expired key is reserved anew; and no other key ever is."""
    for row, record, decision in ROWS:
        assert (decision == Claim(record, Event.RESERVE)) == free(row), row


def test_fingerprint_that_cannot_be_compared_is_unreadable() -> None:
    """A row hashed by a newer version is neither replayed, refused nor run: it may be another request's."""
    for row, record, decision in ROWS:
        if not (own(row) or free(row) or row["same_version"]):
            assert decision == Unreadable(record), row


def test_a_mismatch_wins_over_every_state() -> None:
    """A different request learns so even while the first is in flight, unknown or deferred (I5)."""
    for row, _, decision in ROWS:
        expected = not (own(row) or free(row) or row["same_fingerprint"]) and row["same_version"]
        assert isinstance(decision, Mismatch) == expected, row


def test_an_unknown_outcome_is_never_claimed() -> None:
    """No retry of any kind moves an unknown key: it gets Unknown, or the mismatch it is."""
    for row, _, decision in ROWS:
        if row["state"] is State.UNKNOWN:
            assert isinstance(decision, Unknown | Mismatch | Unreadable), row
            if row["same_fingerprint"] and row["same_version"]:
                assert isinstance(decision, Unknown), row


def test_same_request_gets_the_decision_of_its_state() -> None:
    """The seven states as a literal table, for the same request before expiry."""
    expected: dict[State, type] = {
        State.COMPLETED: Replay,
        State.FAILED: Replay,
        State.PENDING: Deferred,
        State.UNKNOWN: Unknown,
        State.FAILED_RETRYABLE: Claim,
        State.EXPIRED: Claim,
    }
    for row, _, decision in ROWS:
        if row["same_fingerprint"] and row["same_version"] and not row["past_expiry"] and row["state"] in expected:
            assert isinstance(decision, expected[row["state"]]), row


def test_a_running_lease_is_busy() -> None:
    """While another owner holds the lease, the same request neither claims nor runs."""
    for row, record, decision in ROWS:
        if row["state"] is State.IN_PROGRESS and not row["lease_over"] and not row["mine"]:
            same = row["same_fingerprint"] and row["same_version"]
            assert not isinstance(decision, Claim), row
            assert not same or decision == Busy(record), row


@pytest.mark.parametrize(
    ("effects", "event"),
    [
        (Effects.EXTERNAL, Event.DOUBT),
        (Effects.TRANSACTIONAL, Event.TAKE_OVER),
        (Effects.PHASED, Event.TAKE_OVER),
        (Effects.REPEATABLE, Event.TAKE_OVER),
    ],
)
def test_lapsed_lease_becomes_unknown_or_is_taken_over_by_effects(effects: Effects, event: Event) -> None:
    """A lapsed lease is doubted where it may have charged, else taken over."""
    for steps, past_expiry in product((False, True), repeat=2):
        record = make_record(lease_over=True, effects=effects, steps=steps, past_expiry=past_expiry)
        reason = LEASE_RAN_OUT if event is Event.DOUBT else None
        assert decide(record, replace(WANTED, effects=Effects.PHASED if steps else effects)) == Claim(
            record, event, reason
        )


def test_the_rows_effects_decide_and_not_the_requests() -> None:
    """A deploy that declares the route anew changes nothing for a row that is already there."""
    record = make_record(lease_over=True, effects=Effects.EXTERNAL)
    wanted = Reservation("acme", "key-1", "POST /payments", b"same" * 8, 1, Effects.REPEATABLE, "mine", 60.0, 1.0)
    assert decide(record, wanted) == Claim(record, Event.DOUBT, LEASE_RAN_OUT)


RUNS_AGAIN = {
    # what the row was reserved under, and what the route is declared now: the attempts that may run
    (Effects.EXTERNAL, effects) for effects in Effects
} | {
    (Effects.TRANSACTIONAL, effects) for effects in Effects
} | {(Effects.PHASED, effects) for effects in Effects} | {(Effects.REPEATABLE, Effects.REPEATABLE)}  # fmt: skip


@pytest.mark.parametrize("now", Effects)
@pytest.mark.parametrize("before", Effects)
def test_retryable_key_runs_under_other_effects_only_if_nothing_can_happen_twice(before: Effects, now: Effects) -> None:
    """Rolled back, proven not executed, or phased without a step: it runs. Repeatable runs as repeatable only, and a
    row with steps as phased only: else the key becomes unknown, and the reason says what to do."""
    for state, steps in product((State.FAILED_RETRYABLE, State.IN_PROGRESS), (False, True)):
        if state is State.IN_PROGRESS and before is Effects.EXTERNAL:
            continue  # test_lapsed_lease_becomes_unknown_or_is_taken_over_by_effects
        record = make_record(state, lease_over=True, effects=before, steps=steps)
        decision = decide(record, replace(WANTED, effects=now))
        runs = now is Effects.PHASED if steps else (before, now) in RUNS_AGAIN
        assert isinstance(decision, Claim)
        if runs:
            released = before is Effects.PHASED is not now  # first: its owner may be late, and write a first step
            taken = Claim(record, Event.RELEASE, LEASE_RAN_OUT) if released else Claim(record, Event.TAKE_OVER)
            assert decision == (Claim(record, Event.RETRY) if state is State.FAILED_RETRYABLE else taken)
        else:
            assert decision.event is Event.DOUBT
            assert decision.reason is not None
            assert f"effects='{now}' now" in decision.reason
            assert "oncekey keys resolve" in decision.reason


def test_a_retryable_key_with_steps_is_resumed_also_after_expiry() -> None:
    """What is half done is never begun anew by time."""
    record = make_record(State.FAILED_RETRYABLE, steps=True, past_expiry=True)
    assert decide(record, replace(WANTED, effects=Effects.PHASED)) == Claim(record, Event.RETRY)


def test_every_claim_is_a_move_that_exists_and_whose_conditions_hold() -> None:
    """Decision and state table agree: each claim can be built as a swap, and time allows it as seen."""
    claims = 0
    for row, record, decision in ROWS:
        if isinstance(decision, Claim):
            claims += 1
            wanted = WANTED if decision.event in STARTS else None
            swap(record, decision.event, Actor.REQUEST, reservation=wanted)
            when = find(record.state, decision.event, Actor.REQUEST).when
            assert Condition.LEASE_OVER not in when or row["lease_over"], row
            assert Condition.PAST_EXPIRY not in when or row["past_expiry"], row
    assert claims > 0


@pytest.mark.parametrize("state", [State.IN_PROGRESS, State.COMPLETED])
def test_the_last_instant_is_over(state: State) -> None:
    """A lease or a retention that ends exactly now has ended: stores compare the same way."""
    record = make_record(state, effects=Effects.REPEATABLE)
    ends_now = replace(record, lease_until=NOW, expires_at=NOW)
    assert ends_now.lease_over
    assert ends_now.past_expiry
    assert isinstance(decide(ends_now, WANTED), Claim)
