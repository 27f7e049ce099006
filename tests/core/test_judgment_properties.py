"""What holds for every end of an attempt: asked of all combinations of evidence, status, declaration and word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import pytest

from oncekey.core.evidence import Evidence
from oncekey.core.judgment import HandlerWord, Judgment, judge
from oncekey.core.policy import Policy
from oncekey.core.states import Actor, Event, State, find
from tests.core.test_judgment import EFFECTS, ON_SERVER_ERROR, seen

WORDS: tuple[HandlerWord | None, ...] = (None, *get_args(HandlerWord))


@dataclass(frozen=True, repr=False)
class Case:
    evidence: Evidence
    status: int | None
    policy: Policy
    word: HandlerWord | None
    first_attempt: bool
    begun: bool
    open_effect: bool

    def __repr__(self) -> str:
        evidence = vars(self.evidence)
        return f"{evidence} -> {self.status}, {self.policy}, {self.word=} {self.first_attempt=} {self.begun=}"


RETURNED = (200, 201, 303, 400, 401, 402, 408, 425, 429, 500, 503)
STATUSES = (None, 200, 303, 400, 402, 408, 429, 500, 503)
POLICIES: list[dict[str, Any]] = [
    *({"on_server_error": value} for value in ON_SERVER_ERROR),
    {"retryable_statuses": frozenset({408, 429, 503})},
    {"final_client_errors": False},
]


def every_evidence() -> Iterator[Evidence]:
    for covered, refused in product((True, False), repeat=2):
        yield seen(calls=0, covered=covered, refused=refused)
    for calls, covered in product((1, 2), (True, False)):
        yield seen(calls=calls, covered=covered)  # cancelled
        yield seen(calls=calls, running=1, covered=covered)
        for returned, running in product(RETURNED, range(calls)):
            yield seen(calls=calls, returned=returned, running=running, covered=covered)
        for status in (None, 200, 303, 402, 408, 429, 503):
            yield seen(calls=calls, raised=True, raised_status=status, covered=covered)


def every_case() -> Iterator[tuple[Case, Judgment]]:
    policies = [Policy(effects=effects, **declared) for effects in EFFECTS for declared in POLICIES]
    for evidence, status, policy, word, first in product(every_evidence(), STATUSES, policies, WORDS, (True, False)):
        for begun, open_effect in product((False, True), repeat=2):
            case = Case(evidence, status, policy, word, first, begun, open_effect)
            found = judge(
                evidence, status, policy, word=word, first_attempt=first, begun=begun, open_effect=open_effect
            )
            yield case, found


@pytest.fixture(scope="module")
def cases() -> list[tuple[Case, Judgment]]:
    return list(every_case())


Cases = list[tuple[Case, Judgment]]


def test_every_judgment_is_a_move_of_the_owner(cases: Cases) -> None:
    for event in {found.event for _, found in cases}:
        assert find(State.IN_PROGRESS, event, Actor.OWNER).event is event


def test_success_is_sent_only_if_it_is_stored_or_nothing_happened(cases: Cases) -> None:
    for case, found in cases:
        if case.status is not None and case.status < 400 and not found.ours:
            assert found.event is Event.COMPLETE or _unused(case, found), case


def test_answer_of_ours_replaces_only_a_success_that_is_not_stored(cases: Cases) -> None:
    for case, found in cases:
        if found.ours:
            assert case.status is not None, case
            assert case.status < 400, case
            assert found.event in (Event.RELEASE, Event.DOUBT), case


def test_stored_response_has_the_kind_of_its_event(cases: Cases) -> None:
    """Completed with a success, failed with an error; and a success is stored only with its rows."""
    for case, found in cases:
        if found.event is Event.COMPLETE:
            assert case.status is not None, case
            assert case.status < 400, case
            assert found.commits, case
        elif found.event is Event.FAIL:
            assert case.status is not None, case
            assert case.status >= 400, case


def test_transaction_is_committed_only_with_the_answer_that_says_so(cases: Cases) -> None:
    """Never with a retryable, unknown or unused key; and never for an endpoint that raised anything but a redirect."""
    for case, found in cases:
        if not found.commits:
            continue
        evidence, status = case.evidence, case.status
        assert found.event in (Event.COMPLETE, Event.FAIL), case
        returned = evidence.returned is not None and (evidence.returned < 500 or status is None)
        redirected = evidence.raised and evidence.raised_status == status == 303
        outside = not evidence.calls and status is not None and status < 400
        assert returned or redirected or outside, case


def test_key_is_discarded_only_by_a_first_attempt_that_did_nothing(cases: Cases) -> None:
    """Never after a verb, and after a call only by the word of that call."""
    for case, found in cases:
        if found.event is Event.DISCARD:
            assert case.first_attempt, case
            assert not case.begun, case
            assert not case.evidence.calls or (case.word == "refused" and case.evidence.calls == 1), case


def test_external_key_is_retryable_only_by_a_word_of_the_endpoint(cases: Cases) -> None:
    """Its own word, a status that is declared to be one, or a request that never reached it."""
    for case, found in cases:
        if case.policy.effects != "external" or found.event is not Event.RELEASE or _unused(case, found):
            continue
        if case.word in ("refused", "not_executed"):
            assert case.evidence.calls <= 1, case
            continue
        evidence, policy = case.evidence, case.policy
        assert not evidence.running, case
        assert evidence.calls <= 1, case
        own = {evidence.returned, evidence.raised_status}
        not_wrapped = not evidence.calls and not evidence.covered
        if not_wrapped or (not policy.final_client_errors and case.status not in policy.retryable_statuses):
            own.add(case.status)
        assert any(_says_retry(policy, status) for status in own if status is not None), case


def _says_retry(policy: Policy, status: int) -> bool:
    if status in policy.retryable_statuses:
        return True
    if status >= 500 or status == 408:
        return policy.on_server_error == "retry"
    return status >= 400 and not policy.final_client_errors


def test_open_effect_is_never_retryable_without_the_word_not_executed(cases: Cases) -> None:
    for case, found in cases:
        if case.open_effect and case.word != "not_executed":
            assert found.event in (Event.DOUBT, Event.COMPLETE), case


def test_outcome_unknown_is_never_anything_else(cases: Cases) -> None:
    for case, found in cases:
        if case.word == "outcome_unknown":
            assert found.event is Event.DOUBT, case


def test_success_without_an_endpoint_call_has_a_notice(cases: Cases) -> None:
    for case, found in cases:
        if not case.evidence.calls and found.event is Event.COMPLETE:
            assert found.notice is not None, case


def _unused(case: Case, found: Judgment) -> bool:
    """Discarded, or on a later attempt given back as it was: nothing of the operation happened in this one."""
    if case.begun or (case.evidence.calls and case.word != "refused"):
        return False
    return found.event is (Event.DISCARD if case.first_attempt else Event.RELEASE)
