"""Begin, by hand: the flow is sent what a store could say, and asked what it makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from oncekey.core.decision import Busy, Deferred, Execute, Mismatch, Replay, Unknown
from oncekey.core.policy import Policy
from oncekey.core.record import Found, StoredResponse
from oncekey.core.states import Effects, Event, State
from oncekey.core.swaps import Swap
from oncekey.engine import engine as engine_module
from oncekey.engine.breaker import FAILURES_TO_OPEN
from oncekey.engine.engine import CLAIM_TRIES, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, Engine
from oncekey.engine.flows import Pause
from oncekey.errors import SchemaError, StoreError, StoreOverloaded, StoreUnavailable
from oncekey.telemetry import events
from tests.engine.doubles import RESPONSE, Clock, FakeStore, Heard, listening, play, record_of, reservation

WANTED = reservation(owner="mine")
RIVAL = reservation(owner="rival")
EXTERNAL = reservation(owner="rival", effects=Effects.EXTERNAL)
PHASED = reservation(owner="rival", effects=Effects.PHASED)
POLICY = Policy()


class Flows:
    def __init__(self) -> None:
        self.engine, self.heard = listening(FakeStore())

    def begin(self, *answers: Any, policy: Policy = POLICY) -> Any:
        return play(self.engine.begin(WANTED, policy), *answers)


@pytest.fixture
def flows() -> Flows:
    return Flows()


def about(heard: Heard) -> set[tuple[str, str, int]]:
    return {(event.scope, event.operation, event.attempt) for event in heard.of(events.KeyEvent)}


# ---------------------------------------------------------------- what is found at once


def test_a_reservation_of_its_own_is_executed(flows: Flows) -> None:
    """One question, and the record carries our token: run the handler."""
    record = record_of(WANTED)
    played = flows.begin(Found(record))
    assert played.asked == [WANTED]
    assert played.result == Execute(record)
    assert flows.heard.kinds() == ["Reserved"]
    assert about(flows.heard) == {("tenant-1", "POST /payments", 1)}


@pytest.mark.parametrize(
    ("state", "response", "status"),
    [
        (State.COMPLETED, RESPONSE, 201),
        (State.FAILED, StoredResponse(422, (), b""), 422),
        (State.COMPLETED, None, 0),
    ],
)
def test_final_key_is_replayed(flows: Flows, state: State, response: StoredResponse | None, status: int) -> None:
    """A stored answer is given again, and the event says with which status."""
    record = record_of(RIVAL, state, response=response)
    assert flows.begin(Found(record)).result == Replay(record)
    assert flows.heard.kinds() == ["Replayed"]
    assert flows.heard.of(events.Replayed)[0].status == status


@pytest.mark.parametrize(
    ("record", "decision", "kind"),
    [
        (record_of(RIVAL), Busy, "FoundInFlight"),
        (record_of(RIVAL, State.PENDING), Deferred, "FoundInFlight"),
        (record_of(RIVAL, State.UNKNOWN), Unknown, "FoundUnknown"),
        (record_of(reservation(owner="rival", fingerprint=b"g" * 32)), Mismatch, "Misused"),
    ],
)
def test_key_of_another_owner_is_decided_without_a_claim(flows: Flows, record: Any, decision: Any, kind: str) -> None:
    """In flight, deferred, unknown or another request: one question, one answer, one event, no claim."""
    played = flows.begin(Found(record))
    assert played.asked == [WANTED]
    assert played.result == decision(record)
    assert flows.heard.kinds() == [kind]


def test_a_store_that_saw_nothing_at_all_is_busy(flows: Flows) -> None:
    """Neither a row nor a free place: 409, never "first request" (hazard 6); there is no key to report on."""
    played = flows.begin(Found(None))
    assert played.result == Busy(None)
    assert flows.heard == []


# ---------------------------------------------------------------- claims


def test_a_retryable_key_is_claimed(flows: Flows) -> None:
    """The claim compares what was seen, sets our token, and the event says which attempt this is."""
    seen = record_of(RIVAL, State.FAILED_RETRYABLE, attempt=4)
    moved = record_of(WANTED, attempt=5)
    played = flows.begin(Found(seen), moved)
    claim = played.asked[1]
    assert isinstance(claim, Swap)
    assert (claim.event, claim.from_state, claim.owner) == (Event.RETRY, State.FAILED_RETRYABLE, "rival")
    assert (claim.new_owner, claim.attempt, claim.lease_over_by) == ("mine", 5, None)
    assert played.result == Execute(moved)
    assert flows.heard.kinds() == ["Retried"]
    assert about(flows.heard) == {("tenant-1", "POST /payments", 5)}


def test_a_lapsed_lease_is_taken_over_where_a_second_run_is_harmless(flows: Flows) -> None:
    """The claim makes the store compare the lease on its own clock."""
    seen = record_of(RIVAL, lease_until=999.0)
    moved = record_of(WANTED, attempt=2)
    played = flows.begin(Found(seen), moved)
    assert (played.asked[1].event, played.asked[1].lease_over_by) == (Event.TAKE_OVER, 0.0)
    assert played.result == Execute(moved)
    assert flows.heard.kinds() == ["ZombieFound", "TakenOver"]


def test_lapsed_lease_of_a_phased_key_is_released_first_where_the_route_is_phased_no_more(flows: Flows) -> None:
    """The release is reported as the sweeper reports it. The next look claims the key."""
    seen = record_of(PHASED, lease_until=999.0)
    released = record_of(PHASED, State.FAILED_RETRYABLE)
    moved = record_of(WANTED, attempt=2)
    played = flows.begin(Found(seen), released, Found(released), moved)
    assert [each.event for each in played.asked[1::2]] == [Event.RELEASE, Event.RETRY]
    assert played.result == Execute(moved)
    assert flows.heard.kinds() == ["ZombieFound", "Released", "Retried"]


def test_lapsed_lease_with_external_effects_becomes_unknown(flows: Flows) -> None:
    """External effects: the key becomes unknown, is on the reconciler's list, and no handler runs (hazard 2)."""
    seen = record_of(EXTERNAL, lease_until=999.0)
    moved = record_of(EXTERNAL, State.UNKNOWN)
    played = flows.begin(Found(seen), moved)
    claim = played.asked[1]
    assert (claim.event, claim.to_state, claim.new_owner) == (Event.DOUBT, State.UNKNOWN, None)
    assert (claim.lease_over_by, claim.reconcile_in, claim.last_error) == (0.0, 0.0, "the lease ran out")
    assert played.result == Unknown(moved)
    assert flows.heard.kinds() == ["ZombieFound", "ReconcileScheduled", "FoundUnknown"]


def test_an_expired_key_starts_over(flows: Flows) -> None:
    """Past its retention the row is restarted as attempt 1 of a new request."""
    seen = record_of(RIVAL, State.COMPLETED, expires_at=999.0, response=RESPONSE, attempt=3)
    moved = record_of(WANTED)
    played = flows.begin(Found(seen), moved)
    assert (played.asked[1].event, played.asked[1].restart, played.asked[1].attempt) == (Event.RESERVE, WANTED, 1)
    assert played.asked[1].past_expiry
    assert played.result == Execute(moved)
    assert flows.heard.kinds() == ["Reserved"]


def test_a_lost_claim_looks_again(flows: Flows) -> None:
    """Another request was faster: this one gets what that one made of the key."""
    seen = record_of(RIVAL, State.FAILED_RETRYABLE)
    done = record_of(RIVAL, State.COMPLETED, response=RESPONSE)
    played = flows.begin(Found(seen), None, Found(done))
    assert [type(step).__name__ for step in played.asked] == ["Reservation", "Swap", "Reservation"]
    assert played.result == Replay(done)
    assert flows.heard.kinds() == ["Replayed"]


def test_a_claim_whose_answer_was_lost_is_recognised(flows: Flows) -> None:
    """The claim happened and its answer did not arrive: the next look finds our own token (hazard 8)."""
    seen = record_of(RIVAL, State.FAILED_RETRYABLE)
    mine = record_of(WANTED, attempt=2)
    assert flows.begin(Found(seen), None, Found(mine)).result == Execute(mine)


def test_a_key_that_keeps_changing_is_busy_in_the_end(flows: Flows) -> None:
    """After so many lost claims the answer is 409: bounded, and never "proceed"."""
    seen = record_of(RIVAL, State.FAILED_RETRYABLE)
    played = flows.begin(*[Found(seen), None] * CLAIM_TRIES)
    assert played.ended
    assert played.result == Busy(seen)
    assert sum(isinstance(step, Swap) for step in played.asked) == CLAIM_TRIES
    assert flows.heard.kinds() == ["FoundInFlight"]


def test_flow_without_a_listener_builds_no_quiet_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a listener the same decisions fall, and the quiet events are not built."""
    engine = Engine(FakeStore())
    emitted: list[str] = []
    monkeypatch.setattr(type(engine.emitter), "wants", lambda self, kind: False)
    monkeypatch.setattr(type(engine.emitter), "emit", lambda self, event: emitted.append(type(event).__name__))
    done = record_of(RIVAL, State.COMPLETED, response=RESPONSE)
    cases = [record_of(WANTED), done, record_of(RIVAL), record_of(RIVAL, State.PENDING)]
    kinds = [type(play(engine.begin(WANTED, POLICY), Found(record)).result) for record in cases]
    assert kinds == [Execute, Replay, Busy, Deferred]
    expired = record_of(RIVAL, State.EXPIRED)
    assert play(engine.begin(WANTED, POLICY), Found(expired), record_of(WANTED)).result == Execute(record_of(WANTED))
    assert emitted == []


# ---------------------------------------------------------------- waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The engine's clock stands still, and its dice show the middle."""
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr("oncekey.engine.engine.random.uniform", lambda low, high: (low + high) / 2)
    return clock  # type: ignore[return-value]


WAITING = Policy(in_flight="wait", wait=timedelta(seconds=10))


def test_a_duplicate_waits_in_growing_steps(flows: Flows, clock: Clock) -> None:
    """It looks again soon, then later and later up to the longest step, and for its own key."""
    busy = Found(record_of(RIVAL))
    played = flows.begin(*[busy, None] * 7, policy=WAITING)
    pauses = [step for step in played.asked if isinstance(step, Pause)]
    assert {pause.at for pause in pauses} == {("tenant-1", "key-1")}
    assert [pause.seconds for pause in pauses] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert (pauses[0].seconds, pauses[-1].seconds) == (FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
    assert flows.heard == []


def test_waiters_do_not_look_in_step(flows: Flows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is jittered by up to 30 %."""
    busy = Found(record_of(RIVAL))
    steps = {flows.begin(busy, policy=WAITING).asked[1].seconds for _ in range(20)}
    assert len(steps) > 1
    assert all(0.7 * FIRST_WAIT_SECONDS <= step <= 1.3 * FIRST_WAIT_SECONDS for step in steps)


def test_a_duplicate_that_waited_gets_the_answer(flows: Flows, clock: Clock) -> None:
    """Once the first request is done, the waiter replays what it stored."""
    done = record_of(RIVAL, State.COMPLETED, response=RESPONSE)
    played = flows.begin(Found(record_of(RIVAL)), None, Found(done), policy=WAITING)
    assert played.result == Replay(done)
    assert flows.heard.kinds() == ["Replayed"]


def test_a_waiter_whose_key_was_discarded_begins(flows: Flows, clock: Clock) -> None:
    """The first request was refused before it began: the waiter's own reservation stands now."""
    mine = record_of(WANTED)
    played = flows.begin(Found(record_of(RIVAL)), None, Found(mine), policy=WAITING)
    assert played.result == Execute(mine)


def test_waiter_gets_busy_when_its_time_is_over(flows: Flows, clock: Clock) -> None:
    """When the time is over the waiter gets its 409, and the event says how long it waited."""
    busy = record_of(RIVAL)
    flow = flows.engine.begin(WANTED, WAITING)
    next(flow)
    clock.now += 9.98
    pause = flow.send(Found(busy))
    assert isinstance(pause, Pause)
    assert pause.at == ("tenant-1", "key-1")
    assert pause.seconds == pytest.approx(0.02)
    clock.now += 0.02
    assert flow.send(None) == WANTED
    with pytest.raises(StopIteration) as ended:
        flow.send(Found(busy))
    assert ended.value.value == Busy(busy)
    assert flows.heard.kinds() == ["FoundInFlight", "WaitedOut"]
    assert flows.heard.of(events.WaitedOut)[0].seconds == 10.0


@pytest.mark.parametrize("policy", [POLICY, WAITING])
def test_duplicate_of_an_overdue_lease_gets_the_remaining_seconds(flows: Flows, clock: Clock, policy: Policy) -> None:
    """Also when it has waited."""
    busy = record_of(RIVAL, lease_until=1_029.0, created_at=969.0)
    flow = flows.engine.begin(WANTED, policy)
    next(flow)
    clock.now += 10.0
    with pytest.raises(StopIteration) as ended:
        flow.send(Found(busy))
    assert ended.value.value == Busy(busy, 29.0)


def test_waiter_claims_a_released_key(flows: Flows, clock: Clock) -> None:
    """Waiting restores the claims: a waiter that lost three of them may claim again after its pause."""
    seen = record_of(RIVAL, State.FAILED_RETRYABLE)
    mine = record_of(WANTED, attempt=2)
    lost = [Found(seen), None] * CLAIM_TRIES
    played = flows.begin(*lost, None, *lost, None, Found(seen), mine, policy=WAITING)
    assert sum(isinstance(step, Pause) for step in played.asked) == 2
    assert played.result == Execute(mine)


def test_a_waiter_waits_when_the_store_saw_nothing(flows: Flows, clock: Clock) -> None:
    """Busy without a record is waited out like any other."""
    played = flows.begin(Found(None), None, Found(record_of(WANTED)), policy=WAITING)
    assert played.result == Execute(record_of(WANTED))


# ---------------------------------------------------------------- a store that fails


def test_a_store_that_fails_opens_the_breaker(flows: Flows) -> None:
    """Five requests fail; the sixth is refused without a question; the alarm is given once, with the cause."""
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(StoreUnavailable, match="down"):
            flows.begin(StoreUnavailable("down"))
    flow = flows.engine.begin(WANTED, POLICY)
    with pytest.raises(StoreUnavailable, match="failed repeatedly"):
        next(flow)
    assert flows.heard.kinds() == [*["StoreFailed"] * FAILURES_TO_OPEN, "BreakerOpened"], "not for the sixth"
    assert flows.heard.of(events.BreakerOpened)[0].error == "StoreUnavailable: down"
    assert sum(event.amount for event in flows.heard.of(events.StoreFailed)) == FAILURES_TO_OPEN


def test_wrong_tables_open_the_breaker_too(flows: Flows) -> None:
    """No request can be served without tables: the error is raised as it came, and counted."""
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(SchemaError):
            flows.begin(SchemaError("run `oncekey migrate`"))
    assert not flows.engine.breaker.allows()


def test_a_row_that_the_store_refuses_does_not_open_the_breaker(flows: Flows) -> None:
    """One client's bad rows say nothing about the store: no other client may be refused because of them (I6)."""
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(StoreError):
            flows.begin(StoreError("refused a statement: SQLSTATE 22021"))
    assert flows.engine.breaker.allows()


def test_an_answer_closes_the_breaker(flows: Flows) -> None:
    """One request that gets through is the end of the alarm, whatever it was answered."""
    clock = Clock()
    flows.engine.breaker._clock = clock
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(StoreUnavailable):
            flows.begin(StoreUnavailable("down"))
    clock.now += 1.0
    assert flows.begin(Found(record_of(RIVAL))).result == Busy(record_of(RIVAL))
    assert flows.heard.kinds()[FAILURES_TO_OPEN:] == ["BreakerOpened", "FoundInFlight", "BreakerClosed"]
    assert flows.engine.breaker.allows()


def test_a_failure_in_the_claim_counts_too(flows: Flows) -> None:
    """The store may fail at the second question as well: the error is raised, and nothing runs (I7)."""
    seen = Found(record_of(RIVAL, State.FAILED_RETRYABLE))
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(StoreUnavailable):
            flows.begin(seen, StoreUnavailable("down"))
    assert flows.heard.kinds() == [*["StoreFailed"] * FAILURES_TO_OPEN, "BreakerOpened"]


def test_a_full_queue_does_not_open_the_breaker(flows: Flows) -> None:
    """The store is well, there are only too many of us: reported, refused, and the next one may ask."""
    for _ in range(FAILURES_TO_OPEN + 1):
        with pytest.raises(StoreOverloaded):
            flows.begin(StoreOverloaded("3 are waiting"))
    assert set(flows.heard.kinds()) == {"QueueFull"}
    assert flows.engine.breaker.allows()
