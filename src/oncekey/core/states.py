"""The whole machine: seven states, and every move that exists between them.

Theory of operation
===================

A **record** is one row per (scope, key). A request first *reserves* it, before any work, and so becomes its
**owner** for the time of a **lease**. The process renews the lease while the handler lives. When the handler is
done, the owner moves the record to the state in which retries find it. Nothing else may happen: a move that is not
in ``TABLE`` does not exist. A store applies a move only if the row still is what the caller saw: it compares
(state, owner) in the same statement. The owner token is new for every attempt. So an owner that was paused and
comes back late cannot write (promise I3), and for all other callers the token works like a version number.

What each state means to the next client that sends the key:

=================  =========================================================  ===========================
state              meaning                                                    a retry gets
=================  =========================================================  ===========================
in_progress        an owner holds the lease and works                         409 (or waits)
pending            the request is done, its job in the outbox will settle it  202
completed          final; the response is stored                              the stored response
failed             final; the error is stored                                 the stored error
failed_retryable   proven not executed, or half done and resumable            runs again, attempt + 1
unknown            it may have happened                                       409, until it is settled
expired            over, kept for the audit only                              runs as new
=================  =========================================================  ===========================

Two ideas carry the rest:

1. *An expired lease proves nothing.* Its owner may be dead, paused, or cut off after it charged the card. What may
   follow depends on where the effects live (``Effects``, declared per route, stored in the row). If a second run is
   harmless, a request takes over. If it is not, the record becomes ``unknown``, and only the reconciler or an
   operator moves it on, because they can ask the provider. A client never can.
   A deferred request (``pending``) is done, and its rows are committed. If its job leaves the key ``unknown``, no
   verdict makes the request run again: only the job can be tried again (reopen).
2. *Final means final until expiry.* A record leaves ``completed`` and ``failed`` only by time (expire), by starting
   over after expiry, or by an operator's ``forget``. ``in_progress`` and ``unknown`` never expire: deleting them
   would turn "may have happened" into "never happened".

The fingerprint of the request survives every move except a reservation that starts over after expiry. All that
upkeep needs to decide is in the row, so that upkeep runs without the app.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oncekey.core.values import Word
from oncekey.errors import IllegalTransition


class State(Word):
    IN_PROGRESS = "in_progress"
    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"
    FAILED_RETRYABLE = "failed_retryable"
    UNKNOWN = "unknown"
    EXPIRED = "expired"


class Effects(Word):
    """Where a route's effects live. The failure policy follows from it (see ``decision.py``)."""

    EXTERNAL = "external"
    TRANSACTIONAL = "transactional"
    PHASED = "phased"
    REPEATABLE = "repeatable"


class Event(Word):
    RESERVE = "reserve"
    RENEW = "renew"
    ADVANCE = "advance"
    COMPLETE = "complete"
    FAIL = "fail"
    RELEASE = "release"
    DOUBT = "doubt"
    DEFER = "defer"
    DISCARD = "discard"
    TAKE_OVER = "take_over"
    RETRY = "retry"
    SETTLE = "settle"
    TIME_OUT = "time_out"
    CONFIRM = "confirm"
    GIVE_UP = "give_up"
    REFUTE = "refute"
    HAPPENED = "happened"
    NOT_HAPPENED = "not_happened"
    GO_ON = "go_on"
    CORRECT = "correct"
    POSTPONE = "postpone"
    REOPEN = "reopen"
    EXPIRE = "expire"
    FORGET = "forget"


class Actor(Word):
    REQUEST = "request"
    OWNER = "owner"
    WORKER = "worker"
    SWEEPER = "sweeper"
    REAPER = "reaper"
    RECONCILER = "reconciler"
    OPERATOR = "operator"
    RESUMER = "resumer"


class Condition(Word):
    """What must hold in the row at the moment of the move, besides (state, owner)."""

    LEASE_OVER = "lease over"
    QUARANTINE_OVER = "lease over + quarantine"
    PAST_EXPIRY = "past expiry"
    FIRST_ATTEMPT = "attempt 1"
    NO_STEPS = "no steps"
    HAS_STEPS = "has steps"
    MAY_HAVE_BEGUN = "has steps or repeatable effects"
    MAY_RERUN = "effects allow a second run"
    ONE_IN_DOUBT = "one effect in doubt"
    SEVERAL_IN_DOUBT = "several effects in doubt"
    NONE_IN_DOUBT = "no effect in doubt"
    JOB_FREE = "job not leased"
    UNTRIED = "job never tried"
    TRIED = "job was tried"
    JOB_RETRIED = "its dead letter is tried again"
    NOT_DEFERRED = "not deferred"


@dataclass(frozen=True, slots=True)
class Transition:
    source: State | None  # None: no row
    event: Event
    target: State | None  # None: the row is deleted
    by: frozenset[Actor]
    when: frozenset[Condition] = frozenset()


def _move(source: State | None, event: Event, target: State | None, by: set[Actor], *when: Condition) -> Transition:
    return Transition(source, event, target, frozenset(by), frozenset(when))


_S, _E, _A, _C = State, Event, Actor, Condition
_SETTLERS = {_A.RECONCILER, _A.OPERATOR}
_NOT_OWNER = {_A.SWEEPER, _A.REQUEST}

# fmt: off
TABLE: tuple[Transition, ...] = (
    # A request takes the key.
    _move(None,                _E.RESERVE,   _S.IN_PROGRESS,      {_A.REQUEST}),
    _move(_S.FAILED_RETRYABLE, _E.RETRY,     _S.IN_PROGRESS,      {_A.REQUEST}),
    _move(_S.IN_PROGRESS,      _E.TAKE_OVER, _S.IN_PROGRESS,      {_A.REQUEST}, _C.LEASE_OVER, _C.MAY_RERUN),
    # The owner works, and ends its attempt.
    _move(_S.IN_PROGRESS,      _E.RENEW,     _S.IN_PROGRESS,      {_A.OWNER}),
    _move(_S.IN_PROGRESS,      _E.ADVANCE,   _S.IN_PROGRESS,      {_A.OWNER}),
    _move(_S.IN_PROGRESS,      _E.COMPLETE,  _S.COMPLETED,        {_A.OWNER}),
    _move(_S.IN_PROGRESS,      _E.FAIL,      _S.FAILED,           {_A.OWNER}),
    _move(_S.IN_PROGRESS,      _E.RELEASE,   _S.FAILED_RETRYABLE, {_A.OWNER}),
    _move(_S.IN_PROGRESS,      _E.DOUBT,     _S.UNKNOWN,          {_A.OWNER}),
    _move(_S.IN_PROGRESS,      _E.DEFER,     _S.PENDING,          {_A.OWNER}),
    _move(_S.IN_PROGRESS,      _E.DISCARD,   None,                {_A.OWNER}, _C.FIRST_ATTEMPT, _C.NO_STEPS),
    # The owner was only late: it ends an attempt that was already moved to unknown.
    _move(_S.UNKNOWN,          _E.COMPLETE,  _S.COMPLETED,        {_A.OWNER}),
    _move(_S.UNKNOWN,          _E.FAIL,      _S.FAILED,           {_A.OWNER}),
    # The lease ran out.
    _move(_S.IN_PROGRESS,      _E.RELEASE,   _S.FAILED_RETRYABLE, _NOT_OWNER, _C.LEASE_OVER, _C.MAY_RERUN),
    _move(_S.IN_PROGRESS,      _E.DOUBT,     _S.UNKNOWN,          _NOT_OWNER, _C.LEASE_OVER),
    # A deploy has changed the route's effects: the last attempt's work is no longer remembered or repeatable.
    _move(_S.FAILED_RETRYABLE, _E.DOUBT,     _S.UNKNOWN,          {_A.REQUEST}, _C.MAY_HAVE_BEGUN),
    # The resumer continues a half-done request. If it cannot, it tries later, or leaves the key to an operator.
    _move(_S.FAILED_RETRYABLE, _E.RETRY,     _S.IN_PROGRESS,      {_A.RESUMER}, _C.HAS_STEPS),
    _move(_S.FAILED_RETRYABLE, _E.POSTPONE,  _S.FAILED_RETRYABLE, {_A.RESUMER, _A.OPERATOR}, _C.HAS_STEPS),
    # A job settles a deferred request; a request never does.
    _move(_S.PENDING,          _E.SETTLE,    _S.COMPLETED,        {_A.WORKER}),
    _move(_S.PENDING,          _E.SETTLE,    _S.FAILED,           {_A.WORKER}),
    _move(_S.PENDING,          _E.SETTLE,    _S.UNKNOWN,          {_A.WORKER}),
    _move(_S.PENDING,          _E.TIME_OUT,  _S.FAILED,           {_A.REAPER}, _C.PAST_EXPIRY, _C.JOB_FREE, _C.UNTRIED),
    _move(_S.PENDING,          _E.TIME_OUT,  _S.UNKNOWN,          {_A.REAPER}, _C.PAST_EXPIRY, _C.JOB_FREE, _C.TRIED),
    # Only the reconciler and an operator can ask the provider, so only they move an unknown outcome on.
    _move(_S.UNKNOWN,          _E.CONFIRM,   _S.COMPLETED,        _SETTLERS),
    _move(_S.UNKNOWN,          _E.GIVE_UP,   _S.FAILED,           _SETTLERS),
    _move(_S.UNKNOWN,          _E.REFUTE,    _S.FAILED_RETRYABLE, _SETTLERS, _C.QUARANTINE_OVER, _C.NOT_DEFERRED),
    _move(_S.UNKNOWN,          _E.POSTPONE,  _S.UNKNOWN,          _SETTLERS),
    # Their verdict may also settle one effect of a phased request. The next attempt continues after it. The new owner
    # token excludes an owner that was only late.
    _move(_S.UNKNOWN,          _E.HAPPENED,  _S.FAILED_RETRYABLE, _SETTLERS, _C.NOT_DEFERRED, _C.ONE_IN_DOUBT),
    _move(_S.UNKNOWN,          _E.HAPPENED,  _S.UNKNOWN,          _SETTLERS, _C.NOT_DEFERRED, _C.SEVERAL_IN_DOUBT),
    _move(_S.UNKNOWN,          _E.NOT_HAPPENED, _S.FAILED_RETRYABLE, _SETTLERS,
          _C.QUARANTINE_OVER, _C.NOT_DEFERRED, _C.ONE_IN_DOUBT),
    _move(_S.UNKNOWN,          _E.NOT_HAPPENED, _S.UNKNOWN,       _SETTLERS,
          _C.QUARANTINE_OVER, _C.NOT_DEFERRED, _C.SEVERAL_IN_DOUBT),
    # A verdict about an effect that is done says nothing new: the request goes on, and the effect keeps its result.
    _move(_S.UNKNOWN,          _E.GO_ON,     _S.FAILED_RETRYABLE, {_A.RECONCILER},
          _C.NOT_DEFERRED, _C.HAS_STEPS, _C.NONE_IN_DOUBT),
    # A wrong result in a verdict makes every later attempt fail: an operator corrects it, and nothing else moves.
    _move(_S.UNKNOWN,          _E.CORRECT,   _S.UNKNOWN,          {_A.OPERATOR}, _C.HAS_STEPS),
    _move(_S.FAILED_RETRYABLE, _E.CORRECT,   _S.FAILED_RETRYABLE, {_A.OPERATOR}, _C.HAS_STEPS),
    # A deferred request is done, and its rows are committed. If its job left the key unknown, only the job runs again.
    _move(_S.UNKNOWN,          _E.REOPEN,    _S.PENDING,          {_A.OPERATOR}, _C.JOB_RETRIED),
    # The end of the retention window.
    _move(_S.COMPLETED,        _E.EXPIRE,    _S.EXPIRED,          {_A.REAPER}, _C.PAST_EXPIRY),
    _move(_S.FAILED,           _E.EXPIRE,    _S.EXPIRED,          {_A.REAPER}, _C.PAST_EXPIRY),
    _move(_S.FAILED_RETRYABLE, _E.EXPIRE,    _S.EXPIRED,          {_A.REAPER}, _C.PAST_EXPIRY, _C.NO_STEPS),
    _move(_S.COMPLETED,        _E.EXPIRE,    None,                {_A.REAPER}, _C.PAST_EXPIRY),
    _move(_S.FAILED,           _E.EXPIRE,    None,                {_A.REAPER}, _C.PAST_EXPIRY),
    _move(_S.FAILED_RETRYABLE, _E.EXPIRE,    None,                {_A.REAPER}, _C.PAST_EXPIRY, _C.NO_STEPS),
    _move(_S.FAILED_RETRYABLE, _E.DOUBT,     _S.UNKNOWN,          {_A.REAPER}, _C.PAST_EXPIRY, _C.HAS_STEPS),
    _move(_S.COMPLETED,        _E.RESERVE,   _S.IN_PROGRESS,      {_A.REQUEST}, _C.PAST_EXPIRY),
    _move(_S.FAILED,           _E.RESERVE,   _S.IN_PROGRESS,      {_A.REQUEST}, _C.PAST_EXPIRY),
    _move(_S.FAILED_RETRYABLE, _E.RESERVE,   _S.IN_PROGRESS,      {_A.REQUEST}, _C.PAST_EXPIRY, _C.NO_STEPS),
    _move(_S.EXPIRED,          _E.RESERVE,   _S.IN_PROGRESS,      {_A.REQUEST}),
    # An operator deletes a key, so that it can be used again.
    _move(_S.COMPLETED,        _E.FORGET,    None,                {_A.OPERATOR}),
    _move(_S.FAILED,           _E.FORGET,    None,                {_A.OPERATOR}),
)
# fmt: on

FINAL: frozenset[State] = frozenset({State.COMPLETED, State.FAILED})
"""States whose stored response is replayed, and which expire."""

STARTS: frozenset[Event] = frozenset({Event.RESERVE, Event.RETRY, Event.TAKE_OVER})
"""Events that make a request the new owner, with a new token and a new lease."""

FENCES: frozenset[Event] = frozenset({Event.HAPPENED, Event.NOT_HAPPENED, Event.GO_ON, Event.CORRECT})
"""Events that are about one effect, and give a new owner token without a new attempt."""

MAY_RERUN: frozenset[Effects] = frozenset({Effects.TRANSACTIONAL, Effects.PHASED, Effects.REPEATABLE})
"""A second run is harmless with these effects, so a request may take over an expired lease."""

_BY_MOVE: dict[tuple[State | None, Event, Actor], tuple[Transition, ...]] = {}
for _row in TABLE:
    for _actor in _row.by:
        _at = (_row.source, _row.event, _actor)
        _BY_MOVE[_at] = (*_BY_MOVE.get(_at, ()), _row)


def find(
    source: State | None, event: Event, actor: Actor, target: State | Literal["the only one"] | None = "the only one"
) -> Transition:
    """The row of ``TABLE`` for this move. ``target`` chooses, if the event has several; None: the row is deleted."""
    rows = _BY_MOVE.get((source, event, actor), ())
    if target != "the only one":
        rows = tuple(row for row in rows if row.target == target)
    if len(rows) != 1:
        what = f"'{event}' from {source or 'no row'} by {actor}"
        raise IllegalTransition(
            f"{what} has several targets: name one" if rows else f"no move {what}: see core/states.py"
        )
    return rows[0]
