"""The stages of an enlisted transaction, written down a second time as text: every stage with every event."""

from __future__ import annotations

from itertools import product

import pytest

from oncekey.engine.transactions.stages import PROVES, TABLE, TO_BE_ENDED, Happened, Proof, Stage, after
from oncekey.errors import IllegalTransition

# One line per stage: what it proves, and "what happened > the next stage".
EXPECTED = """
not_awaited       unknown             STARTED>opening ROLLED_BACK>rolled_back ENDED>rolled_back CUT_OFF>not_awaited
opening           nothing written     LOCKED>open ROLLED_BACK>rolled_back ENDED>rolled_back CUT_OFF>cut_off_early
cut_off_early     the key's row tells LOCKED>open ROLLED_BACK>rolled_back ENDED>rolled_back CUT_OFF>cut_off_early \
                                      ROW_COMPLETED>committed ROW_IN_PROGRESS>rolled_back
open              unknown             KEY_WRITTEN>written COMMIT_SENT>committing COMMIT_ANSWERED>committed \
                                      ROLLED_BACK>rolled_back ENDED>ended CUT_OFF>cut_off
written           the key's row tells KEY_WRITTEN>written COMMIT_SENT>committing COMMIT_ANSWERED>committed \
                                      ROLLED_BACK>rolled_back ENDED>ended CUT_OFF>written \
                                      ROW_COMPLETED>committed ROW_IN_PROGRESS>rolled_back
committing        the key's row tells KEY_WRITTEN>written COMMIT_SENT>committing COMMIT_ANSWERED>committed \
                                      ROLLED_BACK>rolled_back ENDED>ended CUT_OFF>committing \
                                      ROW_COMPLETED>committed ROW_IN_PROGRESS>rolled_back
cut_off           the key's row tells KEY_WRITTEN>written COMMIT_SENT>committing COMMIT_ANSWERED>committed \
                                      ROLLED_BACK>rolled_back ENDED>ended CUT_OFF>cut_off \
                                      ROW_COMPLETED>committed ROW_IN_PROGRESS>ended
ended             the server tells    KEY_WRITTEN>written COMMIT_SENT>committing COMMIT_ANSWERED>committed \
                                      ROLLED_BACK>rolled_back ENDED>ended CUT_OFF>ended LEFT_TO_APP>doomed \
                                      SERVER_ABORTED>rolled_back SERVER_COMMITTED>may_be_committed \
                                      SERVER_CANNOT_TELL>may_be_committed
doomed            the server tells    KEY_WRITTEN>written COMMIT_SENT>committing COMMIT_ANSWERED>committed \
                                      ROLLED_BACK>rolled_back ENDED>ended CUT_OFF>doomed LEFT_TO_APP>doomed \
                                      SERVER_ABORTED>rolled_back SERVER_COMMITTED>may_be_committed \
                                      SERVER_CANNOT_TELL>may_be_committed
rolled_back       nothing written     STARTED>opening LOCKED>open KEY_WRITTEN>written COMMIT_SENT>committing \
                                      COMMIT_ANSWERED>committed ROLLED_BACK>rolled_back ENDED>rolled_back \
                                      CUT_OFF>rolled_back
committed         committed
may_be_committed  unknown
"""


def expected() -> tuple[dict[Stage, Proof], dict[tuple[Stage, Happened], Stage]]:
    proofs: dict[Stage, Proof] = {}
    following: dict[tuple[Stage, Happened], Stage] = {}
    for line in filter(str.strip, EXPECTED.splitlines()):
        stage = Stage(line.split()[0])
        proofs[stage] = Proof(line[18:38].strip())
        for pair in line[38:].split():
            happened, _, target = pair.partition(">")
            following[stage, Happened[happened]] = Stage(target)
    return proofs, following


PROOFS, FOLLOWING = expected()


@pytest.mark.parametrize("stage", Stage)
def test_every_event_in_a_stage_leads_where_the_text_says_or_is_illegal(stage: Stage) -> None:
    assert PROVES[stage] is PROOFS[stage]
    for happened in Happened:
        if (stage, happened) in FOLLOWING:
            assert after(stage, happened) is FOLLOWING[stage, happened]
        else:
            with pytest.raises(IllegalTransition, match=f"'{stage}' cannot see that"):
                after(stage, happened)


def test_no_row_is_written_twice() -> None:
    assert len(TABLE) == len({(row.source, row.happened) for row in TABLE}) == len(FOLLOWING)


def test_every_stage_is_reached_from_an_enlist() -> None:
    reached = {Stage.NOT_AWAITED}
    for _ in Stage:
        reached |= {row.target for row in TABLE if row.source in reached}
    assert reached == set(Stage)


def test_committed_and_may_be_committed_are_never_left() -> None:
    assert {stage for stage in Stage if not any(row.source is stage for row in TABLE)} == {
        Stage.COMMITTED,
        Stage.MAY_BE_COMMITTED,
    }


def test_rollback_of_a_locked_transaction_is_proven_only_by_its_link_its_row_or_the_server() -> None:
    """Every other way to "nothing written" begins before the key's row is locked, or at a proof."""
    proven = {Happened.ROLLED_BACK, Happened.ROW_IN_PROGRESS, Happened.SERVER_ABORTED}
    before_lock = {Stage.NOT_AWAITED, Stage.OPENING, Stage.CUT_OFF_EARLY}
    for row in TABLE:
        if PROVES[row.target] is Proof.NOTHING_WRITTEN and row.source not in before_lock:
            assert row.happened in proven or PROVES[row.source] is Proof.NOTHING_WRITTEN, row


def test_row_that_is_in_progress_proves_nothing_after_a_cut_off() -> None:
    """Its last statement may not have run, and the handler may have committed by hand before."""
    assert PROVES[after(Stage.CUT_OFF, Happened.ROW_IN_PROGRESS)] is Proof.SERVER_TELLS


def test_every_question_has_every_answer() -> None:
    """Where the row or the server tells, the table has a row for each answer, and no answer asks the same again."""
    answers = {
        Proof.ROW_TELLS: (Happened.ROW_COMPLETED, Happened.ROW_IN_PROGRESS),
        Proof.SERVER_TELLS: (Happened.SERVER_ABORTED, Happened.SERVER_COMMITTED, Happened.SERVER_CANNOT_TELL),
    }
    for stage, (asked, possible) in product(Stage, answers.items()):
        if PROVES[stage] is asked:
            for answer in possible:
                assert PROVES[after(stage, answer)] is not asked


def test_transaction_to_be_ended_can_be_rolled_back_and_cut_off() -> None:
    for stage in TO_BE_ENDED:
        for happened in (Happened.ROLLED_BACK, Happened.ENDED, Happened.CUT_OFF):
            after(stage, happened)
