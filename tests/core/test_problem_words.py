"""The words of problems: what a client reads, and what it must not read."""

from __future__ import annotations

import json

import pytest

from oncekey.core.header import BadKey, parse_key
from oncekey.core.problems import (
    ProfileName,
    Situation,
    problem,
    tombstone_note,
)
from tests.core.problem_answers import STATUSES, body_of, each_profile, every, message_of


@each_profile
@pytest.mark.parametrize("situation", [s for s in Situation if STATUSES[s][0] == 409])
@pytest.mark.parametrize("detail", [None, "Something in particular."])
def test_every_409_says_to_keep_the_key(profile: ProfileName, situation: Situation, detail: str | None) -> None:
    """Also when the caller brings a detail of its own, which comes first."""
    message = message_of(profile, problem(profile, situation, detail=detail))
    assert "Keep the key" in message
    assert detail is None or message.startswith(detail)


@each_profile
@pytest.mark.parametrize("situation", [s for s in Situation if STATUSES[s][0] == 503])
def test_every_503_says_to_keep_the_key(profile: ProfileName, situation: Situation) -> None:
    """A client that took a new key after a 503 would run the operation twice."""
    assert "same Idempotency-Key" in message_of(profile, problem(profile, situation))


def test_not_finished_does_not_say_that_work_was_done() -> None:
    """Attempts of a transactional route are rolled back, so a retry may find nothing of them."""
    message = message_of("ietf", problem("ietf", Situation.NOT_FINISHED))
    assert "may have done a part" in message
    assert "stays done" not in message


def test_two_keys_in_one_header_are_told_that_a_comma_separates_them() -> None:
    with pytest.raises(BadKey, match=r"a comma separates two keys in this header.* must be in double quotes"):
        parse_key([b"a,b"])
    assert parse_key([b'"a,b"']) == "a,b"


def test_not_executed_is_said_only_before_the_handler_ran() -> None:
    """Before the handler nothing ran; after it, with the result not stored, this is not certain."""
    assert "not executed" in message_of("ietf", problem("ietf", Situation.STORE_UNAVAILABLE))
    assert "no effect" in message_of("ietf", problem("ietf", Situation.NOT_EXECUTED))
    after = message_of("ietf", problem("ietf", Situation.NOT_STORED))
    assert "may or may not have taken effect" in after
    assert "not executed" not in after
    assert "executed" not in message_of("ietf", problem("ietf", Situation.NOT_FINISHED))
    # Of a key that was not looked up only this request can be spoken of: an earlier one may have been executed.
    saying = {s for s in Situation if "Nothing was executed" in message_of("ietf", problem("ietf", s))}
    assert saying == {Situation.REFUSED}


@each_profile
def test_unknown_problem_tells_the_client_what_to_do_and_names_no_setting(profile: ProfileName) -> None:
    """The developer's hint is a line in the log (web/endings.py)."""
    message = message_of(profile, problem(profile, Situation.UNKNOWN))
    for words in ("Keep the key", "The operator of this API settles the outcome", "contact the operator"):
        assert words in message


@every
def test_no_message_speaks_of_our_settings(profile: ProfileName, situation: Situation) -> None:
    message = message_of(profile, problem(profile, situation))
    for word in ("effects=", "Policy", "on_server_error", "developer", "resolver"):
        assert word not in message


@every
def test_every_message_is_made_of_sentences(profile: ProfileName, situation: Situation) -> None:
    """At least two: what happened, and what to do."""
    message = message_of(profile, problem(profile, situation))
    assert message.endswith(".")
    assert message.count(". ") >= 1
    assert "  " not in message


@each_profile
def test_a_refusal_has_the_status_and_words_of_the_handler(profile: ProfileName) -> None:
    """Any 4xx, with its detail first; the advice is to take a new key, and nothing was executed."""
    answer = problem(profile, Situation.REFUSED, status=415, detail="Only \u20ac or \ud800 is taken.")
    assert answer.status == 415
    message = message_of(profile, answer)
    assert message.startswith("Only \u20ac or \ud800 is taken.")
    assert "Nothing was executed" in message
    if profile == "ietf":
        assert body_of(answer)["status"] == 415


@each_profile
def test_a_late_refusal_does_not_say_that_nothing_was_executed(profile: ProfileName) -> None:
    """Nor that the key is unused. What the handler said becomes a sentence if it is none."""
    message = message_of(profile, problem(profile, Situation.REFUSED_LATE, status=409, detail="Sold out"))
    assert message.startswith("Sold out. ")
    assert "needs a new key" in message
    assert "executed" not in message
    assert "unused" not in message


def test_the_words_of_a_bad_key_fit_in() -> None:
    """The header's own sentence comes first and stands once."""
    sentence = str(BadKey("too_long", max_length=255))
    message = message_of("ietf", problem("ietf", Situation.KEY_MALFORMED, detail=sentence))
    assert message.removeprefix(sentence).startswith(" This request was not executed.")
    assert message.count(sentence) == 1


@each_profile
@pytest.mark.parametrize("status", [200, 201, 404, 500])
def test_a_tombstone_says_that_the_body_was_not_kept(profile: ProfileName, status: int) -> None:
    """JSON in the profile's manner: an error object only for an error."""
    note = tombstone_note(profile, status)
    members = json.loads(note.body)
    assert "was not kept" in note.body.decode()
    assert "not executed again" in note.body.decode()
    failed = status >= 400
    is_problem = failed and profile == "ietf"
    assert note.content_type == ("application/problem+json" if is_problem else "application/json")
    if profile == "ietf":
        assert members["status"] == status
    elif profile == "stripe":
        assert ("error" in members) == failed
    else:
        assert ("fault" in members) == failed


@each_profile
def test_note_in_place_of_a_kept_body_that_cannot_be_read_says_to_ask_later(profile: ProfileName) -> None:
    words = tombstone_note(profile, 201, kept=True).body.decode()
    assert "cannot be read right now" in words
    assert "with the same key later" in words
    assert "too large" not in words
    assert not any(setting in words for setting in ("encrypt", "keyring", "version"))
    assert "too large or streamed" in tombstone_note(profile, 201).body.decode()
