"""Reads an answer: which row of the decision table it is, when to come back, and until when its key is kept.

Answers of oncekey are recognised in all three profiles, by the words of ``core/problem_texts.py``. Of other servers the
standards are recognised: the statuses of RFC 9110, ``Retry-After``, and the title that the draft of the Idempotency-Key
header gives a request in flight. A bare 409 of another server is a conflict of its own (an e-mail address that is
taken), so it is an answer and not retried.

Pure: the caller gives the time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from oncekey.client.decisions import NOT_ALLOWED, TRY_LATER, Seen
from oncekey.core.problem_texts import ENTRIES, Situation
from oncekey.core.values import value

_READ_BYTES: Final = 65_536
"""A problem document is shorter than this; a longer body is not parsed."""

_SITUATIONS: Final[dict[str, Situation]] = {
    word: situation for situation, entry in ENTRIES.items() for word in (situation.value, entry.stripe[1], entry.fault)
}
"""The last part of an RFC 9457 type, the code of a Stripe error, the errorCode of a fault -> what it means."""

_ROWS: Final[dict[Situation, Seen]] = {
    Situation.IN_FLIGHT: Seen.IN_FLIGHT,
    Situation.STATUS_RETRYABLE: Seen.IN_FLIGHT,
    Situation.UNKNOWN: Seen.UNKNOWN,
    Situation.ANSWER_LOST: Seen.UNKNOWN,  # its status alone would close the intent
    Situation.MISMATCH: Seen.KEY_REUSED,
    Situation.KEY_MALFORMED: Seen.KEY_REFUSED,
    Situation.BODY_INCOMPLETE: Seen.INCOMPLETE,
    Situation.KEY_MISSING: Seen.NOT_LOOKED_UP,  # a proxy removed the header
    Situation.KEY_PERSONAL: Seen.NOT_LOOKED_UP,
    Situation.BODY_TOO_LARGE: Seen.NOT_LOOKED_UP,
}
_STATES: Final = frozenset({"in_progress", "pending"})
"""The member ``state`` of a 202 that is not the result yet."""
_LAST_PART: Final = re.compile(r"[^:/#]*$")
_GROUPS: Final = {1: Seen.INTERIM, 2: Seen.SUCCESS, 3: Seen.OTHER_3XX, 4: Seen.OTHER_4XX}


@value
class Answer:
    """A whole response. Header names are in lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first header with this name, in lower case."""
        return next((text for header, text in self.headers if header == name), None)

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.body)


def answer_of(status: int, headers: Iterable[tuple[str, str]], body: bytes) -> Answer:
    return Answer(status, tuple([(name.lower(), text) for name, text in headers]), body)


def seen(answer: Answer, method: str, url: str) -> Seen:
    """The row of the table for this answer to a request with this method and URL."""
    status = answer.status
    if status in (301, 302, 303, 307, 308):
        return _redirect(answer, method, url)
    if status in NOT_ALLOWED:
        return Seen.NOT_ALLOWED
    if status in TRY_LATER:
        return Seen.REPLAYED if is_replay(answer) else Seen.TRY_LATER
    if status == 202 and _is_not_the_result(answer):
        return Seen.ACCEPTED
    if 400 <= status < 500:
        row = _ROWS.get(situation) if (situation := situation_of(answer)) is not None else None
        if row is not None and not is_replay(answer):
            return row
        if status == 409 and not is_replay(answer) and _asks_for_a_retry(answer):
            return Seen.IN_FLIGHT
    return _GROUPS.get(status // 100, Seen.OTHER_5XX)


def is_replay(answer: Answer) -> bool:
    """The server stored this answer: it gives the same one to every retry."""
    return "true" in (answer.header("idempotency-replayed"), answer.header("idempotent-replayed"))


def situation_of(answer: Answer) -> Situation | None:
    """What an error document in one of the three profiles says; None for every other body."""
    match _members(answer):
        case {"type": str(kind)} if (word := _LAST_PART.search(kind)) is not None and word[0] in _SITUATIONS:
            return _SITUATIONS[word[0]]
        case {"title": str(title)} if title == ENTRIES[Situation.IN_FLIGHT].title:
            return Situation.IN_FLIGHT
        case {"error": {"code": str(code)}}:
            return _SITUATIONS.get(code)
        case {"fault": {"errors": [{"errorCode": str(code)}, *_]}}:
            return _SITUATIONS.get(code)
    return None


def reference_of(answer: Answer) -> str | None:
    """What to name to the operator of the server, in an answer about an unknown outcome."""
    match _members(answer):
        case (
            {"reference": str(reference)}
            | {"error": {"reference": str(reference)}}
            | {"fault": {"errors": [{"reference": str(reference)}, *_]}}
        ):
            return reference
    return None


def retry_after(answer: Answer, now: float) -> float | None:
    """The seconds of Retry-After, in either form; None if there is none that can be read.

    A date is compared with the server's own clock (its Date header), if the answer has it: the clocks may differ.
    """
    text = (answer.header("retry-after") or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:12])
    moment = _date(text)
    return None if moment is None else max(0.0, moment - _servers_now(answer, now))


def key_expires(answer: Answer, now: float) -> float | None:
    """Until when the server keeps the key, on this computer's clock, from Idempotency-Expires."""
    moment = _date(answer.header("idempotency-expires") or "")
    return None if moment is None else now + (moment - _servers_now(answer, now))


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port (RFC 6454)."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, (parts.hostname or "").lower(), parts.port or {"http": 80, "https": 443}.get(scheme)


def target_of(answer: Answer, url: str) -> str | None:
    """The absolute address in Location."""
    location = answer.header("location")
    return None if location is None else urljoin(url, location)


def _redirect(answer: Answer, method: str, url: str) -> Seen:
    target = target_of(answer, url)
    if target is None:
        return Seen.OTHER_3XX
    if answer.status == 303 or (answer.status in (301, 302) and method == "POST"):
        return Seen.SEE_OTHER  # libraries follow it with a GET, which needs no key
    try:
        same = answer.status in (307, 308) and origin(target) == origin(url)
    except ValueError:  # a port that is not a number
        same = False
    return Seen.SAME_ORIGIN if same else Seen.OTHER_ORIGIN


def _is_not_the_result(answer: Answer) -> bool:
    """A 202 that asks to come back, of a server that knows the key.

    The first 202 of a deferred request has the handler's own body, so ``state`` cannot be asked for. A server that does
    not repeat the key in its answer may not honour it, and would run a request again that it has accepted.
    """
    if answer.header("retry-after") is None or is_replay(answer):
        return False
    return answer.header("idempotency-key") is not None or _state(answer) in _STATES


def _asks_for_a_retry(answer: Answer) -> bool:
    wish = answer.header("stripe-should-retry")
    return wish == "true" or (wish is None and answer.header("retry-after") is not None)


def _members(answer: Answer) -> Any:
    if len(answer.body) > _READ_BYTES or not answer.body.lstrip().startswith(b"{"):
        return None
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None


def _state(answer: Answer) -> str | None:
    match _members(answer):
        case {"state": str(state)}:
            return state
    return None


def _servers_now(answer: Answer, now: float) -> float:
    moment = _date(answer.header("date") or "")
    return now if moment is None else moment


def _date(text: str) -> float | None:
    if not text:
        return None
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() if _is_sane(moment) else None


def _is_sane(moment: datetime) -> bool:
    return 1970 <= moment.year < 9000
