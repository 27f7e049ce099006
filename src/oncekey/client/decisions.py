"""What a client does after a try, as one table: TABLE has a row for everything that a try can bring.

A request may be repeated if it has an Idempotency-Key, or if its method is idempotent by definition (RFC 9110, section
9.2.2). A request that is neither is sent again only if no connection was made, because then the server has not seen
it. The three columns of a row are these three kinds of request.

Of the other 4xx two are repeated, because they prove that this try did not run. INCOMPLETE: the request was cut
off on its way, so the same bytes, sent again, are the request that was meant. KEY_REFUSED: the key was spelled in a way
that the server does not read; it is repeated once. Both must be said by oncekey's problem document: a bare 400 is an
answer.

The last column says what becomes of an intent in a key jar. ANSWERED: this is the answer, and nothing is sent for this
intent any more. OPEN: the operation may have happened or may still happen, so the intent keeps its key, and
``resume`` asks again. A status closes an intent only if it proves the outcome: 401 says that the credentials were
wrong this time, not that the payment was refused an hour ago.

This module is pure. ``reading.py`` finds the row of an answer, ``attempts.py`` obeys the table.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from oncekey.core.values import Word


class Seen(Word):
    """What a try brought."""

    NOT_CONNECTED = "not connected"
    LOST = "connection lost"
    TIMED_OUT = "timed out"
    INTERIM = "1xx"
    SUCCESS = "2xx"
    ACCEPTED = "202, not the result yet"
    SAME_ORIGIN = "307 or 308, same origin"
    OTHER_ORIGIN = "redirect that would need the key elsewhere"
    SEE_OTHER = "redirect to a GET"
    OTHER_3XX = "other 3xx"
    KEY_REFUSED = "400, spelling of the key"
    INCOMPLETE = "400, body incomplete"
    NOT_LOOKED_UP = "400 or 413, before the key was looked up"
    NOT_ALLOWED = "401, 403, 407"
    IN_FLIGHT = "409, in flight"
    UNKNOWN = "409, outcome unknown"
    KEY_REUSED = "422, key used for another request"
    TRY_LATER = "408, 425, 429, 500, 502, 503, 504"
    REPLAYED = "one of these, as the stored answer"
    OTHER_4XX = "other 4xx"
    OTHER_5XX = "other 5xx"


class Act(Word):
    """What the client does next."""

    AGAIN = "send again"  # costs one try of the budget
    ASK = "ask again"  # the server works on it: costs time, not a try
    FOLLOW = "follow"  # the same request with the same key to the address in Location
    SPELL = "spell the key the other way"  # once; then hand back
    RETURN = "hand back"  # the answer, or the library's own exception
    UNSETTLED = "raise OutcomeUnsettled"
    REFUSE = "raise RedirectRefused"


class Intent(Word):
    """What becomes of an intent."""

    OPEN = "open"
    ANSWERED = "answered"


class Kind(Word):
    """Whether a request may be repeated, and why."""

    KEYED = "keyed"
    IDEMPOTENT = "idempotent"
    NEITHER = "neither"


class Row(NamedTuple):
    keyed: Act
    idempotent: Act
    neither: Act
    intent: Intent

    def act(self, kind: Kind) -> Act:
        return {Kind.KEYED: self.keyed, Kind.IDEMPOTENT: self.idempotent, Kind.NEITHER: self.neither}[kind]


_AGAIN, _ASK, _FOLLOW, _SPELL, _RETURN = Act.AGAIN, Act.ASK, Act.FOLLOW, Act.SPELL, Act.RETURN

# fmt: off
TABLE: Final[dict[Seen, Row]] = {
    # what a try brought     keyed          idempotent  neither  the intent is then
    Seen.NOT_CONNECTED: Row(_AGAIN,         _AGAIN,     _AGAIN,  Intent.OPEN),
    Seen.LOST:          Row(_AGAIN,         _AGAIN,     _RETURN, Intent.OPEN),
    Seen.TIMED_OUT:     Row(_AGAIN,         _AGAIN,     _RETURN, Intent.OPEN),
    Seen.INTERIM:       Row(_RETURN,        _RETURN,    _RETURN, Intent.OPEN),
    Seen.SUCCESS:       Row(_RETURN,        _RETURN,    _RETURN, Intent.ANSWERED),
    Seen.ACCEPTED:      Row(_ASK,           _RETURN,    _RETURN, Intent.OPEN),
    Seen.SAME_ORIGIN:   Row(_FOLLOW,        _RETURN,    _RETURN, Intent.OPEN),
    Seen.OTHER_ORIGIN:  Row(Act.REFUSE,     _RETURN,    _RETURN, Intent.OPEN),
    Seen.SEE_OTHER:     Row(_RETURN,        _RETURN,    _RETURN, Intent.ANSWERED),
    Seen.OTHER_3XX:     Row(_RETURN,        _RETURN,    _RETURN, Intent.ANSWERED),
    Seen.KEY_REFUSED:   Row(_SPELL,         _RETURN,    _RETURN, Intent.OPEN),
    Seen.INCOMPLETE:    Row(_AGAIN,         _AGAIN,     _RETURN, Intent.OPEN),
    Seen.NOT_LOOKED_UP: Row(_RETURN,        _RETURN,    _RETURN, Intent.OPEN),
    Seen.NOT_ALLOWED:   Row(_RETURN,        _RETURN,    _RETURN, Intent.OPEN),
    Seen.IN_FLIGHT:     Row(_ASK,           _RETURN,    _RETURN, Intent.OPEN),
    Seen.UNKNOWN:       Row(Act.UNSETTLED,  _RETURN,    _RETURN, Intent.OPEN),
    Seen.KEY_REUSED:    Row(_RETURN,        _RETURN,    _RETURN, Intent.OPEN),
    Seen.TRY_LATER:     Row(_AGAIN,         _AGAIN,     _RETURN, Intent.OPEN),
    Seen.REPLAYED:      Row(_RETURN,        _RETURN,    _RETURN, Intent.ANSWERED),
    Seen.OTHER_4XX:     Row(_RETURN,        _RETURN,    _RETURN, Intent.ANSWERED),
    Seen.OTHER_5XX:     Row(_RETURN,        _RETURN,    _RETURN, Intent.OPEN),
}
# fmt: on

TRY_LATER: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
NOT_ALLOWED: Final = frozenset({401, 403, 407})
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
IDEMPOTENT: Final = SAFE | {"PUT", "DELETE"}
"""RFC 9110, section 9.2.2."""
