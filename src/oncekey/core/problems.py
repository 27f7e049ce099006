"""Statuses and texts of the answers that oncekey itself sends.

Owns what the client reads: which status, which headers, which sentence, in each of three profiles. Must not decide
which situation a request is in (``decision.py``). It never gets a key or a body, so it cannot repeat one: the caller
must not put them into ``detail``, and ``reference`` is a masked key.

The profiles:

* ``ietf`` (default): draft-ietf-httpapi-idempotency-key-header with problem details (RFC 9457).
* ``stripe``: the statuses, the ``{"error": …}`` object and the ``Stripe-Should-Retry`` that Stripe's libraries read.
* ``governance``: the ``{"fault": …}`` object of many API guidelines.

Every message says what happened, what it means, and what to do. A caller's ``detail`` replaces only the first
part, so that no 409 can lose the advice to keep the key.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from functools import lru_cache
from typing import Literal, NamedTuple, get_args
from urllib.parse import quote

from oncekey.core.values import value

ProfileName = Literal["ietf", "stripe", "governance"]
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)

THE_DRAFT = "https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header"
"""The target of a Link if the app has no page of its own: the draft requires a link for its three errors."""

TAKEN_OVER = "Another attempt took this Idempotency-Key over while this one ran, and is still being processed."
WHICH_KEY = "Which key? It is at the end of the path, or the value of the Idempotency-Key header."
BODY_DROPPED = (
    "The body did not arrive, as can happen to a request that has an Upgrade header: send it without that header (in "
    "Java, choose HTTP_1_1). This request was not executed. Whether an earlier request with this key was executed was "
    "not checked."
)
"""Details: they replace the first sentence of an answer where more is known than the situation."""

LONGEST_RETRY_SECONDS = 86_400
"""The longest Retry-After. A client that must wait longer asks again after a day. It also bounds a wrong number."""


class Situation(StrEnum):
    """Why a request gets oncekey's own answer instead of the handler's."""

    KEY_MISSING = "key-missing"
    KEY_MALFORMED = "key-malformed"
    MISMATCH = "mismatch"
    IN_FLIGHT = "in-flight"
    ACCEPTED = "accepted"  # in flight, for routes with in_flight="accepted"
    UNKNOWN = "outcome-unknown"
    DEFERRED = "deferred"
    LIMITED = "limited"
    BODY_TOO_LARGE = "body-too-large"
    BODY_INCOMPLETE = "body-incomplete"
    STORE_UNAVAILABLE = "store-unavailable"  # before the handler: nothing happened
    UNREADABLE = "not-comparable"  # before the handler: a newer version wrote the row
    NOT_STORED = "not-stored"  # after the handler: it ran, and its answer could not be stored yet
    NOT_AUTHENTICATED = "not-authenticated"
    NOT_AUTHORIZED = "not-authorized"
    NOT_EXECUTED = "not-executed"  # nothing happened, in this attempt or in any before it
    NOT_FINISHED = "not-finished"  # finished steps stay done, and a retry with the same key resumes after them
    FAILED = "failed"  # the handler raised, an error handler of the app answered with a success, and it is not stored
    REFUSED = "refused"
    REFUSED_LATE = "refused-late"  # after the operation had begun: like any other 4xx of a handler
    STATUS_EXPIRED = "status-expired"
    STATUS_NOT_FOUND = "status-not-found"
    STATUS_RETRYABLE = "status-retryable"
    TIMED_OUT = "timed-out"  # stored by the reaper as the final answer of a deferred request


@value
class Answer:
    """A whole response, as it is sent. Header names are in lower case and include content-type and content-length."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@value
class Note:
    """Replaces a body that was not kept. It is empty for statuses that have no body."""

    content_type: str
    body: bytes


@value
class _Entry:
    statuses: tuple[int, int, int]  # ietf, stripe, governance
    title: str
    happened: str  # what happened and what it means
    advice: str  # what to do
    stripe: tuple[str, str]  # type, code
    fault: str
    retry_seconds: int | None = None  # Retry-After, if the caller gives none; None: this answer never has one


_SAME_KEY = "Keep the key: send the same request with the same Idempotency-Key after the time in Retry-After"
_NOT_LOOKED_UP = "This request was not executed. Whether an earlier request with this key was executed was not checked."
_INVALID, _IDEMPOTENCY, _API = "invalid_request_error", "idempotency_error", "api_error"
_S = Situation

# fmt: off
_ENTRIES: dict[Situation, _Entry] = {
    _S.KEY_MISSING: _Entry(
        (400, 400, 400), "Idempotency-Key is missing",
        "This operation requires an Idempotency-Key header, and the request has none: send it again with a "
        "new unique key, such as a UUID.",
        "This request was not executed. Use the same key for every retry of the same request.",
        (_INVALID, "idempotency_key_missing"), "IDEMPOTENCY_KEY_MISSING"),
    _S.KEY_MALFORMED: _Entry(
        (400, 400, 400), "Idempotency-Key is malformed",
        "The Idempotency-Key header is not one that this API takes: send one header with one unique value, "
        "such as a UUID.",
        "This request was not executed. Use the same key for every retry of the same request.",
        (_INVALID, "idempotency_key_malformed"), "IDEMPOTENCY_KEY_MALFORMED"),
    _S.MISMATCH: _Entry(
        (422, 400, 422), "Idempotency-Key is already used",
        "An Idempotency-Key may not be reused with a different request: this one was first used with another "
        "method, path, query, media type, body or precondition (If-Match). This request was not executed, and the "
        "first one is untouched.",
        "For a new operation use a new key; to repeat the first request, send it unchanged.",
        (_IDEMPOTENCY, "idempotency_key_reused"), "IDEMPOTENCY_CONFLICT"),
    _S.IN_FLIGHT: _Entry(
        (409, 409, 409), "A request is outstanding for this Idempotency-Key",
        "A request with this Idempotency-Key is still being processed. This one was not executed.",
        f"{_SAME_KEY}, and get the result of the first.",
        (_IDEMPOTENCY, "idempotency_key_in_use"), "IDEMPOTENCY_IN_PROGRESS", 1),
    _S.ACCEPTED: _Entry(
        (202, 202, 202), "The request is being processed",
        "A request with this Idempotency-Key is still being processed, and this answer is not its result.",
        f"{_SAME_KEY}, or ask the address in Location.",
        (_API, "idempotency_accepted"), "IDEMPOTENCY_ACCEPTED", 1),
    _S.UNKNOWN: _Entry(
        (409, 409, 409), "The outcome of this Idempotency-Key is not known yet",
        "A request with this Idempotency-Key, this one or an earlier one, may or may not have taken effect, so "
        "it is not executed again.",
        "Keep the key, since a new one could do the operation twice. The operator of this API settles the outcome, not "
        "the client, and then the same request with the same key gets it: ask again after the time in Retry-After. If "
        "it takes too long, contact the operator and give the reference that is in this answer.",
        (_IDEMPOTENCY, "idempotency_outcome_unknown"), "IDEMPOTENCY_OUTCOME_UNKNOWN", 60),
    _S.DEFERRED: _Entry(
        (202, 202, 202), "The request is accepted",
        "The request with this Idempotency-Key was accepted and is still being worked on.",
        f"{_SAME_KEY}, or ask the address in Location if there is one.",
        (_API, "idempotency_deferred"), "IDEMPOTENCY_DEFERRED", 2),
    _S.LIMITED: _Entry(
        (429, 429, 429), "Too many Idempotency-Keys",
        "This caller has used more keys than this API allows at once or in this time. This request was not executed.",
        f"{_SAME_KEY}.",
        (_INVALID, "rate_limit"), "IDEMPOTENCY_LIMIT_REACHED", 1),
    _S.BODY_TOO_LARGE: _Entry(
        (413, 413, 413), "The request body is too large",
        f"The body is larger than this operation takes under an Idempotency-Key. {_NOT_LOOKED_UP}",
        "Send a smaller body, with a new key.",
        (_INVALID, "request_too_large"), "IDEMPOTENCY_BODY_TOO_LARGE"),
    _S.BODY_INCOMPLETE: _Entry(
        (400, 400, 400), "The request body is incomplete",
        f"The body is not as long as its Content-Length says. {_NOT_LOOKED_UP}",
        "Send it again, whole, with the same key.",
        (_INVALID, "request_incomplete"), "IDEMPOTENCY_BODY_INCOMPLETE"),
    _S.STORE_UNAVAILABLE: _Entry(
        (503, 503, 503), "Idempotency cannot be guaranteed right now",
        "The store of Idempotency-Keys does not answer, so this request was not executed. Whether an "
        "earlier request with this key was executed is not known until the store answers.",
        f"{_SAME_KEY}.",
        (_API, "idempotency_store_unavailable"), "IDEMPOTENCY_STORE_UNAVAILABLE", 1),
    _S.UNREADABLE: _Entry(
        (503, 503, 503), "This Idempotency-Key cannot be compared right now",
        "A newer version of this API accepted an earlier request with this key. The version that answers now cannot "
        "compare the two requests, so this request was not executed.",
        f"{_SAME_KEY}.",
        (_API, "idempotency_not_comparable"), "IDEMPOTENCY_NOT_COMPARABLE", 5),
    _S.NOT_STORED: _Entry(
        (503, 503, 503), "The result could not be stored yet",
        "The request was worked on, but its result could not be stored, and no result is sent before it is "
        "stored. It may or may not have taken effect.",
        f"{_SAME_KEY}, and never with a new one, which could do the operation twice.",
        (_API, "idempotency_result_not_stored"), "IDEMPOTENCY_RESULT_NOT_STORED", 1),
    _S.NOT_AUTHENTICATED: _Entry(
        (401, 401, 401), "Authentication is required",
        "An Idempotency-Key belongs to an authenticated caller, and this request is not authenticated. Nothing was "
        "looked up or executed.",
        "Authenticate, and send the request again with the same key.",
        (_INVALID, "authentication_required"), "AUTHENTICATION_REQUIRED"),
    _S.NOT_AUTHORIZED: _Entry(
        (403, 403, 403), "This operation is not allowed",
        "This caller may not use this operation, with any Idempotency-Key. Nothing was looked up or executed.",
        "Send the request again with the same key when the permission is there.",
        (_INVALID, "not_authorized"), "NOT_AUTHORIZED"),
    _S.NOT_EXECUTED: _Entry(
        (503, 503, 503), "The request was not executed",
        "The operation could not be done right now, and it is certain that it had no effect.",
        f"{_SAME_KEY}.",
        (_API, "not_executed"), "NOT_EXECUTED", 1),
    _S.NOT_FINISHED: _Entry(
        (503, 503, 503), "The request is not finished",
        "This attempt ended without a result. What it or an earlier attempt has already done stays done.",
        f"{_SAME_KEY}, and never with a new one, which could do the operation twice.",
        (_API, "not_finished"), "NOT_FINISHED", 1),
    _S.FAILED: _Entry(
        (500, 500, 500), "The request ended in an error",
        "The operation ended in an error, and its result was not kept.",
        "Keep the key: the same request with the same Idempotency-Key tries again, and a new one could do the "
        "operation twice. If it fails again, contact the operator of this API.",
        (_API, "operation_failed"), "OPERATION_FAILED"),
    _S.REFUSED: _Entry(
        (422, 422, 422), "The request was refused",
        "The request was refused before the operation began.",
        "Nothing was executed: correct the request; the key is unused, so send it with the same one or a new one.",
        (_INVALID, "request_refused"), "REQUEST_REFUSED"),
    _S.REFUSED_LATE: _Entry(
        (422, 422, 422), "The request was refused while it was processed",
        "The request was refused after the operation had begun.",
        "The key stands for this request: look up what it has done before you send a corrected one, which needs "
        "a new key.",
        (_INVALID, "request_refused_late"), "REQUEST_REFUSED_LATE"),
    _S.STATUS_EXPIRED: _Entry(
        (410, 410, 410), "The Idempotency-Key has expired",
        "A request with this key has ended, and its result is no longer kept.",
        "Look for its result where this API lists it: a request with this key would be "
        "executed as a new one.",
        (_INVALID, "idempotency_key_expired"), "IDEMPOTENCY_KEY_EXPIRED"),
    _S.STATUS_NOT_FOUND: _Entry(
        (404, 404, 404), "No such Idempotency-Key",
        "No request of yours with this key is known here.",
        "Check the key, and the account that you are authenticated as. If the request was never received, send it "
        "with this key.",
        (_INVALID, "resource_missing"), "IDEMPOTENCY_KEY_NOT_FOUND"),
    _S.STATUS_RETRYABLE: _Entry(
        (409, 409, 409), "The request was not finished",
        "The last request with this Idempotency-Key ended without a result, or stopped in the middle. "
        "Asking again does not change that. Sending the request again does.",
        f"{_SAME_KEY}.",
        (_IDEMPOTENCY, "idempotency_key_retryable"), "IDEMPOTENCY_RETRYABLE", 1),
    _S.TIMED_OUT: _Entry(
        (408, 408, 408), "The request was not done in time",
        "The request was accepted, but it was not done before its Idempotency-Key expired. It was cancelled, and "
        "is not tried any more.",
        "Look up where this API lists it whether an earlier try took effect; if not, and it is still wanted, send "
        "it again with a new key.",
        (_API, "idempotency_timed_out"), "IDEMPOTENCY_TIMED_OUT"),
}
# fmt: on

_REFUSALS = frozenset({Situation.REFUSED, Situation.REFUSED_LATE})

_WORTH_A_RETRY = frozenset(
    {
        *(Situation.IN_FLIGHT, Situation.ACCEPTED, Situation.LIMITED, Situation.STORE_UNAVAILABLE),
        Situation.UNREADABLE,
        *(Situation.NOT_STORED, Situation.NOT_EXECUTED, Situation.NOT_FINISHED, Situation.FAILED),
    }
)
"""Answers with ``Stripe-Should-Retry: true``, which Stripe's libraries obey. By the status alone they retry every 409
and 5xx, no 429, and take a 202 for the result. UNKNOWN is not among these: the reconciler or an operator settles it,
minutes later."""

_STATES = {Situation.ACCEPTED: "in_progress", Situation.DEFERRED: "pending"}
"""The answers with 202, and the state of the key in their body. By that state a client distinguishes the two, and both
from a 202 of the app."""

_LINKED = frozenset({Situation.KEY_MISSING, Situation.MISMATCH, Situation.IN_FLIGHT})
"""The draft, section 2.7: these need a link to documentation, in the body or as a Link header."""


def problem(
    profile: ProfileName,
    situation: Situation,
    *,
    detail: str | None = None,
    retry_after: float | None = None,
    status: int | None = None,
    location: str | None = None,
    reference: str | None = None,
    docs_url: str | None = None,
    fault_id: str = "",
    trace_id: str = "",
    challenge: str = "Bearer",
) -> Answer:
    """The answer for a situation.

    ``retry_after`` is used if a retry makes sense, ``status`` only by refusals, ``location`` by ACCEPTED and DEFERRED,
    ``reference`` by UNKNOWN, ``challenge`` by NOT_AUTHENTICATED. ``fault_id`` and ``trace_id`` are for the governance
    profile; the caller makes them, since this module is pure. ``docs_url`` is the app's page about idempotency, or, if
    it ends in a slash, the folder with a page for each situation.
    """
    if situation in _REFUSALS:
        if status is not None and not 400 <= status < 500:
            raise ValueError(f"a refused request has a 4xx status, not {status}")
    elif status is not None:
        raise ValueError(f"the status of '{situation}' is given by the profile")
    ids = (fault_id, trace_id) if profile == "governance" else ("", "")
    wait = _whole_seconds(retry_after)
    asked = _Asked(profile, situation, wait, status, docs_url, challenge, detail, location, reference, *ids)
    if detail is None and location is None and reference is None and ids == ("", ""):
        return _constant(asked)  # duplicates of one key may get the same 409 thousands of times: build it once
    return _build(asked)


def replay_marker(profile: ProfileName) -> tuple[bytes, bytes] | None:
    """The header that marks a replay; None for governance, where the echoed key marks it."""
    return _MARKERS[profile]


_MARKERS: dict[ProfileName, tuple[bytes, bytes] | None] = {
    "ietf": (b"idempotency-replayed", b"true"),
    "stripe": (b"idempotent-replayed", b"true"),
    "governance": None,
}

_NOT_KEPT = (
    "The request with this Idempotency-Key was answered, and this is its status; the body of its response "
    "was not kept (too large, or streamed) or can no longer be read. It was not executed again: look up the "
    "result where this API lists it."
)


@lru_cache(maxsize=256)
def tombstone_note(profile: ProfileName, status: int) -> Note:
    """The body for the replay of a tombstone. The caller adds the first ``status`` and the stored headers.

    It must leave out headers that describe the lost body (content-encoding, etag, content-disposition).
    """
    if status < 200 or status in (204, 205, 304):
        return Note("", b"")
    members: dict[str, object]
    if profile == "ietf":
        members = {"type": "urn:oncekey:problem:body-not-kept", "title": "The response body was not kept"}
        members |= {"status": status, "detail": _NOT_KEPT}
        return Note("application/problem+json" if status >= 400 else "application/json", _json(members))
    if profile == "stripe":
        note = {"code": "idempotency_body_not_kept", "message": _NOT_KEPT}
        members = {"object": "idempotency_tombstone", **note}
        if status >= 400:
            members = {"error": {"type": _API, **note}}
    else:
        error = {"errorCode": "IDEMPOTENCY_BODY_NOT_KEPT", "description": _NOT_KEPT}
        members = _fault("", "", error) if status >= 400 else {"notice": error}
    return Note("application/json", _json(members))


def _whole_seconds(seconds: float | None) -> int | None:
    """Rounded up, at least 1: with ``Retry-After: 0`` a client would retry without a pause."""
    if seconds is None:
        return None
    if not seconds < LONGEST_RETRY_SECONDS:  # NaN and infinity end here too
        return LONGEST_RETRY_SECONDS
    return max(1, math.ceil(seconds))


class _Asked(NamedTuple):
    """The checked arguments of :func:`problem`: the key of the cache."""

    profile: ProfileName
    situation: Situation
    wait: int | None
    status: int | None
    docs_url: str | None
    challenge: str
    detail: str | None
    location: str | None
    reference: str | None
    fault_id: str
    trace_id: str


def _build(asked: _Asked) -> Answer:
    profile, situation, wait = asked.profile, asked.situation, asked.wait
    entry = _ENTRIES[situation]
    status = asked.status or entry.statuses[PROFILES.index(profile)]
    message = f"{_sentence(asked.detail) if asked.detail else entry.happened} {entry.advice}"
    docs = _in_header(asked.docs_url) if asked.docs_url else None
    reference = {} if asked.reference is None else {"reference": asked.reference}
    content_type = "application/json"
    members: dict[str, object]
    if (state := _STATES.get(situation)) is not None:  # not an error, so no profile uses its error object
        members = {"state": state, "title": entry.title, "detail": message}
    elif profile == "ietf":
        content_type = "application/problem+json"
        members = {"type": _type(situation, docs), "title": entry.title, "status": status, "detail": message}
        members |= reference
    elif profile == "stripe":
        error = {"type": entry.stripe[0], "code": entry.stripe[1], "message": message}
        members = {"error": error | ({"doc_url": docs} if docs else {}) | reference}
    else:
        error = {"errorCode": entry.fault, "description": message} | reference
        members = _fault(asked.fault_id, asked.trace_id, error)
    body = _json(members)
    # Caches may store 404 and 410 by default (RFC 9111), and each of these answers can change soon.
    headers = [
        ("content-type", content_type),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
    ]
    if entry.retry_seconds is not None or (situation in _REFUSALS and wait is not None):
        headers.append(("retry-after", str(entry.retry_seconds if wait is None else wait)))
    if profile == "stripe" and situation is not Situation.DEFERRED:  # Stripe's libraries must not retry that 202
        again = situation in _WORTH_A_RETRY or (situation in _REFUSALS and wait is not None)
        headers.append(("stripe-should-retry", "true" if again else "false"))
    if docs or (profile == "ietf" and situation in _LINKED):
        headers.append(("link", f'<{docs or THE_DRAFT}>; rel="describedby"'))
    if situation is Situation.NOT_AUTHENTICATED:
        headers.append(("www-authenticate", asked.challenge))
    if asked.location and situation in _STATES:
        headers.append(("location", _in_header(asked.location)))
    return Answer(status, tuple([(name.encode(), text.encode("latin-1")) for name, text in headers]), body)


_constant = lru_cache(maxsize=512)(_build)


def _sentence(words: str) -> str:
    return words if words.endswith((".", "!", "?", "…")) else f"{words}."


def _type(situation: Situation, docs: str | None) -> str:
    if docs is None:
        return f"urn:oncekey:problem:{situation}"
    return f"{docs}{situation}" if docs.endswith("/") else f"{docs.partition('#')[0]}#{situation}"


def _fault(fault_id: str, trace_id: str, error: dict[str, str]) -> dict[str, object]:
    return {"fault": {"faultId": fault_id, "traceId": trace_id, "errors": [error]}}


def _in_header(url: str) -> str:
    """The URL, quoted so that it can end neither its header nor its angle brackets."""
    return quote(url, safe="/:?#[]@!$&'()*+,;=%-._~", errors="replace")


def _json(members: dict[str, object]) -> bytes:
    # ASCII only, by the standard library: it accepts every text that a handler or a trace header contains.
    return json.dumps(members, separators=(",", ":")).encode("ascii")
