"""The table of a job's states, written down a second time as text. The store suite compares the stores with it."""

from __future__ import annotations

from itertools import product

import pytest

from oncekey.core.jobs import TABLE, JobEnd, JobEvent, JobState, find, redirection
from oncekey.core.states import Actor
from oncekey.errors import IllegalTransition

# from, event, by, to. "-" is no row. Conditions after a slash.
EXPECTED = """
-          enqueue      owner     ready
ready      claim        worker    running    / due
running    claim        worker    running    / lease over
running    renew        worker    running    / the owner token of its claim
running    record       worker    running    / the owner token of its claim
running    done         worker    done       / the owner token of its claim
running    retry        worker    ready      / the owner token of its claim
running    release      worker    ready      / the owner token of its claim
running    dead         worker    dead       / the owner token of its claim
dead       retry_job    operator  ready
dead       discard_job  operator  cancelled
ready      time_out     reaper    cancelled  / settles its key; its key is pending past expiry
running    time_out     reaper    cancelled  / lease over; settles its key; its key is pending past expiry
done       purge        reaper    -          / kept for long enough
cancelled  purge        reaper    -          / kept for long enough
"""

Rows = dict[tuple[str, str, str], tuple[str, frozenset[str]]]


def expected() -> Rows:
    rows: Rows = {}
    for line in filter(str.strip, EXPECTED.splitlines()):
        words, _, conditions = line.partition("/")
        source, event, actor, target = words.split()
        when = frozenset(part.strip() for part in conditions.split(";") if part.strip())
        rows[source, event, actor] = (target, when)
    return rows


@pytest.mark.parametrize("source", [None, *JobState])
def test_every_move_is_in_the_text_or_illegal(source: JobState | None) -> None:
    for event, actor in product(JobEvent, Actor):
        row = expected().get((source or "-", event, actor))
        if row is None:
            with pytest.raises(IllegalTransition, match=f"'{event}' of a job from {source or 'no row'} by {actor}"):
                find(source, event, actor)
        else:
            move = find(source, event, actor)
            assert (move.source, move.event, move.target or "-", move.when) == (source, event, *row)


def test_no_move_is_written_twice() -> None:
    assert len(TABLE) == len(expected()) == len({(row.source, row.event, row.by) for row in TABLE})


def test_every_state_is_reached_and_left() -> None:
    assert (
        {row.target for row in TABLE} == {None, *JobState} == {row.source for row in TABLE if row.source != row.target}
    )


def test_worker_writes_to_a_running_job_only_under_its_token_or_after_the_lease() -> None:
    for row in TABLE:
        if row.source is JobState.RUNNING:
            assert row.when & {"the owner token of its claim", "lease over"}


def test_end_of_an_attempt_has_the_target_of_its_event() -> None:
    assert {end: end.target for end in JobEnd} == {
        JobEnd.DONE: JobState.DONE,
        JobEnd.RETRY: JobState.READY,
        JobEnd.RELEASE: JobState.READY,
        JobEnd.DEAD: JobState.DEAD,
    }


def test_dead_letter_is_redirected_to_ready_or_cancelled_only() -> None:
    assert redirection(JobState.READY) is JobEvent.RETRY_JOB
    assert redirection(JobState.CANCELLED) is JobEvent.DISCARD_JOB
    for state in (JobState.RUNNING, JobState.DONE, JobState.DEAD):
        with pytest.raises(IllegalTransition, match=f"a dead letter goes to ready or cancelled, not to {state}"):
            redirection(state)
