"""Two pure questions, answered from values alone.

``decide``: what does this request get, given the row that the store found? ``judge``: what does the row become, given
how the handler ended? Neither reads a clock nor touches a store; the engine carries out what they say.
"""

from __future__ import annotations

from typing import Literal

from oncekey.core.policy import Policy
from oncekey.core.record import Record, Reservation
from oncekey.core.states import FINAL, MAY_RERUN, Effects, Event, State
from oncekey.core.values import value


@value
class Execute:
    """The record is this request's: run the handler."""

    record: Record


@value
class Claim:
    """The record may become this request's by this move; then decide again from what the store says."""

    record: Record
    event: Event


@value
class Replay:
    record: Record


@value
class Busy:
    """Somebody else holds the lease, or the store could not tell."""

    record: Record | None


@value
class Deferred:
    record: Record


@value
class Mismatch:
    record: Record


@value
class Unknown:
    record: Record


Decision = Execute | Claim | Replay | Busy | Deferred | Mismatch | Unknown


def decide(record: Record | None, wanted: Reservation) -> Decision:
    """What a request that asked for ``wanted`` gets, given the ``record`` that stands in the store."""
    if record is None:
        return Busy(None)
    if record.owner == wanted.owner and record.state is State.IN_PROGRESS:
        # The token is new for every request, so this is our own reservation, also when the answer to the insert
        # was lost and we asked again (hazard 8).
        return Execute(record)
    if _free_for_a_new_request(record):
        return Claim(record, Event.RESERVE)
    if record.fingerprint_version != wanted.fingerprint_version:
        # Written by a version that hashes differently (a rollback): we cannot tell whether it is the same request,
        # so nobody gets an answer that may belong to another one.
        return Busy(record)
    if record.fingerprint != wanted.fingerprint:
        # Before the state: a different request learns that it is one, also while the first is in flight (I5).
        return Mismatch(record)
    if record.state in FINAL:
        return Replay(record)
    match record.state:
        case State.PENDING:
            return Deferred(record)
        case State.UNKNOWN:
            return Unknown(record)
        case State.FAILED_RETRYABLE:
            return Claim(record, Event.RETRY)
        case State.IN_PROGRESS if not record.lease_over:
            return Busy(record)
        case State.IN_PROGRESS:
            # The lease is over, which proves nothing about its owner: only harmless work is taken over (hazard 2).
            return Claim(record, Event.TAKE_OVER if record.effects in MAY_RERUN else Event.DOUBT)
    raise AssertionError(f"unreachable: {record.state}")  # pragma: no cover - expired is free, see above


def _free_for_a_new_request(record: Record) -> bool:
    if record.state in FINAL or (record.state is State.FAILED_RETRYABLE and not record.has_steps):
        return record.past_expiry
    return record.state is State.EXPIRED


UNDECIDED_STATUSES: frozenset[int] = frozenset({401, 403, 408, 425, 429})
"""4xx that say nothing about the operation: who asked, how fast, how early. The same request may succeed later."""

Ending = Literal["returned", "raised", "not_executed", "outcome_unknown", "refused"]
"""How a handler ended. ``refused``: its framework turned the request away before the handler began."""


def judge(ending: Ending, status: int | None, policy: Policy, *, first_attempt: bool = True) -> Event:
    """The owner's move for a handler that ended this way (DESIGN section 4 as code)."""
    match ending:
        case "refused":
            # A later attempt has a history that a discard would erase: give the key back as it was.
            return Event.DISCARD if first_attempt else Event.RELEASE
        case "not_executed":
            return Event.RELEASE
        case "outcome_unknown":
            return Event.DOUBT
        case "raised":
            return Event.DOUBT if policy.effects_kind is Effects.EXTERNAL else Event.RELEASE
    if status is None:
        raise ValueError("a handler that returned has a status")
    if status < 400:
        return Event.COMPLETE
    if status < 500:
        if status in UNDECIDED_STATUSES or not policy.final_client_errors:
            return Event.RELEASE
        return Event.FAIL
    match policy.on_server_error:
        case "replay":
            return Event.FAIL
        case "unknown":
            return Event.DOUBT
        case _:
            return Event.RELEASE
