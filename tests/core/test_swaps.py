"""The moves that ``swap`` builds: what each compares, sets and refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oncekey.core.audit import Audit
from oncekey.core.states import FENCES, STARTS, TABLE, Actor, Effects, Event, State, find
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.core.swaps import RESUME_SECONDS, resume_in, swap, undo
from oncekey.errors import IllegalTransition
from tests.core.moves import build, fitting, make_record, make_reservation


@pytest.mark.parametrize("changes", [{"attempt": 2}, {"recovery_point": "ride_created"}])
def test_a_discard_needs_a_first_attempt_without_steps(changes: dict[str, Any]) -> None:
    """A record with a history is never erased as if it were unused."""
    with pytest.raises(IllegalTransition, match="discard"):
        build(make_record(**changes), Event.DISCARD, Actor.OWNER)
    assert build(make_record(), Event.DISCARD, Actor.OWNER).to_state is None


@pytest.mark.parametrize("effects", Effects)
def test_a_second_run_needs_effects_that_allow_it(effects: Effects) -> None:
    """Take-over and the sweeper's release are built for every declaration but external."""
    record = make_record(effects=effects)
    for event, actor in ((Event.TAKE_OVER, Actor.REQUEST), (Event.RELEASE, Actor.SWEEPER)):
        if effects is Effects.EXTERNAL:
            with pytest.raises(IllegalTransition, match="second run"):
                build(record, event, actor)
        else:
            assert build(record, event, actor).lease_over_by == 0.0
    assert build(record, Event.DOUBT, Actor.SWEEPER).lease_over_by == 0.0


@pytest.mark.parametrize(("event", "actor"), [(Event.EXPIRE, Actor.REAPER), (Event.RESERVE, Actor.REQUEST)])
def test_a_retryable_record_with_steps_never_starts_over(event: Event, actor: Actor) -> None:
    """What was half done is resumed or doubted, not expired and not begun anew."""
    half_done = make_record(state=State.FAILED_RETRYABLE, recovery_point="ride_created")
    targets = {"to_state": None} if event is Event.EXPIRE else {}
    with pytest.raises(IllegalTransition, match="no steps"):
        build(half_done, event, actor, **targets)
    assert build(half_done, Event.DOUBT, Actor.REAPER).to_state is State.UNKNOWN
    assert build(half_done, Event.RETRY, Actor.REQUEST).attempt == 2


def test_request_cannot_make_a_retryable_key_unknown_without_repeatable_effects() -> None:
    """Proven not executed, or rolled back: a request has no reason to make it unknown."""
    for effects in Effects:
        record = make_record(state=State.FAILED_RETRYABLE, effects=effects)
        if effects is Effects.REPEATABLE:
            assert build(record, Event.DOUBT, Actor.REQUEST).to_state is State.UNKNOWN
        else:
            with pytest.raises(IllegalTransition, match="repeatable effects"):
                build(record, Event.DOUBT, Actor.REQUEST)


def test_a_start_brings_a_new_owner_lease_and_attempt() -> None:
    """Retry and take-over count on and keep the row; a reservation after expiry starts over at 1."""
    retry = build(make_record(state=State.FAILED_RETRYABLE, attempt=3), Event.RETRY, Actor.REQUEST)
    assert (retry.new_owner, retry.attempt, retry.lease_seconds, retry.restart) == ("owner-2", 4, 60.0, None)
    taken = build(make_record(effects=Effects.PHASED, attempt=3), Event.TAKE_OVER, Actor.REQUEST)
    assert (taken.new_owner, taken.attempt, taken.restart) == ("owner-2", 4, None)
    anew = build(make_record(state=State.COMPLETED, attempt=3), Event.RESERVE, Actor.REQUEST)
    assert (anew.new_owner, anew.attempt, anew.restart) == ("owner-2", 1, make_reservation())
    assert anew.past_expiry


def test_a_reservation_comes_with_a_start_and_only_with_one() -> None:
    """A start without a new owner, or a finish with one, is a bug and is said so."""
    with pytest.raises(IllegalTransition, match="needs new reservation"):
        swap(make_record(state=State.FAILED_RETRYABLE), Event.RETRY, Actor.REQUEST)
    with pytest.raises(IllegalTransition, match="takes no new reservation"):
        swap(make_record(), Event.COMPLETE, Actor.OWNER, reservation=make_reservation())


def test_every_swap_compares_the_state_and_the_owner() -> None:
    """Whatever the move, the swap is fenced by what its mover saw, and keeps the owner unless it starts."""
    for move in TABLE:
        if move.source is None:
            continue
        record = fitting(move)
        for actor in move.by:
            made = build(record, move.event, actor, to_state=move.target, quarantine_seconds=300.0)
            assert (made.scope, made.key) == ("acme", "key-1")
            assert (made.from_state, made.owner) == (move.source, "owner-1")
            assert made.to_state is move.target
            assert (made.new_owner is None) == (move.event not in STARTS | FENCES)
            assert made.past_expiry == ("past expiry" in move.when)
            leases = {"lease over": 0.0, "lease over + quarantine": 300.0}
            assert made.lease_over_by == next((leases[when] for when in move.when if when in leases), None)


def test_an_unknown_outcome_is_always_on_the_reconcilers_list() -> None:
    """Every way into unknown says when to reconcile, at once unless told otherwise."""
    into = [move for move in TABLE if move.target is State.UNKNOWN and move.source not in (None, State.UNKNOWN)]
    assert len(into) == 6
    for move in into:
        record = fitting(move, Effects.EXTERNAL)
        actor = min(move.by)
        assert build(record, move.event, actor, to_state=State.UNKNOWN).reconcile_in == 0.0
        later = build(record, move.event, actor, to_state=State.UNKNOWN, reconcile_in=30.0)
        assert later.reconcile_in == 30.0
    assert build(make_record(), Event.COMPLETE, Actor.OWNER).reconcile_in is None


def test_a_postponed_outcome_counts_its_tries_until_it_is_a_dead_letter() -> None:
    """Asked again later, or, without a time, no more: then a human must look."""
    record = make_record(state=State.UNKNOWN, reconcile_at=1000.0, reconcile_tries=2)
    later = build(record, Event.POSTPONE, Actor.RECONCILER, reconcile_in=30.0, last_error="asked, no answer")
    assert (later.to_state, later.reconcile_in, later.reconcile_tries) == (State.UNKNOWN, 30.0, 3)
    dead = build(record, Event.POSTPONE, Actor.RECONCILER)
    assert (dead.reconcile_in, dead.reconcile_tries) == (None, 3)
    moved = dead.moved(record, 1001.0)
    assert (moved.reconcile_at, moved.reconcile_tries) == (None, 3)
    assert build(record, Event.CONFIRM, Actor.RECONCILER).moved(record, 1001.0).reconcile_tries == 2


def test_half_done_request_is_always_on_the_resumers_list() -> None:
    """After a verdict at once; after an attempt that ended, the client has the first try."""
    into = [
        move for move in TABLE if move.target is State.FAILED_RETRYABLE and move.event in (Event.RELEASE, Event.REFUTE)
    ]
    assert len(into) == 3
    for move in into:
        effects = Effects.EXTERNAL if move.event in FENCES else Effects.PHASED
        record = make_record(state=move.source, recovery_point="charged", effects=effects)
        made = build(record, move.event, min(move.by), to_state=move.target)
        assert made.reconcile_in == (0.0 if move.source is State.UNKNOWN else RESUME_SECONDS)
        if move.event not in FENCES:
            without = make_record(state=move.source, effects=Effects.PHASED)
            assert build(without, move.event, min(move.by)).reconcile_in is None


def test_pause_before_a_half_done_request_is_resumed_grows_with_each_try() -> None:
    assert [resume_in(tries) for tries in (0, 1, 2, 3)] == [30.0, 60.0, 120.0, 240.0]
    assert resume_in(2_000) == 3600.0


def test_resumer_counts_its_tries_and_a_client_starts_them_over() -> None:
    """Counted when it begins: a try that kills the process counts as well."""
    half_done = make_record(state=State.FAILED_RETRYABLE, recovery_point="charged", reconcile_tries=2)
    assert build(half_done, Event.RETRY, Actor.RESUMER).reconcile_tries == 3
    assert build(half_done, Event.RETRY, Actor.REQUEST).reconcile_tries == 0
    assert build(replace(half_done, state=State.IN_PROGRESS), Event.DOUBT, Actor.OWNER).reconcile_tries == 0
    later = build(half_done, Event.POSTPONE, Actor.RESUMER, reconcile_in=60.0)
    assert (later.reconcile_in, later.reconcile_tries) == (60.0, None)
    dead = build(half_done, Event.POSTPONE, Actor.RESUMER).moved(half_done, 1001.0)
    assert (dead.dead, dead.reconcile_tries) == (True, 2)
    assert not replace(dead, reconcile_tries=0).dead, "an older version released it: upkeep has not tried yet"


def test_caller_that_gave_up_leaves_a_half_done_request_on_the_list() -> None:
    half_done = make_record(state=State.FAILED_RETRYABLE, recovery_point="charged")
    back = undo(build(half_done, Event.RETRY, Actor.REQUEST))
    assert back is not None
    assert back.reconcile_in == RESUME_SECONDS
    fresh = undo(build(make_record(state=State.FAILED_RETRYABLE), Event.RETRY, Actor.REQUEST))
    assert fresh is not None
    assert fresh.reconcile_in is None


def test_a_step_is_not_written_where_the_steps_of_the_key_are_forgotten() -> None:
    """A move that begins an attempt, expires the key or removes it takes no step; what ends an attempt may."""
    step = Step("charge", StepKind.EFFECT, StepState.DONE, repeatable=True)
    for move in TABLE:
        if move.source is None:
            continue
        record = fitting(move)
        more: dict[str, Any] = {"to_state": move.target, "quarantine_seconds": 0.0}
        for actor in move.by:
            made = build(record, move.event, actor, **more)
            assert made.forgets_steps == (move.event is Event.RESERVE or move.target in (None, State.EXPIRED))
            if made.forgets_steps or move.event in STARTS:
                with pytest.raises(IllegalTransition, match="takes no step"):
                    build(record, move.event, actor, step=step, **more)
            else:
                assert build(record, move.event, actor, step=step, **more).step == step


def test_a_plain_swap_changes_one_row_and_nothing_that_its_mover_has_not_seen() -> None:
    """The hot statement is for these: no step, no audit line, no steps forgotten, no tries to count."""
    assert build(make_record(), Event.COMPLETE, Actor.OWNER).plain
    assert build(make_record(state=State.FAILED_RETRYABLE), Event.RETRY, Actor.REQUEST).plain
    step = Step("charge", StepKind.EFFECT, StepState.DONE, repeatable=True)
    unknown, done = make_record(state=State.UNKNOWN), make_record(state=State.COMPLETED)
    for beside in (
        build(make_record(), Event.ADVANCE, Actor.OWNER, step=step),
        build(make_record(), Event.RELEASE, Actor.OWNER, audit=Audit("ops", "stuck")),
        build(make_record(), Event.DISCARD, Actor.OWNER),
        build(unknown, Event.POSTPONE, Actor.RECONCILER),
        build(unknown, Event.COMPLETE, Actor.OWNER),
        build(done, Event.EXPIRE, Actor.REAPER, to_state=State.EXPIRED),
        build(done, Event.RESERVE, Actor.REQUEST),
    ):
        assert not beside.plain


@pytest.mark.parametrize("event", [Event.HAPPENED, Event.NOT_HAPPENED])
def test_settling_an_effect_needs_its_name_a_new_owner_and_an_effect_in_doubt(event: Event) -> None:
    record = make_record(state=State.UNKNOWN, recovery_point="started")
    target = State.FAILED_RETRYABLE
    assert build(record, event, Actor.OPERATOR, to_state=target).new_owner == "owner-2"
    for missing in ({"step": None}, {"new_owner": None}):
        with pytest.raises(IllegalTransition, match="needs an effect and new owner token"):
            build(record, event, Actor.OPERATOR, to_state=target, **missing)
    for other in (replace(record, recovery_point=None), replace(record, effects=Effects.PHASED)):
        with pytest.raises(IllegalTransition, match="one effect in doubt"):
            build(other, event, Actor.OPERATOR, to_state=target)
    with pytest.raises(IllegalTransition, match="takes no new owner token"):
        build(record, Event.CONFIRM, Actor.OPERATOR, new_owner="owner-2")


def test_going_on_needs_steps_and_no_effect_in_doubt() -> None:
    record = make_record(state=State.UNKNOWN, recovery_point="charge", effects=Effects.PHASED)
    made = build(record, Event.GO_ON, Actor.RECONCILER)
    assert (made.to_state, made.new_owner, made.reconcile_in) == (State.FAILED_RETRYABLE, "owner-2", 0.0)
    for other, missing in (
        (replace(record, recovery_point=None), "has steps"),
        (replace(record, effects=Effects.EXTERNAL), "no effect in doubt"),
    ):
        with pytest.raises(IllegalTransition, match=missing):
            build(other, Event.GO_ON, Actor.RECONCILER)


def test_a_move_with_several_targets_names_one() -> None:
    """``find`` never guesses: settle and expire say where to, and a target that no row has is refused."""
    with pytest.raises(IllegalTransition, match="several targets"):
        find(State.PENDING, Event.SETTLE, Actor.WORKER)
    with pytest.raises(IllegalTransition, match="no move"):
        find(State.IN_PROGRESS, Event.COMPLETE, Actor.OWNER, State.FAILED)


def test_refute_waits_for_the_quarantine_of_the_row_unless_another_is_named() -> None:
    """What was sent may still be on its way: a refutation without a quarantine does not exist."""
    for kept, named, waits in ((None, None, 300.0), (7.0, None, 7.0), (7.0, 0.0, 0.0), (None, 1.5, 1.5)):
        record = make_record(state=State.UNKNOWN, quarantine_seconds=kept)
        made = build(record, Event.REFUTE, Actor.RECONCILER, quarantine_seconds=named)
        assert made.lease_over_by == waits


def test_becoming_unknown_ends_the_lease_unless_the_owner_gives_one() -> None:
    """So that the quarantine counts from the doubt; a key that is unknown already keeps the time of its doubt."""
    for move in TABLE:
        if move.target is not State.UNKNOWN or move.source is None:
            continue
        record = fitting(move, Effects.EXTERNAL)
        for actor in move.by:
            made = build(record, move.event, actor, to_state=State.UNKNOWN)
            assert made.lease_seconds == (None if move.source is State.UNKNOWN else 0.0)
    assert build(make_record(), Event.DOUBT, Actor.OWNER, lease_seconds=60.0).lease_seconds == 60.0


def test_a_new_attempt_brings_its_own_effects() -> None:
    """After a deploy the row says where the effects of the code live that runs now, not of the one that failed."""
    old = make_record(state=State.FAILED_RETRYABLE, effects=Effects.REPEATABLE)
    assert build(old, Event.RETRY, Actor.REQUEST).effects is Effects.EXTERNAL
    assert build(make_record(), Event.COMPLETE, Actor.OWNER).effects is None
