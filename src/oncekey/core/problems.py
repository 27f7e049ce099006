"""The answers that oncekey itself sends: status, headers and body, in each of three profiles.

The sentences are in ``problem_texts.py``. This module must not decide which situation a request is in
(``decision.py``). It never gets a key or a body, so it cannot repeat one: the caller must not put them into
``detail``, and ``reference`` is a masked key.

The profiles:

* ``ietf`` (default): draft-ietf-httpapi-idempotency-key-header with problem details (RFC 9457).
* ``stripe``: the statuses, the ``{"error": …}`` object and the ``Stripe-Should-Retry`` that Stripe's libraries read.
* ``governance``: the ``{"fault": …}`` object of many API guidelines.

A caller's ``detail`` replaces only the first part of a message, so that no 409 can lose the advice to keep the key.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Literal, NamedTuple, get_args
from urllib.parse import quote

from oncekey.core.problem_texts import (
    API_ERROR,
    BODY_DROPPED,
    BODY_NOT_KEPT,
    BODY_NOT_READABLE,
    ENTRIES,
    OF_A_BOUND_KEY,
    TAKEN_OVER,
    WHICH_KEY,
    Situation,
)
from oncekey.core.values import value

__all__ = [
    "BODY_DROPPED",
    "LONGEST_RETRY_SECONDS",
    "OF_A_BOUND_KEY",
    "PROFILES",
    "TAKEN_OVER",
    "THE_DRAFT",
    "WHICH_KEY",
    "Answer",
    "Note",
    "ProfileName",
    "Situation",
    "problem",
    "replay_marker",
    "tombstone_note",
]

ProfileName = Literal["ietf", "stripe", "governance"]
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)

THE_DRAFT = "https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header"
"""The target of a Link if the app has no page of its own: the draft requires a link for its three errors."""

LONGEST_RETRY_SECONDS = 86_400
"""The longest Retry-After. A client that must wait longer asks again after a day. It also bounds a wrong number."""


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


@lru_cache(maxsize=256)
def tombstone_note(profile: ProfileName, status: int, *, kept: bool = False) -> Note:
    """The body for the replay of a tombstone. The caller adds the first ``status`` and the stored headers.

    ``kept``: the store has the body, and this process cannot read it.
    It must leave out headers that describe the lost body (content-encoding, etag, content-disposition).
    """
    if status < 200 or status in (204, 205, 304):
        return Note("", b"")
    words = BODY_NOT_READABLE if kept else BODY_NOT_KEPT
    members: dict[str, object]
    if profile == "ietf":
        title = "The response body cannot be read right now" if kept else "The response body was not kept"
        members = {"type": "urn:oncekey:problem:body-not-kept", "title": title, "status": status, "detail": words}
        return Note("application/problem+json" if status >= 400 else "application/json", _json(members))
    if profile == "stripe":
        note = {"code": "idempotency_body_not_kept", "message": words}
        members = {"object": "idempotency_tombstone", **note}
        if status >= 400:
            members = {"error": {"type": API_ERROR, **note}}
    else:
        error = {"errorCode": "IDEMPOTENCY_BODY_NOT_KEPT", "description": words}
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
    entry = ENTRIES[situation]
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
    if status == 401:
        signature = situation is Situation.SIGNATURE_INVALID
        headers.append(("www-authenticate", "Signature" if signature else asked.challenge))
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
