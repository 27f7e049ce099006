"""The state table, written down a second time as text."""

from __future__ import annotations

from itertools import product

import pytest

from oncekey.core.states import FINAL, MAY_RERUN, STARTS, TABLE, Actor, Effects, Event, State, find
from oncekey.errors import IllegalTransition

# (from, event, by) -> the possible targets. "-" is no row. Conditions after a slash.
DESIGN = """
-                 reserve    request     in_progress
in_progress       renew      owner       in_progress
in_progress       advance    owner       in_progress
in_progress       complete   owner       completed
in_progress       fail       owner       failed
in_progress       release    owner       failed_retryable
in_progress       doubt      owner       unknown
in_progress       defer      owner       pending
in_progress       discard    owner       -                 / attempt 1; no steps
in_progress       take_over  request     in_progress       / lease over; effects allow a second run
in_progress       release    sweeper     failed_retryable  / lease over; effects allow a second run
in_progress       release    request     failed_retryable  / lease over; effects allow a second run
in_progress       doubt      sweeper     unknown           / lease over
in_progress       doubt      request     unknown           / lease over
failed_retryable  retry      request     in_progress
pending           settle     worker      completed
pending           settle     worker      failed
pending           settle     worker      unknown
pending           time_out   reaper      failed            / past expiry; job not leased; job never tried
unknown           confirm    reconciler  completed
unknown           confirm    operator    completed
unknown           give_up    reconciler  failed
unknown           give_up    operator    failed
unknown           refute     reconciler  failed_retryable  / lease over + quarantine; not deferred
unknown           refute     operator    failed_retryable  / lease over + quarantine; not deferred
unknown           postpone   reconciler  unknown
unknown           postpone   operator    unknown
unknown           complete   owner       completed
completed         expire     reaper      expired           / past expiry
completed         expire     reaper      -                 / past expiry
failed            expire     reaper      expired           / past expiry
failed            expire     reaper      -                 / past expiry
failed_retryable  expire     reaper      expired           / past expiry; no steps
failed_retryable  expire     reaper      -                 / past expiry; no steps
completed         reserve    request     in_progress       / past expiry
failed            reserve    request     in_progress       / past expiry
failed_retryable  reserve    request     in_progress       / past expiry; no steps
expired           reserve    request     in_progress
completed         forget     operator    -
failed            forget     operator    -
failed_retryable  doubt      reaper      unknown           / past expiry; has steps
"""

# Not on the page, but in the table: the late owner of an unknown key may also bring an error that is final.
# And a dead letter that an operator sends back to the worker takes its key along.
# And a request whose route is declared otherwise now makes unknown what it can neither resume nor repeat.
# And upkeep goes on with a half-done request itself, tries again later, and leaves it to an operator in the end.
# And an effect in doubt is settled by itself: the key is retryable, or stays unknown while others are in doubt.
# And a deferred request whose job was tried before it expired may have happened: no 408 for good.
BEYOND_DESIGN = """
unknown           reopen     operator    pending           / its dead letter is tried again
unknown           fail       owner       failed
failed_retryable  doubt      request     unknown           / has steps or repeatable effects
pending           time_out   reaper      unknown           / past expiry; job not leased; job was tried
failed_retryable  retry      resumer     in_progress       / has steps
failed_retryable  postpone   resumer     failed_retryable  / has steps
failed_retryable  postpone   operator    failed_retryable  / has steps
unknown           correct    operator    unknown           / has steps
failed_retryable  correct    operator    failed_retryable  / has steps
unknown           go_on      reconciler  failed_retryable  / has steps; no effect in doubt; not deferred
unknown           happened   reconciler  failed_retryable  / one effect in doubt; not deferred
unknown           happened   operator    failed_retryable  / one effect in doubt; not deferred
unknown           happened   reconciler  unknown           / several effects in doubt; not deferred
unknown           happened   operator    unknown           / several effects in doubt; not deferred
unknown not_happened reconciler failed_retryable / lease over + quarantine; one effect in doubt; not deferred
unknown not_happened operator failed_retryable / lease over + quarantine; one effect in doubt; not deferred
unknown not_happened reconciler unknown / lease over + quarantine; several effects in doubt; not deferred
unknown not_happened operator unknown / lease over + quarantine; several effects in doubt; not deferred
"""

Triple = tuple[str, str, str]
Target = tuple[str, frozenset[str]]


def parse(text: str) -> dict[Triple, set[Target]]:
    """The literal table as {(from, event, by): {(to, conditions)}}."""
    moves: dict[Triple, set[Target]] = {}
    for line in filter(str.strip, text.splitlines()):
        words, _, conditions = line.partition("/")
        source, event, actor, target = words.split()
        when = frozenset(part.strip() for part in conditions.split(";") if part.strip())
        moves.setdefault((source, event, actor), set()).add((target, when))
    return moves


EXPECTED = parse(DESIGN + BEYOND_DESIGN)
SOURCES: tuple[State | None, ...] = (None, *State)


def test_the_page_and_the_table_name_the_same_moves() -> None:
    """Read as sets, the text above and ``TABLE`` are equal, conditions included."""
    actual = {
        (move.source or "-", str(move.event), str(actor), move.target or "-", frozenset(map(str, move.when)))
        for move in TABLE
        for actor in move.by
    }
    assert actual == {(*triple, *target) for triple, targets in EXPECTED.items() for target in targets}
    assert sum(len(move.by) for move in TABLE) == len(actual), "no move is written twice"


@pytest.mark.parametrize("source", SOURCES)
def test_every_triple_is_on_the_page_or_illegal(source: State | None) -> None:
    """``find`` gives exactly the expected rows, and raises for every other (state, event, actor)."""
    for event, actor in product(Event, Actor):
        targets = EXPECTED.get((source or "-", event, actor))
        if targets is None:
            with pytest.raises(IllegalTransition, match=f"'{event}' from {source or 'no row'} by {actor}"):
                find(source, event, actor)
            continue
        for target, when in targets:
            move = find(source, event, actor, None if target == "-" else State(target))
            assert (move.source, move.event, move.target or "-", move.when) == (source, event, target, when)


def test_an_event_with_several_targets_refuses_any_other() -> None:
    """A job settles a key to completed, failed or unknown, and cannot put it back in progress."""
    for target in (None, State.IN_PROGRESS, State.PENDING, State.EXPIRED, State.FAILED_RETRYABLE):
        with pytest.raises(IllegalTransition):
            find(State.PENDING, Event.SETTLE, Actor.WORKER, target)


def test_every_state_is_reachable_and_can_be_left() -> None:
    """From no row every state can be reached, and from every state no row or a new run can be."""
    reached: set[State | None] = {None}
    for _ in TABLE:
        reached |= {move.target for move in TABLE if move.source in reached}
    assert reached == {None, *State}
    assert {move.source for move in TABLE if move.source != move.target} == {None, *State}


def test_in_progress_and_unknown_never_expire() -> None:
    """in_progress and unknown have no way to expired, and to no row only the discard of a first attempt."""
    ways_out = {
        (move.source, move.event)
        for move in TABLE
        if move.source in (State.IN_PROGRESS, State.UNKNOWN) and move.target in (None, State.EXPIRED)
    }
    assert ways_out == {(State.IN_PROGRESS, Event.DISCARD)}
    assert not any(
        move.event in (Event.EXPIRE, Event.FORGET, Event.RESERVE, Event.TIME_OUT)
        for move in TABLE
        if move.source in (State.IN_PROGRESS, State.UNKNOWN)
    )


def test_only_settlers_and_the_late_owner_leave_unknown() -> None:
    """No client, sweeper, reaper or worker moves an unknown outcome; the owner only to a final state."""
    leaving = [move for move in TABLE if move.source is State.UNKNOWN]
    settlers = {Actor.RECONCILER, Actor.OPERATOR}
    assert {actor for move in leaving for actor in move.by} == {*settlers, Actor.OWNER}
    for move in leaving:
        assert move.by <= settlers or (move.by == {Actor.OWNER} and move.target in FINAL)
        assert move.target is not State.IN_PROGRESS


def test_final_states_are_left_by_time_or_an_operator_only() -> None:
    """completed and failed are the final states; whatever leaves them waits for expiry or is ``forget``."""
    assert {State.COMPLETED, State.FAILED} == FINAL
    for move in TABLE:
        if move.source in FINAL:
            assert "past expiry" in move.when or (move.event is Event.FORGET and move.by == {Actor.OPERATOR})


def test_moves_of_a_running_key_need_its_owner_or_a_lapsed_lease() -> None:
    """A row in progress is moved by its owner, or by others under a condition on the lease."""
    for move in TABLE:
        if move.source is State.IN_PROGRESS and move.by != {Actor.OWNER}:
            assert Actor.OWNER not in move.by
            assert "lease over" in move.when


def test_only_external_effects_forbid_a_second_run() -> None:
    """The three declarations that make a second run harmless are exactly these."""
    assert {Effects.TRANSACTIONAL, Effects.PHASED, Effects.REPEATABLE} == MAY_RERUN
    assert set(Effects) - MAY_RERUN == {Effects.EXTERNAL}


def test_the_events_that_start_an_attempt_are_those_of_a_request_that_ends_in_progress() -> None:
    """``STARTS`` is derived here from the table: a request makes the row its own, in progress."""
    derived = {m.event for m in TABLE if m.target is State.IN_PROGRESS and m.by == {Actor.REQUEST}}
    assert derived == STARTS
