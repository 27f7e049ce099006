"""What a request gets, given the row that the store found for its key.

Pure: ``decide`` reads no clock and touches no store; the engine carries out what it says. What becomes of the row when
the handler has ended is ``judgment.py``.
"""

from __future__ import annotations

from oncekey.core.recipe import same_request
from oncekey.core.record import Record, Reservation
from oncekey.core.states import FINAL, MAY_RERUN, Effects, Event, State
from oncekey.core.values import value


@value
class Execute:
    """The record is this request's: run the handler."""

    record: Record


@value
class Claim:
    """The record may become this request's by this move; then decide again from what the store says.

    ``RELEASE`` fences off an owner whose lease is over, and is followed by another claim.
    """

    record: Record
    event: Event
    reason: str | None = None
    """Why the claim ends an earlier attempt."""


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


@value
class Unreadable:
    """The row was written by a newer version, whose fingerprint cannot be taken here: same or other, it is not
    known."""

    record: Record


Decision = Execute | Claim | Replay | Busy | Deferred | Mismatch | Unknown | Unreadable


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
    same: bool | None = record.fingerprint == wanted.fingerprint
    if (
        record.fingerprint_recipe != wanted.fingerprint_recipe
        or record.fingerprint_version != wanted.fingerprint_version
    ):
        same = _same_by_the_row(record, wanted)
        if same is None:
            return Unreadable(record)
    if not same:
        # Before the state: a different request learns that it is one, also while the first is in flight (I5).
        return Mismatch(record)
    if record.state in FINAL:
        return Replay(record)
    match record.state:
        case State.PENDING:
            return Deferred(record)
        case State.UNKNOWN:
            return Unknown(record)
        case State.IN_PROGRESS if not record.lease_over:
            return Busy(record)
        case State.FAILED_RETRYABLE | State.IN_PROGRESS:
            if (reason := _not_again(record, wanted.effects)) is not None:
                return Claim(record, Event.DOUBT, reason)
            if record.state is State.FAILED_RETRYABLE:
                return Claim(record, Event.RETRY)
            if record.effects is Effects.PHASED is not wanted.effects:
                # Its owner may be late and still write a first step under the same (state, owner). Released, it cannot,
                # and what the row says of steps stands.
                return Claim(record, Event.RELEASE, LEASE_RAN_OUT)
            return Claim(record, Event.TAKE_OVER)
    raise AssertionError(f"unreachable: {record.state}")  # pragma: no cover - expired is free, see above


def _same_by_the_row(record: Record, wanted: Reservation) -> bool | None:
    """A deploy has changed what is hashed: what the row was reserved under counts."""
    if wanted.parts is None:
        return None
    version, recipe = record.fingerprint_version, record.fingerprint_recipe
    return same_request(version, recipe, record.fingerprint, wanted.parts, wanted.fingerprint_recipe)


def _free_for_a_new_request(record: Record) -> bool:
    if record.state in FINAL or (record.state is State.FAILED_RETRYABLE and not record.has_steps):
        return record.past_expiry
    return record.state is State.EXPIRED


LEASE_RAN_OUT = "the lease ran out"


def _not_again(record: Record, effects: Effects) -> str | None:
    """Why a request whose route is declared ``effects`` now must not run this key again; None: it may.

    A lease that is over proves nothing about its owner, so only harmless work is taken over. And a deploy may have
    changed the declaration since. What an earlier attempt did outside is safe for one of two reasons: its steps are
    remembered (``phased``), or the call may be repeated (``repeatable``). Each holds only while the route is declared
    so. An attempt under ``transactional`` was rolled back, and one under ``external`` is retryable only when it is
    proven that nothing happened: these run again under every declaration.
    """
    if record.state is State.IN_PROGRESS and record.effects not in MAY_RERUN:
        return LEASE_RAN_OUT
    if record.has_steps:
        declared, left = Effects.PHASED, "has steps behind it"
    elif record.effects is Effects.REPEATABLE:
        declared, left = Effects.REPEATABLE, "may have been executed"
    else:
        return None
    if effects is declared:
        return None
    return (
        f"attempt {record.attempt} ran while {record.operation} was declared effects='{declared}', and {left}; the "
        f"route is declared effects='{effects}' now, and would do it again. Declare it '{declared}' until such keys "
        "have ended, or settle this key with `oncekey keys resolve`"
    )
