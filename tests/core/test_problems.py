"""Every situation in every profile: statuses, valid JSON, the right headers, no key."""

from __future__ import annotations

import inspect
import math

import pytest

from oncekey.core.problems import (
    LONGEST_RETRY_SECONDS,
    PROFILES,
    THE_DRAFT,
    Answer,
    ProfileName,
    Situation,
    problem,
    replay_marker,
    tombstone_note,
)
from tests.core.problem_answers import STATUSES, body_of, each_profile, every, headers_of

KEY = "550e8400-e29b-41d4-a716-446655440000"
DOCS = "https://api.example.com/docs/idempotency"

WITH_RETRY_AFTER = {
    "not-comparable",
    "in-flight",
    "accepted",
    "outcome-unknown",
    "deferred",
    "limited",
    "store-unavailable",
    "not-stored",
    "not-executed",
    "not-finished",
    "status-retryable",
}
PROGRESS = {Situation.ACCEPTED: "in_progress", Situation.DEFERRED: "pending"}
"""202: no error in any profile."""
STRIPE_TYPES = {"idempotency_error", "invalid_request_error", "api_error"}


def test_the_expectations_cover_every_situation() -> None:
    """A situation that is added must be added to the literal table too."""
    assert set(STATUSES) == set(Situation)
    assert PROFILES == ("ietf", "stripe", "governance")


@every
def test_the_status_is_that_of_the_page(profile: ProfileName, situation: Situation) -> None:
    """The statuses, written down a second time."""
    assert problem(profile, situation).status == STATUSES[situation][PROFILES.index(profile)]


@every
def test_the_headers_describe_the_body(profile: ProfileName, situation: Situation) -> None:
    """Lower-case names, each once; the length is that of the body; nothing of it may be cached."""
    answer = problem(profile, situation, docs_url=DOCS, location="/status/1")
    names = [name.decode() for name, _ in answer.headers]
    headers = headers_of(answer)
    assert names == [name.lower() for name in names]
    assert len(names) == len(set(names))
    assert headers["content-length"] == str(len(answer.body))
    assert headers["cache-control"] == "no-store"
    is_problem = profile == "ietf" and situation not in PROGRESS
    assert headers["content-type"] == ("application/problem+json" if is_problem else "application/json")


@pytest.mark.parametrize("situation", [s for s in Situation if s not in PROGRESS])
def test_ietf_is_problem_details(situation: Situation) -> None:
    """RFC 9457: type, title, status and detail; the type is a URN of ours, and the status is the one sent."""
    answer = problem("ietf", situation)
    members = body_of(answer)
    assert list(members) == ["type", "title", "status", "detail"]
    assert members["type"] == f"urn:oncekey:problem:{situation}"
    assert members["status"] == answer.status
    assert members["title"]


@pytest.mark.parametrize("situation", [s for s in Situation if s not in PROGRESS])
def test_stripe_is_an_error_object(situation: Situation) -> None:
    """Type, code and message, with a type that Stripe's libraries know."""
    error = body_of(problem("stripe", situation))["error"]
    assert list(error) == ["type", "code", "message"]
    assert error["type"] in STRIPE_TYPES
    assert error["code"] == error["code"].lower()


def test_stripe_names_the_reuse_as_stripe_does() -> None:
    """Its libraries raise IdempotencyError for this type, and know this code for a key in flight."""
    assert body_of(problem("stripe", Situation.MISMATCH))["error"]["type"] == "idempotency_error"
    assert body_of(problem("stripe", Situation.IN_FLIGHT))["error"]["code"] == "idempotency_key_in_use"
    assert body_of(problem("stripe", Situation.STORE_UNAVAILABLE))["error"]["type"] == "api_error"


@pytest.mark.parametrize("situation", [s for s in Situation if s not in PROGRESS])
def test_governance_is_a_fault(situation: Situation) -> None:
    """faultId and traceId as given by the engine, and one error with a code of its own."""
    answer = problem("governance", situation, fault_id="f-1", trace_id='t"1')
    assert answer == problem("governance", situation, fault_id="f-1", trace_id='t"1'), "nothing is random"
    fault = body_of(answer)["fault"]
    assert (fault["faultId"], fault["traceId"]) == ("f-1", 't"1')
    (error,) = fault["errors"]
    assert list(error) == ["errorCode", "description"]
    assert error["errorCode"].replace("_", "").isupper()
    assert body_of(problem("governance", situation))["fault"]["faultId"] == ""


def test_mismatch_in_the_governance_profile_has_its_code_and_words() -> None:
    """The code and the first words that clients of the governance profile know."""
    (error,) = body_of(problem("governance", Situation.MISMATCH))["fault"]["errors"]
    assert error["errorCode"] == "IDEMPOTENCY_CONFLICT"
    assert error["description"].startswith("An Idempotency-Key may not be reused with a different request")


@each_profile
def test_titles_types_and_codes_are_distinct(profile: ProfileName) -> None:
    """A client can tell every situation from every other without reading sentences."""
    texts = [problem(profile, situation).body for situation in Situation]
    assert len(set(texts)) == len(texts)
    texts = [problem(profile, situation).body for situation in Situation if situation not in PROGRESS]
    if profile == "stripe":
        codes = [body_of(Answer(0, (), text)).get("error", {}).get("code") for text in texts]
        assert len(set(codes)) == len(codes)
    if profile == "governance":
        faults = [body_of(Answer(0, (), text)).get("fault") for text in texts]
        assert len({fault and fault["errors"][0]["errorCode"] for fault in faults}) == len(texts)


@every
def test_retry_after_is_where_a_retry_helps(profile: ProfileName, situation: Situation) -> None:
    """The table's Retry-After, whether or not the caller has a number; none where the request must change."""
    without = headers_of(problem(profile, situation)).get("retry-after")
    given = headers_of(problem(profile, situation, retry_after=7.0)).get("retry-after")
    if situation in WITH_RETRY_AFTER:
        assert (int(without or 0) >= 1, given) == (True, "7")
    elif situation in (Situation.REFUSED, Situation.REFUSED_LATE):
        assert (without, given) == (None, "7"), "a handler may refuse for a while"
    else:
        assert (without, given) == (None, None)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, 1), (-3.0, 1), (0.2, 1), (1.0, 1), (1.01, 2), (59.5, 60), (3600.0, 3600), (1e9, 86400)],
)
def test_retry_after_is_whole_seconds_rounded_up(seconds: float, shown: int) -> None:
    """Never zero, never a fraction, never beyond a day."""
    headers = headers_of(problem("ietf", Situation.UNKNOWN, retry_after=seconds))
    assert headers["retry-after"] == str(shown)


@pytest.mark.parametrize("seconds", [math.inf, math.nan])
def test_a_number_that_is_none_cannot_break_an_answer(seconds: float) -> None:
    """A bad policy or clock makes a long wait, not a 500."""
    headers = headers_of(problem("ietf", Situation.LIMITED, retry_after=seconds))
    assert headers["retry-after"] == str(LONGEST_RETRY_SECONDS)


@every
def test_no_answer_holds_a_key(profile: ProfileName, situation: Situation) -> None:
    """There is no way in for one; a Location that has it, as a status page may, stays out of the body."""
    assert not {"key", "body", "record", "request"} & set(inspect.signature(problem).parameters)
    answer = problem(profile, situation, location=f"/status/{KEY}", retry_after=1, docs_url=DOCS)
    assert KEY.encode() not in answer.body
    with_key = [name for name, value in headers_of(answer).items() if KEY in value]
    assert with_key == (["location"] if situation in PROGRESS else [])


@each_profile
@pytest.mark.parametrize(("situation", "state"), PROGRESS.items())
def test_202_is_no_error_and_names_the_state(profile: ProfileName, situation: Situation, state: str) -> None:
    """It says that the work goes on, and where to look."""
    answer = problem(profile, situation, retry_after=3, location="/jobs/7")
    assert (answer.status, body_of(answer)["state"]) == (202, state)
    assert set(body_of(answer)) == {"state", "title", "detail"}
    assert headers_of(answer)["location"] == "/jobs/7"
    assert headers_of(answer)["retry-after"] == "3"
    assert "location" not in headers_of(problem(profile, situation))


@each_profile
def test_a_401_has_a_challenge(profile: ProfileName) -> None:
    """RFC 9110 requires WWW-Authenticate; the app may name its own scheme; no other answer has one."""
    assert headers_of(problem(profile, Situation.NOT_AUTHENTICATED))["www-authenticate"] == "Bearer"
    basic = problem(profile, Situation.NOT_AUTHENTICATED, challenge='Basic realm="api"')
    assert headers_of(basic)["www-authenticate"] == 'Basic realm="api"'
    assert headers_of(problem(profile, Situation.SIGNATURE_INVALID))["www-authenticate"] == "Signature"
    assert "www-authenticate" not in headers_of(problem(profile, Situation.KEY_MISSING))


@every
def test_problems_link_to_the_docs_url(profile: ProfileName, situation: Situation) -> None:
    """With a docs_url every answer links to it, and the problem type is its section about the situation."""
    answer = problem(profile, situation, docs_url=DOCS)
    assert headers_of(answer)["link"] == f'<{DOCS}>; rel="describedby"'
    if profile == "ietf" and situation not in PROGRESS:
        assert body_of(answer)["type"] == f"{DOCS}#{situation}"
        in_folder = problem(profile, situation, docs_url=f"{DOCS}/")
        assert body_of(in_folder)["type"] == f"{DOCS}/{situation}"


def test_the_drafts_errors_are_linked_in_any_case() -> None:
    """The draft wants documentation with its three errors: without a page of the app's, its own."""
    for situation in Situation:
        link = headers_of(problem("ietf", situation)).get("link")
        expected = situation in (Situation.KEY_MISSING, Situation.MISMATCH, Situation.IN_FLIGHT)
        assert link == (f'<{THE_DRAFT}>; rel="describedby"' if expected else None)


@pytest.mark.parametrize("bad", ["/a\r\nset-cookie: x=1", "/a>; rel=next", "/\x00", "/käse", "/\ud800", '/"'])
def test_an_address_cannot_break_its_header(bad: str) -> None:
    """Line ends, angle brackets, quotes and whatever is not ASCII are percent-encoded."""
    answer = problem("ietf", Situation.DEFERRED, location=bad, docs_url=bad)
    headers = headers_of(answer)
    link = headers["link"].removeprefix("<").removesuffix('>; rel="describedby"')
    for value in (headers["location"], link):
        assert value.isascii()
        assert not set(value) & set('\r\n\x00<>"')


@pytest.mark.parametrize("status", [200, 302, 399, 500])
def test_a_refusal_is_a_4xx(status: int) -> None:
    """A refusal that looks like success or like our fault would be misread."""
    with pytest.raises(ValueError, match=str(status)):
        problem("ietf", Situation.REFUSED, status=status)


def test_no_caller_picks_another_status() -> None:
    """The profile is the only place that says what a mismatch is on the wire."""
    with pytest.raises(ValueError, match="mismatch"):
        problem("ietf", Situation.MISMATCH, status=409)


@each_profile
def test_constant_answers_are_built_once(profile: ProfileName) -> None:
    """The 409 of a hot key is the same object every time, also where ids are passed that are not used."""
    first = problem(profile, Situation.IN_FLIGHT, retry_after=0.2)
    assert problem(profile, Situation.IN_FLIGHT, retry_after=0.9) is first
    if profile != "governance":
        assert problem(profile, Situation.IN_FLIGHT, retry_after=1.0, fault_id="f", trace_id="t") is first
    assert problem(profile, Situation.IN_FLIGHT, detail="x") is not problem(profile, Situation.IN_FLIGHT, detail="x"), (
        "what a caller wrote is not kept in memory"
    )


def test_replay_markers_follow_the_profile() -> None:
    """In the governance profile the echoed key is the sign of a replay."""
    assert replay_marker("ietf") == (b"idempotency-replayed", b"true")
    assert replay_marker("stripe") == (b"idempotent-replayed", b"true")
    assert replay_marker("governance") is None


@each_profile
@pytest.mark.parametrize("status", [204, 205, 304])
def test_a_status_without_a_body_gets_none(profile: ProfileName, status: int) -> None:
    """A note after 204 would be read as the start of the next response."""
    note = tombstone_note(profile, status)
    assert (note.content_type, note.body) == ("", b"")


_RETRIED = {
    "in-flight",
    "accepted",
    "limited",
    "store-unavailable",
    "not-comparable",
    "not-stored",
    "not-executed",
    "not-finished",
    "failed",
}


@pytest.mark.parametrize("situation", Situation)
def test_stripe_profile_says_whether_a_retry_helps(situation: Situation) -> None:
    """Stripe's libraries follow ``Stripe-Should-Retry``; without it they retry every 409 and 5xx, and no 429."""
    said = dict(problem("stripe", situation).headers).get(b"stripe-should-retry")
    expected = None if situation is Situation.DEFERRED else b"true" if situation in _RETRIED else b"false"
    assert said == expected
    for profile in ("ietf", "governance"):
        assert b"stripe-should-retry" not in dict(problem(profile, situation).headers)


def test_stripe_profile_wants_a_retry_of_a_refusal_with_retry_after() -> None:
    refused = problem("stripe", Situation.REFUSED, status=429, retry_after=3)
    assert dict(refused.headers)[b"stripe-should-retry"] == b"true"
