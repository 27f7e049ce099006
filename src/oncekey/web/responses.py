"""What every web integration shares: turns decisions and records into status, headers and body.

Owns which headers are stored and replayed, and the headers that oncekey adds. ``core/problems.py`` owns texts and
statuses; each integration sends the bytes to its server.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from functools import lru_cache
from typing import Protocol
from urllib.parse import quote
from uuid import uuid4

from oncekey.core.binding import binding_of
from oncekey.core.decision import Busy, Decision, Deferred, Mismatch, Replay, TurnedAway, Unknown, Unreadable
from oncekey.core.header import parse_key
from oncekey.core.policy import Policy
from oncekey.core.problems import OF_A_BOUND_KEY, Answer, ProfileName, Situation, problem, replay_marker, tombstone_note
from oncekey.core.record import RESPONSE_SCHEMA_VERSION, Record, StoredResponse
from oncekey.core.states import State
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import ConfigurationError, NotAuthenticated, NotAuthorized
from oncekey.telemetry import events
from oncekey.telemetry.redaction import redact

_log = logging.getLogger("oncekey")

Headers = list[tuple[bytes, bytes]]

UNKNOWN_RETRY_SECONDS = 30.0
"""To settle an unknown outcome, the reconciler asks a provider. That takes longer than a handler."""
UNAVAILABLE_RETRY_SECONDS = 1.0

BODILESS = frozenset({204, 205, 304})
_OURS = frozenset({b"idempotency-key", b"idempotency-expires", b"idempotency-replayed", b"idempotent-replayed"})
_BREAKS = re.compile("[\r\n\0\u0100-\U0010ffff]").search  # the last: what no header can carry
_OURS_AND_LENGTH = _OURS | {b"content-length", b"transfer-encoding"}
_OF_THE_LOST_BODY = frozenset({b"content-type", b"content-encoding", b"etag", b"content-disposition", b"last-modified"})


class Voice(Protocol):
    """The profile of the answers: an OnceKey has it, and so does ``admin/outlook.py``."""

    @property
    def profile(self) -> ProfileName: ...
    @property
    def docs_url(self) -> str | None: ...
    @property
    def status_url(self) -> str | None: ...


def checked(once: OnceKey) -> OnceKey:
    """Refuse a wrong argument of a middleware or ``protect`` at start, not at the first request."""
    if not isinstance(once, OnceKey):
        raise ConfigurationError("once=…: it takes a OnceKey, such as OnceKey('sqlite:///app.db', scope=tenant_of)")
    return once


def body_length(text: str | None) -> int | None:
    """A Content-Length; None: it is missing or not a number. A number with 20 digits or more counts as 10**19, which
    is too large for every policy."""
    if not text or not text.isascii() or not text.isdecimal():
        return None
    return int(text[-19:]) if text[:-19].strip("0") == "" else 10**19


def read_key(values: Sequence[bytes], policy: Policy) -> str:
    """The key of a request, or BadKey."""
    return parse_key(
        values,
        syntax=policy.key_syntax,
        key_format=policy.key_format,
        min_length=policy.key_min_length,
        max_length=policy.key_max_length,
    )


def storable(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | None, policy: Policy) -> StoredResponse:
    """The response as it is stored: the headers of the allow-list, and the body unless it is too large (tombstone)."""
    allowed = policy.stored_headers
    kept = [(text, value.decode("latin-1")) for name, value in headers if (text := _lower(name)) in allowed]
    if body is not None and len(body) > policy.max_response_bytes:
        body = None
    return StoredResponse(status, tuple([pair for pair in kept if _is_clean(*pair)]), body)


def kept_and_sent(headers: Iterable[tuple[bytes, bytes]], policy: Policy) -> tuple[list[tuple[str, str]], Headers]:
    """The headers of a whole response: those that are stored, as :func:`storable` does it, and those that are sent, as
    :func:`first_headers` does it. One loop for both, because every first request takes it."""
    stored, kept, sent = policy.stored_names, [], []
    for item in headers:
        lower = item[0].lower()
        if lower in stored:
            name, text = stored[lower], item[1].decode("latin-1")
            if text.isprintable() or _is_clean(name, text):
                kept.append((name, text))
        if lower not in _OURS_AND_LENGTH:
            sent.append(item)
    return kept, sent


def _is_clean(name: str, text: str) -> bool:
    """False for a header that has a line break or cannot be sent. Checked when it is stored and when it is replayed."""
    if (both := name + text).isascii() and both.isprintable():  # nearly always
        return True
    if _BREAKS(name) or _BREAKS(text) or not name.isascii():
        _log.error("a stored response header with a line break, or a character that cannot be sent, was left out")
        return False
    return True


def replay(record: Record, once: Voice) -> Answer:
    """The stored response; for a tombstone, its status and a note in place of the body."""
    status, headers, body = replayed(record, once)
    return Answer(status, tuple(headers), body)


def replayed(record: Record, once: Voice) -> tuple[int, Headers, bytes]:
    """:func:`replay` as its parts."""
    response = record.response
    if response is None:
        # An operator or another version wrote this final row without a response: answer as for a tombstone.
        response = StoredResponse(200, (), None)
    headers = []
    for name, text in response.headers:
        if (both := name + text).isascii() and both.isprintable():  # nearly always
            headers.append((name.encode(), text.encode()))
        elif _is_clean(name, text):
            headers.append((name.encode(), text.encode("latin-1")))
    body, status = response.body, response.status
    if body is None or response.schema_version != RESPONSE_SCHEMA_VERSION:
        note = tombstone_note(once.profile, status, kept=response.schema_version != RESPONSE_SCHEMA_VERSION)
        body = note.body
        headers = [item for item in headers if item[0] not in _OF_THE_LOST_BODY]
        if note.content_type:
            headers.append((b"content-type", note.content_type.encode()))
    if status not in BODILESS:
        headers.append(content_length(len(body)))
    if (marker := replay_marker(once.profile)) is not None:
        headers.append(marker)
    return status, headers, body


def answer_to(decision: Decision, policy: Policy, once: Voice) -> Answer:
    """The answer to a request that does not run."""
    if isinstance(decision, Replay):
        return replay(decision.record, once)
    match decision:
        case Mismatch(record):
            bound = policy.bind is not None or binding_of(record.fingerprint_recipe) is not None
            return refusal(once, Situation.MISMATCH, detail=OF_A_BOUND_KEY if bound else None)
        case Unknown(record):
            return unknown(once, record.key)
        case Unreadable(is_lost=is_lost):
            return refusal(once, Situation.ANSWER_LOST if is_lost else Situation.UNREADABLE)
        case TurnedAway(situation, detail, retry_after):
            return refusal(once, situation, detail=detail, retry_after=retry_after)
        case Deferred(record):
            location = dict(record.response.headers).get("location") if record.response else None
            return refusal(once, Situation.DEFERRED, retry_after=policy.retry_after.total_seconds(), location=location)
        case Busy(record, lease_left):
            return _busy(record, busy_seconds(policy, lease_left), policy, once)
    raise AssertionError(f"unreachable: {decision}")  # pragma: no cover - the others run


def _busy(record: Record | None, wait: float, policy: Policy, once: Voice) -> Answer:
    """202 only if the row shows an attempt in progress. If the store could not tell: 409, and the client retries."""
    running = record is not None and record.state is State.IN_PROGRESS and not record.lease_over
    if policy.in_flight != "accepted" or record is None or not running or once.status_url is None:
        return refusal(once, Situation.IN_FLIGHT, retry_after=wait)
    operation = record.operation if policy.key_per == "endpoint" else None
    location = status_location(once.status_url, record.key, operation)
    return refusal(once, Situation.ACCEPTED, retry_after=wait, location=location)


def status_location(prefix: str, key: str, operation: str | None) -> str:
    """The path of this key's status, under a status app that is mounted at ``prefix``."""
    path = f"{prefix.rstrip('/')}/{quote(key, safe='')}"
    return path if operation is None else f"{path}?operation={quote(operation, safe='')}"


def busy_seconds(policy: Policy, lease_left: float | None) -> float:
    """Seconds after which a duplicate may get a result: soon, or at the end of the lease of a probably dead owner."""
    return max(policy.retry_after.total_seconds(), lease_left or 0.0)


def unknown(once: Voice, key: str) -> Answer:
    """The answer for an unknown outcome, with a reference for support: the key, masked as in the log and in
    ``oncekey keys``. The client knows the key, so the mask tells it nothing new."""
    return refusal(once, Situation.UNKNOWN, retry_after=UNKNOWN_RETRY_SECONDS, reference=redact(key))


def refused_caller(once: OnceKey, operation: str, error: NotAuthenticated | NotAuthorized) -> Answer:
    """The answer to a caller that the app's scope or authorize function refused."""
    unknown = isinstance(error, NotAuthenticated)
    situation = Situation.NOT_AUTHENTICATED if unknown else Situation.NOT_AUTHORIZED
    once.engine.emitter.emit(events.CallerRefused(operation, situation))
    return refusal(once, situation, detail=str(error) or None)


def refusal(
    once: Voice,
    situation: Situation,
    *,
    detail: str | None = None,
    retry_after: float | None = None,
    status: int | None = None,
    location: str | None = None,
    reference: str | None = None,
) -> Answer:
    return problem(
        once.profile,
        situation,
        fault_id=uuid4().hex if once.profile == "governance" else "",
        detail=detail,
        retry_after=retry_after,
        status=status,
        location=location,
        reference=reference,
        docs_url=once.docs_url,
    )


def marks(key: bytes | None, record: Record | None) -> Headers:
    """Every protected response names its key and the time until which it is kept. An unknown key is kept until it is
    settled, so it has no such time."""
    headers = []
    if key is not None:
        headers.append((b"idempotency-key", key))
    if record is not None and record.state is not State.UNKNOWN:
        headers.append(expires(int(record.expires_at)))
    return headers


def first_headers(
    operation: Operation,
    status: int,
    headers: Iterable[tuple[bytes, bytes]],
    size: int | None,
    key: bytes | None,
    record: Record | None,
) -> Headers:
    """The handler's own headers, with those of :func:`marks`. ``size``: of the stored body; None: it is streamed."""
    ours = _OURS if size is None else _OURS_AND_LENGTH
    kept = [item for item in headers if item[0].lower() not in ours]
    if size is not None and status >= 200 and status not in BODILESS:
        kept.append((b"content-length", b"%d" % size))
    if operation.deferred and status < 400 and not any(name.lower() == b"retry-after" for name, _ in kept):
        # The first 202 says when to ask again, as the 202 of a retry does.
        kept.append((b"retry-after", b"%d" % math.ceil(operation.policy.retry_after.total_seconds())))
    return kept + marks(key, record)


def answer_headers(answer: Answer, key: bytes | None, record: Record | None) -> Headers:
    return [*answer.headers, *marks(key, record)]


@lru_cache(maxsize=1024)
def _lower(name: bytes) -> str:
    return name.decode("latin-1").lower()


@lru_cache(maxsize=4096)
def content_length(size: int) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % size


@lru_cache(maxsize=4096)
def expires(seconds: int) -> tuple[bytes, bytes]:
    """Until when the response is kept."""
    return b"idempotency-expires", formatdate(seconds, usegmt=True).encode()
