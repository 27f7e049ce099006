"""What the wrapped endpoint reports is kept as it was: per call, without what a call before it said."""

from __future__ import annotations

import asyncio

import pytest

from oncekey import NotExecuted, OutcomeUnknown, Refused
from oncekey.core.evidence import Evidence, leaves
from oncekey.errors import StoreUnavailable


def test_call_that_runs_has_neither_returned_nor_raised() -> None:
    evidence = Evidence()
    evidence.entered()
    assert (evidence.calls, evidence.running, evidence.returned, evidence.raised) == (1, 1, None, False)


def test_call_that_returned_is_kept_with_its_status() -> None:
    evidence = Evidence()
    evidence.entered()
    evidence.returned_with(201)
    assert (evidence.calls, evidence.running, evidence.returned, evidence.raised) == (1, 0, 201, False)


def test_call_that_raised_is_kept_with_the_status_of_its_exception() -> None:
    evidence = Evidence()
    evidence.entered()
    evidence.raised_with(ValueError(), 402)
    assert (evidence.running, evidence.returned, evidence.raised, evidence.raised_status) == (0, None, True, 402)
    assert (evidence.raised_name, evidence.error) == ("ValueError", None)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt()])
def test_call_that_was_cancelled_has_neither_returned_nor_raised(error: BaseException) -> None:
    """A response after that is sent in the endpoint's place."""
    evidence = Evidence()
    evidence.entered()
    evidence.raised_with(error, None)
    assert (evidence.calls, evidence.running, evidence.returned, evidence.raised) == (1, 0, None, False)


def test_later_call_replaces_the_evidence_of_an_earlier_one() -> None:
    evidence = Evidence()
    evidence.entered()
    evidence.raised_with(NotExecuted("closed"), 503)
    evidence.entered()
    assert (evidence.calls, evidence.running, evidence.raised) == (2, 1, False)
    assert (evidence.raised_status, evidence.returned, evidence.error) == (None, None, None)
    evidence.returned_with(402)
    evidence.entered()
    assert evidence.returned is None


@pytest.mark.parametrize("error", [Refused("no"), NotExecuted(), OutcomeUnknown(), StoreUnavailable("down")])
def test_first_error_that_speaks_to_us_is_kept(error: Exception) -> None:
    evidence = Evidence()
    evidence.heard(error)
    evidence.heard(OutcomeUnknown("another"))
    assert evidence.error is error


def test_other_errors_leave_only_their_name() -> None:
    """A traceback holds the request, and what is in it."""
    evidence = Evidence()
    evidence.heard(ConnectionError("with a secret"))
    assert (evidence.error, evidence.raised_name) == (None, "ConnectionError")


def test_refused_names_its_status() -> None:
    evidence = Evidence()
    evidence.entered()
    evidence.raised_with(Refused("slower", status=429), None)
    assert evidence.raised_status == 429


def test_validation_refuses_only_before_the_endpoint_is_entered() -> None:
    evidence = Evidence()
    evidence.refused_by_validation()
    assert evidence.refused
    entered = Evidence()
    entered.entered()
    entered.refused_by_validation()
    assert not entered.refused


def test_exception_that_left_another_attempt_does_not_speak_for_this_one() -> None:
    inner, outer, error = Evidence("a-1"), Evidence("a-2"), NotExecuted("nothing happened")
    inner.entered()
    inner.raised_with(error, None)
    leaves(error, "a-1")
    leaves(error, "a-2")  # it left the first one before
    outer.entered()
    outer.raised_with(error, 429)
    assert (inner.error, outer.error, outer.raised_status) == (error, None, None)
    assert (inner.speaks(error), outer.speaks(error)) == (True, False)
    assert outer.raised_name == "NotExecuted (of another protected operation)"


def test_store_error_is_answered_by_every_attempt_that_gets_it() -> None:
    """One object goes to all attempts of a batch."""
    error = StoreUnavailable("down")
    leaves(error, "a-1")
    assert Evidence("a-2").speaks(error)
