"""What a request gets, given the row that the store found for its key.

Pure: ``decide`` reads no clock and touches no store; the engine does what it decides. ``judgment.py`` decides what
becomes of the row when the handler has ended.
"""

from __future__ import annotations

from oncekey.core.binding import is_bound_to
from oncekey.core.problem_texts import Situation
from oncekey.core.recipe import same_request
from oncekey.core.record import Record, Reservation
from oncekey.core.states import FINAL, MAY_RERUN, Effects, Event, State
from oncekey.core.values import value


@value
class Execute:
    """This request owns the record: run the handler."""

    record: Record


@value
class Claim:
    """This request may take the record by this move. The engine then decides again from the store's answer.

    ``RELEASE`` excludes an owner whose lease is over, and another claim follows it.
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
    """Another attempt holds the lease, or the store could not tell."""

    record: Record | None
    lease_left: float | None = None
    """The seconds that are left of the lease, if a renewal is overdue: the owner is probably dead."""


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
    """A newer version wrote the row. This version cannot compute its fingerprint, so it cannot compare the requests."""

    record: Record


@value
class TurnedAway:
    """The key is new, and this route does not take it: its request is too old, or its tenant has reached a limit."""

    situation: Situation
    detail: str | None = None
    retry_after: float | None = None
    record: None = None


Decision = Execute | Claim | Replay | Busy | Deferred | Mismatch | Unknown | Unreadable | TurnedAway


def decide(record: Record | None, wanted: Reservation) -> Decision:
    """What a request that asked for ``wanted`` gets, given the ``record`` in the store."""
    if record is None:
        return Busy(None)
    if record.owner == wanted.owner and record.state is State.IN_PROGRESS:
        # The token is new for every request, so this is the request's own reservation, also if the answer to the
        # insert was lost and the engine asked again (hazard 8).
        return Execute(record)
    if free_for_a_new_request(record):
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
        # Compared before the state: a different request gets a mismatch, also while the first is in flight (I5).
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
                # The owner may be late and still write a first step under the same (state, owner). After a release it
                # cannot, so the row's steps are final.
                return Claim(record, Event.RELEASE, LEASE_RAN_OUT)
            return Claim(record, Event.TAKE_OVER)
    raise AssertionError(f"unreachable: {record.state}")  # pragma: no cover - expired is free, see above


def _same_by_the_row(record: Record, wanted: Reservation) -> bool | None:
    """The row has another binding, or a deploy has changed what is hashed, so the recipe of the row is used."""
    if not is_bound_to(record.fingerprint_recipe, wanted.bindings):
        return False
    if wanted.parts is None:
        return None
    version, recipe = record.fingerprint_version, record.fingerprint_recipe
    return same_request(version, recipe, record.fingerprint, wanted.parts, wanted.fingerprint_recipe)


def free_for_a_new_request(record: Record) -> bool:
    """Whether a row is left of an earlier request that is over, so that its key counts as new."""
    if record.state in FINAL or (record.state is State.FAILED_RETRYABLE and not record.has_steps):
        return record.past_expiry
    return record.state is State.EXPIRED


LEASE_RAN_OUT = "the lease ran out"


def _not_again(record: Record, effects: Effects) -> str | None:
    """Why a request must not run this key again if its route is now declared ``effects``; None: it may.

    An expired lease proves nothing about its owner, so a request takes over only harmless work. A deploy may also have
    changed the declaration. An earlier attempt's calls outside are safe for one of two reasons: its steps are
    remembered (``phased``), or the call may be repeated (``repeatable``). Each reason holds only while the route is
    declared so. An attempt under ``transactional`` was rolled back, and one under ``external`` is retryable only if it
    is proven that nothing happened: these may run again under every declaration.
    """
    if record.state is State.IN_PROGRESS and record.effects not in MAY_RERUN:
        return LEASE_RAN_OUT
    if record.has_steps:
        declared, left = Effects.PHASED, "has written steps"
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
