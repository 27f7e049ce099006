"""The decision table, cell by cell, and that every answer has a row."""

from __future__ import annotations

import pytest

from oncekey.client.decisions import TABLE, Act, Intent, Kind, Seen
from oncekey.client.reading import answer_of, seen
from oncekey.core.problems import PROFILES, ProfileName, Situation, problem

URL = "https://api.example.com/payments"

# what a try brought -> with a key | idempotent method | neither | the intent is then
EXPECTED = """
not connected                               | send again | send again | send again | open
connection lost                             | send again | send again | hand back  | open
timed out                                   | send again | send again | hand back  | open
1xx                                         | hand back  | hand back  | hand back  | open
2xx                                         | hand back  | hand back  | hand back  | answered
202, not the result yet                     | ask again  | hand back  | hand back  | open
307 or 308, same origin                     | follow     | hand back  | hand back  | open
redirect that would need the key elsewhere  | raise RedirectRefused | hand back | hand back | open
redirect to a GET                           | hand back  | hand back  | hand back  | answered
other 3xx                                   | hand back  | hand back  | hand back  | answered
400, spelling of the key                    | spell the key the other way | hand back | hand back | open
400, body incomplete                        | send again | send again | hand back  | open
400 or 413, before the key was looked up    | hand back  | hand back  | hand back  | open
401, 403, 407                               | hand back  | hand back  | hand back  | open
409, in flight                              | ask again  | hand back  | hand back  | open
409, outcome unknown                        | raise OutcomeUnsettled | hand back | hand back | open
422, key used for another request           | hand back  | hand back  | hand back  | open
408, 425, 429, 500, 502, 503, 504           | send again | send again | hand back  | open
one of these, as the stored answer          | hand back  | hand back  | hand back  | answered
other 4xx                                   | hand back  | hand back  | hand back  | answered
other 5xx                                   | hand back  | hand back  | hand back  | open
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in EXPECTED.strip().splitlines()]


def test_table_has_a_row_for_everything_that_a_try_can_bring() -> None:
    assert set(TABLE) == set(Seen)
    assert [Seen(row[0]) for row in ROWS] == list(Seen)


@pytest.mark.parametrize(
    ("brought", "kind", "act"),
    [(Seen(row[0]), kind, Act(cell)) for row in ROWS for kind, cell in zip(Kind, row[1:4], strict=True)],
)
def test_cell_of_the_table(brought: Seen, kind: Kind, act: Act) -> None:
    assert TABLE[brought].act(kind) is act


@pytest.mark.parametrize(("brought", "then"), [(Seen(row[0]), Intent(row[4])) for row in ROWS])
def test_intent_is_answered_only_by_what_proves_its_outcome(brought: Seen, then: Intent) -> None:
    assert TABLE[brought].intent is then


def plain(status: int) -> Seen:
    """What a bare answer with this status is."""
    groups = {1: Seen.INTERIM, 2: Seen.SUCCESS, 3: Seen.OTHER_3XX, 4: Seen.OTHER_4XX}
    special = dict.fromkeys((408, 425, 429, 500, 502, 503, 504), Seen.TRY_LATER)
    special |= dict.fromkeys((401, 403, 407), Seen.NOT_ALLOWED)
    return special.get(status, groups.get(status // 100, Seen.OTHER_5XX))


@pytest.mark.parametrize("method", ["POST", "PATCH", "GET"])
def test_every_status_without_a_word_more_has_its_row(method: str) -> None:
    for status in range(100, 600):
        assert seen(answer_of(status, [], b""), method, URL) is plain(status), status


@pytest.mark.parametrize("marker", ["Idempotency-Replayed", "Idempotent-Replayed"])
def test_stored_answer_is_never_retried(marker: str) -> None:
    for status in range(400, 600):
        brought = seen(answer_of(status, [(marker, "true"), ("Retry-After", "1")], b""), "POST", URL)
        assert brought in (Seen.REPLAYED, Seen.NOT_ALLOWED, Seen.OTHER_4XX, Seen.OTHER_5XX), status
        assert TABLE[brought].keyed is Act.RETURN


# location, status, method -> row
REDIRECTS = [
    ("/elsewhere", 307, "POST", Seen.SAME_ORIGIN),
    ("https://api.example.com:443/x", 308, "PATCH", Seen.SAME_ORIGIN),
    ("https://API.example.com/x", 308, "POST", Seen.SAME_ORIGIN),
    ("https://api.example.com:8443/x", 307, "POST", Seen.OTHER_ORIGIN),
    ("http://api.example.com/x", 308, "POST", Seen.OTHER_ORIGIN),
    ("https://evil.example/x", 307, "POST", Seen.OTHER_ORIGIN),
    ("//evil.example/x", 307, "POST", Seen.OTHER_ORIGIN),
    ("https://api.example.com@evil.example/x", 307, "POST", Seen.OTHER_ORIGIN),
    ("https://api.example.com:nonsense/x", 307, "POST", Seen.OTHER_ORIGIN),
    ("/x", 303, "POST", Seen.SEE_OTHER),
    ("/x", 303, "PATCH", Seen.SEE_OTHER),
    ("https://evil.example/x", 303, "POST", Seen.SEE_OTHER),
    ("/x", 301, "POST", Seen.SEE_OTHER),
    ("/x", 302, "POST", Seen.SEE_OTHER),
    ("/x", 301, "PATCH", Seen.OTHER_ORIGIN),
    ("/x", 302, "PATCH", Seen.OTHER_ORIGIN),
    ("/x", 300, "POST", Seen.OTHER_3XX),
    ("/x", 304, "POST", Seen.OTHER_3XX),
]


@pytest.mark.parametrize(("location", "status", "method", "row"), REDIRECTS)
def test_redirect_has_its_row(location: str, status: int, method: str, row: Seen) -> None:
    assert seen(answer_of(status, [("Location", location)], b""), method, URL) is row


OURS = {
    Situation.KEY_MISSING: Seen.NOT_LOOKED_UP,
    Situation.KEY_MALFORMED: Seen.KEY_REFUSED,
    Situation.KEY_PERSONAL: Seen.NOT_LOOKED_UP,
    Situation.MISMATCH: Seen.KEY_REUSED,
    Situation.IN_FLIGHT: Seen.IN_FLIGHT,
    Situation.ACCEPTED: Seen.ACCEPTED,
    Situation.UNKNOWN: Seen.UNKNOWN,
    Situation.DEFERRED: Seen.ACCEPTED,
    Situation.LIMITED: Seen.TRY_LATER,
    Situation.BODY_TOO_LARGE: Seen.NOT_LOOKED_UP,
    Situation.BODY_INCOMPLETE: Seen.INCOMPLETE,
    Situation.STORE_UNAVAILABLE: Seen.TRY_LATER,
    Situation.UNREADABLE: Seen.TRY_LATER,
    Situation.ANSWER_LOST: Seen.UNKNOWN,
    Situation.NOT_STORED: Seen.TRY_LATER,
    Situation.NOT_AUTHENTICATED: Seen.NOT_ALLOWED,
    Situation.NOT_AUTHORIZED: Seen.NOT_ALLOWED,
    Situation.NOT_EXECUTED: Seen.TRY_LATER,
    Situation.NOT_FINISHED: Seen.TRY_LATER,
    Situation.FAILED: Seen.TRY_LATER,
    Situation.REFUSED: Seen.OTHER_4XX,
    Situation.REFUSED_LATE: Seen.OTHER_4XX,
    Situation.STATUS_EXPIRED: Seen.OTHER_4XX,
    Situation.STATUS_NOT_FOUND: Seen.OTHER_4XX,
    Situation.STATUS_RETRYABLE: Seen.IN_FLIGHT,
    Situation.TIMED_OUT: Seen.TRY_LATER,  # it is sent with the replay marker, and then it is REPLAYED
}


# A situation that is not above is what its status is.
@pytest.mark.parametrize("docs", [None, "https://api.example.com/docs", "https://api.example.com/docs/"])
@pytest.mark.parametrize("profile", PROFILES)
def test_answer_of_oncekey_is_recognised_in_every_profile(profile: ProfileName, docs: str | None) -> None:
    for situation in Situation:
        sent = problem(profile, situation, docs_url=docs)
        headers = [(name.decode(), text.decode()) for name, text in sent.headers]
        expected = OURS.get(situation, plain(sent.status))
        assert seen(answer_of(sent.status, headers, sent.body), "POST", URL) is expected, situation


# status, headers, body -> row: other servers
OTHERS = [
    (409, {}, b"", Seen.OTHER_4XX),
    (409, {}, b'{"error": "this address is taken"}', Seen.OTHER_4XX),
    (409, {"Retry-After": "2"}, b"", Seen.IN_FLIGHT),
    (409, {"Stripe-Should-Retry": "true"}, b"", Seen.IN_FLIGHT),
    (409, {"Stripe-Should-Retry": "false", "Retry-After": "2"}, b"", Seen.OTHER_4XX),
    (409, {}, b'{"type": "x:y", "title": "A request is outstanding for this Idempotency-Key"}', Seen.IN_FLIGHT),
    (409, {}, b'{"error": {"code": "idempotency_key_in_use"}}', Seen.IN_FLIGHT),
    (400, {}, b'{"error": {"type": "idempotency_error", "code": "something else"}}', Seen.OTHER_4XX),
    (422, {}, b"[" * 10_000, Seen.OTHER_4XX),
    (409, {}, b'{"type":' * 5_000, Seen.OTHER_4XX),
    (409, {}, b'{"type": "urn:oncekey:problem:in-flight", "x": "' + b"y" * 70_000 + b'"}', Seen.OTHER_4XX),
    (409, {}, b'{"fault": {"errors": []}}', Seen.OTHER_4XX),
    (202, {}, b'{"state": "pending"}', Seen.SUCCESS),
    (202, {"Retry-After": "2"}, b'{"id": "job-1"}', Seen.SUCCESS),
    (202, {"Retry-After": "2"}, b'{"state": "shipped"}', Seen.SUCCESS),
    # of a server that knows the key: the handler's own 202 of a deferred request, and the stored one
    (202, {"Retry-After": "2", "Idempotency-Key": "k"}, b'{"id": "job-1"}', Seen.ACCEPTED),
    (202, {"Retry-After": "2", "Idempotency-Key": "k", "Idempotency-Replayed": "true"}, b"{}", Seen.SUCCESS),
    (202, {"Idempotency-Key": "k"}, b'{"id": "job-1"}', Seen.SUCCESS),
]  # fmt: skip


@pytest.mark.parametrize(("status", "headers", "body", "row"), OTHERS)
def test_answer_of_another_server_has_its_row(status: int, headers: dict[str, str], body: bytes, row: Seen) -> None:
    assert seen(answer_of(status, headers.items(), body), "POST", URL) is row
