"""What becomes of a key when its handler has ended: the table of ``judgment.py`` as data, and its exceptions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import pytest

from oncekey.core.evidence import Evidence
from oncekey.core.judgment import HandlerWord, Judgment, judge
from oncekey.core.policy import EffectsName, OnServerError, Policy
from oncekey.core.states import Event

EFFECTS: tuple[EffectsName, ...] = get_args(EffectsName)
ON_SERVER_ERROR: tuple[OnServerError, ...] = get_args(OnServerError)


def seen(
    *,
    calls: int = 1,
    running: int = 0,
    returned: int | None = None,
    raised: bool = False,
    raised_status: int | None = None,
    covered: bool = True,
    refused: bool = False,
) -> Evidence:
    made = Evidence(covered=covered)
    made.calls, made.running, made.returned = calls, running, returned
    made.raised, made.raised_status, made.refused = raised, raised_status, refused
    return made


NEVER_ENTERED = seen(calls=0)
REFUSED_BY_VALIDATION = seen(calls=0, refused=True)
NOT_WRAPPED = seen(calls=0, covered=False)
RUNNING = seen(running=1)
CANCELLED = seen()

# ---------------------------------------------------------------- the table

COMPLETED = Judgment(Event.COMPLETE, commits=True)
ANSWERED_BEFORE = Judgment(Event.COMPLETE, commits=True, notice="answered before the endpoint")
COMPLETED_UNWRAPPED = Judgment(Event.COMPLETE, commits=True, notice="not wrapped")
FAILED = Judgment(Event.FAIL, commits=True)
FAILED_ROLLED_BACK = Judgment(Event.FAIL)
RETRYABLE = Judgment(Event.RELEASE)
RETRYABLE_OURS = Judgment(Event.RELEASE, ours=True)
UNKNOWN = Judgment(Event.DOUBT)
UNKNOWN_OURS = Judgment(Event.DOUBT, ours=True)
DISCARDED = Judgment(Event.DISCARD)


@dataclass(frozen=True)
class Row:
    """One line of the table: what was seen, the statuses that are sent, and what becomes of the key."""

    what: str
    evidence: Evidence
    statuses: tuple[int | None, ...]
    external: Judgment
    others: Judgment
    """Transactional, phased and repeatable. What is not committed is rolled back; only transactional has a commit."""
    later_attempt: Judgment | None = None
    """On a later attempt; None: the same as on the first."""


UNDER_300 = (200, 201, 202, 204)
UNDER_400 = (*UNDER_300, 301, 302, 303, 307)
FINAL_4XX = (400, 401, 402, 403, 404, 409, 418, 422, 451)
SERVER_ERROR = (408, 500, 502, 503, 504, 599)

TABLE = [
    Row("never entered, redirect or client error", NEVER_ENTERED, (303, 307, *FINAL_4XX, 425, 429),
        DISCARDED, DISCARDED, later_attempt=RETRYABLE),
    Row("never entered, validation refused it, and its handler failed", REFUSED_BY_VALIDATION, (None, *SERVER_ERROR),
        DISCARDED, DISCARDED, later_attempt=RETRYABLE),
    Row("never entered, server error otherwise", NEVER_ENTERED, (None, *SERVER_ERROR), UNKNOWN, RETRYABLE),
    Row("never entered, success", NEVER_ENTERED, UNDER_300, ANSWERED_BEFORE, ANSWERED_BEFORE),
    *(Row(f"returned {status}", seen(returned=status), UNDER_400, COMPLETED, COMPLETED) for status in UNDER_400),
    *(Row(f"returned {status}, and it broke off or became an error", seen(returned=status),
          (None, *FINAL_4XX, 425, 429, *SERVER_ERROR), UNKNOWN, RETRYABLE) for status in UNDER_400),
    *(Row(f"returned {status}", seen(returned=status), FINAL_4XX, FAILED, FAILED) for status in FINAL_4XX),
    *(Row(f"returned {status}, and an envelope made a success of it", seen(returned=status), UNDER_400,
          COMPLETED, COMPLETED) for status in FINAL_4XX),
    *(Row(f"returned {status}, and middleware failed on the way out", seen(returned=status), (None, *SERVER_ERROR),
          UNKNOWN, RETRYABLE) for status in FINAL_4XX),
    Row("raised, and it became a client error", seen(raised=True), FINAL_4XX, FAILED_ROLLED_BACK, FAILED_ROLLED_BACK),
    *(Row(f"raised HTTPException({status})", seen(raised=True, raised_status=status), (status,),
          FAILED_ROLLED_BACK, FAILED_ROLLED_BACK) for status in FINAL_4XX),
    *(Row(f"raised a {status} of its own", seen(raised=True, raised_status=status), (status,),
          COMPLETED, COMPLETED) for status in (301, 302, 303, 307, 308)),
    *(Row(f"raised {status}, and an error handler answered with a success", seen(raised=True, raised_status=status),
          (200, 201, 302), UNKNOWN_OURS, RETRYABLE_OURS) for status in (None, 200, 303, 402, 503)),
    *(Row(f"{status} by the endpoint", evidence, (status,), RETRYABLE, RETRYABLE)
      for status in (425, 429) for evidence in (seen(returned=status), seen(raised=True, raised_status=status))),
    *(Row(f"returned {status}", seen(returned=status), (status,), UNKNOWN, RETRYABLE) for status in SERVER_ERROR),
    *(Row(f"raised HTTPException({status})", seen(raised=True, raised_status=status), (None, status),
          UNKNOWN, RETRYABLE) for status in SERVER_ERROR),
    Row("raised, and it became a server error, or a retryable status by an error handler", seen(raised=True),
        (None, 425, 429, *SERVER_ERROR), UNKNOWN, RETRYABLE),
    *(Row(f"{how}, and an error is sent in its place", evidence, (None, *FINAL_4XX, 425, 429, *SERVER_ERROR),
          UNKNOWN, RETRYABLE) for how, evidence in (("still running", RUNNING), ("cancelled", CANCELLED))),
    *(Row(f"{how}, and a success is sent in its place", evidence, UNDER_400, UNKNOWN_OURS, RETRYABLE_OURS)
      for how, evidence in (("still running", RUNNING), ("cancelled", CANCELLED))),
    *(Row(f"{how}, and an earlier call may have done it", evidence, (402, 429, 503), UNKNOWN, RETRYABLE)
      for how, evidence in (("second call returned 402", seen(calls=2, returned=402)),
                            ("second call raised 402", seen(calls=2, raised=True, raised_status=402)),
                            ("second call returned 429", seen(calls=2, returned=429)))),
    Row("second call returned a success", seen(calls=2, returned=201), UNDER_400, COMPLETED, COMPLETED),
    Row("not wrapped, success", NOT_WRAPPED, UNDER_400, COMPLETED_UNWRAPPED, COMPLETED_UNWRAPPED),
    Row("not wrapped, client error", NOT_WRAPPED, FINAL_4XX, FAILED_ROLLED_BACK, FAILED_ROLLED_BACK),
    Row("not wrapped, server error", NOT_WRAPPED, (None, *SERVER_ERROR), UNKNOWN, RETRYABLE),
    Row("not wrapped, retryable status", NOT_WRAPPED, (425, 429), RETRYABLE, RETRYABLE),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what)
def test_every_row_of_the_table_gives_its_judgment(row: Row) -> None:
    for effects, status, first_attempt in product(EFFECTS, row.statuses, (True, False)):
        expected = row.external if effects == "external" else row.others
        if not first_attempt and row.later_attempt is not None:
            expected = row.later_attempt
        found = judge(row.evidence, status, Policy(effects=effects), first_attempt=first_attempt)
        assert found == expected, (effects, status, first_attempt)


@pytest.mark.parametrize("row", [row for row in TABLE if row.evidence.calls], ids=lambda row: row.what)
def test_verb_changes_nothing_once_the_endpoint_was_entered(row: Row) -> None:
    for effects, status in product(EFFECTS, row.statuses):
        policy = Policy(effects=effects)
        assert judge(row.evidence, status, policy, begun=True) == judge(row.evidence, status, policy)


@pytest.mark.parametrize("evidence", [NEVER_ENTERED, REFUSED_BY_VALIDATION])
def test_verb_of_a_dependency_counts_as_begun(evidence: Evidence) -> None:
    """The key is used: a client error is final, a server error follows the effects."""
    for effects, first_attempt in product(EFFECTS, (True, False)):

        def judged(status: int | None, effects: Any = effects, first_attempt: bool = first_attempt) -> Judgment:
            return judge(evidence, status, Policy(effects=effects), begun=True, first_attempt=first_attempt)

        assert {judged(status) for status in FINAL_4XX} == {FAILED_ROLLED_BACK}
        assert {judged(status) for status in (None, 425, 429, *SERVER_ERROR)} == {
            UNKNOWN if effects == "external" else RETRYABLE
        }
        assert {judged(status) for status in UNDER_400} == {ANSWERED_BEFORE}


# ---------------------------------------------------------------- what a policy says of errors


@pytest.mark.parametrize("effects", EFFECTS)
@pytest.mark.parametrize(
    ("on_server_error", "expected"),
    [("retry", RETRYABLE), ("replay", FAILED_ROLLED_BACK), ("unknown", UNKNOWN)],
)
def test_on_server_error_replaces_the_row_of_a_server_error_by_the_endpoint(
    effects: EffectsName, on_server_error: OnServerError, expected: Judgment
) -> None:
    """Returned, or raised as an HTTPException; an unwrapped app's counts as returned."""
    policy = Policy(effects=effects, on_server_error=on_server_error)
    for status in SERVER_ERROR:
        assert judge(seen(returned=status), status, policy) == expected
        assert judge(seen(raised=True, raised_status=status), status, policy) == expected
        assert judge(NOT_WRAPPED, status, policy) == expected


@pytest.mark.parametrize("effects", EFFECTS)
@pytest.mark.parametrize("on_server_error", ON_SERVER_ERROR)
def test_on_server_error_changes_no_other_row(effects: EffectsName, on_server_error: OnServerError) -> None:
    """Not of another exception, of an answer in the endpoint's place, or of a request that never entered it."""
    policy, plain = Policy(effects=effects, on_server_error=on_server_error), Policy(effects=effects)
    for row in TABLE:
        own = row.evidence.returned or row.evidence.raised_status or 0
        by_the_endpoint = own >= 500 or own == 408 or row.evidence is NOT_WRAPPED
        if not by_the_endpoint:
            for status in row.statuses:
                assert judge(row.evidence, status, policy) == judge(row.evidence, status, plain), (row.what, status)


def test_replay_needs_an_answer_to_replay() -> None:
    """An HTTPException that the framework did not answer leaves none."""
    policy = Policy(on_server_error="replay")
    assert judge(seen(raised=True, raised_status=503), None, policy) == UNKNOWN


def test_replay_of_a_server_error_that_became_a_success_is_not_stored() -> None:
    """The transaction is rolled back, so the success that an envelope made of the 500 is no answer to replay."""
    for effects in EFFECTS:
        found = judge(seen(returned=500), 200, Policy(effects=effects, on_server_error="replay"))
        assert found == (UNKNOWN_OURS if effects == "external" else RETRYABLE_OURS)


@pytest.mark.parametrize("effects", EFFECTS)
def test_retryable_statuses_are_the_routes_to_name(effects: EffectsName) -> None:
    """A named status is retryable if the endpoint gave it; one that is no longer named follows the other rows."""
    policy = Policy(effects=effects, retryable_statuses=frozenset({408, 423, 503}), on_server_error="replay")
    for status in (408, 423, 503):
        assert judge(seen(returned=status), status, policy) == RETRYABLE
        assert judge(seen(raised=True, raised_status=status), status, policy) == RETRYABLE
        assert judge(NOT_WRAPPED, status, policy) == RETRYABLE
    assert judge(seen(returned=429), 429, policy) == FAILED
    undone = UNKNOWN if effects == "external" else RETRYABLE
    assert judge(seen(raised=True), 503, policy) == undone
    assert judge(RUNNING, 503, policy) == undone
    assert judge(seen(returned=201), 503, policy) == undone


def test_client_errors_that_are_not_final_are_retryable() -> None:
    """``final_client_errors=False`` is about a 4xx of the endpoint: one in its place still says nothing."""
    policy = Policy(final_client_errors=False)
    for status in FINAL_4XX:
        assert judge(seen(returned=status), status, policy) == RETRYABLE
        assert judge(seen(raised=True), status, policy) == RETRYABLE
        assert judge(NOT_WRAPPED, status, policy) == RETRYABLE
        assert judge(RUNNING, status, policy) == UNKNOWN
        assert judge(CANCELLED, status, policy) == UNKNOWN
        assert judge(NEVER_ENTERED, status, policy) == DISCARDED


# ---------------------------------------------------------------- the handler's word

ENDINGS = [
    (evidence, status)
    for evidence in (seen(raised=True), seen(returned=402), seen(returned=503), RUNNING, NEVER_ENTERED, NOT_WRAPPED)
    for status in (None, 402, 409, 500, 503)
]


@pytest.mark.parametrize("effects", EFFECTS)
@pytest.mark.parametrize("on_server_error", ON_SERVER_ERROR)
def test_exception_of_the_handler_wins_over_the_declared_effects(
    effects: EffectsName, on_server_error: OnServerError
) -> None:
    policy = Policy(effects=effects, on_server_error=on_server_error)
    for evidence, status in ENDINGS:
        assert judge(evidence, status, policy, word="outcome_unknown") == UNKNOWN
        unused = DISCARDED if evidence is NEVER_ENTERED and status in (402, 409) else RETRYABLE
        assert judge(evidence, status, policy, word="not_executed") == unused
        assert judge(evidence, status, policy, word="refused") == DISCARDED
        assert judge(evidence, status, policy, word="refused", first_attempt=False) == RETRYABLE


@pytest.mark.parametrize("effects", EFFECTS)
def test_refused_after_a_verb_is_an_error_as_any_other(effects: EffectsName) -> None:
    policy = Policy(effects=effects)
    for evidence, status in ENDINGS:
        plain = judge(evidence, status, policy, begun=True)
        assert judge(evidence, status, policy, begun=True, word="refused") == plain


@pytest.mark.parametrize("effects", EFFECTS)
@pytest.mark.parametrize("word", ["refused", "not_executed"])
def test_word_of_a_second_call_says_nothing_of_the_first(effects: EffectsName, word: HandlerWord) -> None:
    """Middleware tried again: the first call may have charged."""
    policy = Policy(effects=effects)
    for status in (None, 402, 422, 500, 503):
        found = judge(seen(calls=2, raised=True), status, policy, word=word)
        assert found == (UNKNOWN if effects == "external" else RETRYABLE)


@pytest.mark.parametrize("word", ["refused", "not_executed"])
def test_success_in_place_of_a_raised_word_is_not_sent(word: HandlerWord) -> None:
    """``raise NotExecuted``, and an error handler answers 200: nothing happened, and the client must not read that it
    did."""
    for effects in EFFECTS:
        assert judge(seen(raised=True), 200, Policy(effects=effects), word=word) == RETRYABLE_OURS


def test_success_that_the_endpoint_returned_stands_against_its_word() -> None:
    for effects in EFFECTS:
        assert judge(seen(returned=201), 201, Policy(effects=effects), word="refused") == COMPLETED
        assert judge(seen(returned=201), 201, Policy(effects=effects), word="not_executed") == COMPLETED
    assert judge(seen(returned=201), 201, Policy(), word="outcome_unknown") == UNKNOWN_OURS


def test_refused_redirect_leaves_the_key_unused() -> None:
    assert judge(seen(returned=303), 303, Policy(), word="refused") == DISCARDED


# ---------------------------------------------------------------- an effect that may not be repeated is open


@pytest.mark.parametrize("effects", ["phased", "repeatable"])
def test_open_effect_makes_every_error_unknown(effects: EffectsName) -> None:
    """A success stands."""
    policy = Policy(effects=effects)
    for row, status in [(each, status) for each in TABLE for status in each.statuses]:
        found = judge(row.evidence, status, policy, begun=True, open_effect=True)
        if status is None or status >= 400:
            assert found == UNKNOWN, (row.what, status)
        elif (plain := judge(row.evidence, status, policy, begun=True)).event is Event.COMPLETE:
            assert found == plain, (row.what, status)
        else:
            assert found == UNKNOWN_OURS, (row.what, status)


def test_open_effect_of_a_request_that_was_not_executed_is_retryable() -> None:
    """The handler's own word about the whole request."""
    policy = Policy(effects="phased")
    assert judge(seen(raised=True), None, policy, word="not_executed", begun=True, open_effect=True) == RETRYABLE
