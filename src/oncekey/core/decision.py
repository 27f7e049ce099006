"""What a request gets, given the row that the store found for its key.

Pure: ``decide`` reads no clock and touches no store; the engine does what it decides. ``judgment.py`` decides what
becomes of the row when the handler has ended.
"""

from __future__ import annotations

from oncekey.core.binding import is_bound_to
from oncekey.core.fingerprint import KEY_STEP, LOST_KEY, UnderKey, one_key
from oncekey.core.personal_data import Personal
from oncekey.core.problem_texts import Situation
from oncekey.core.recipe import Parts, same_request
from oncekey.core.record import Record, Reservation
from oncekey.core.sealed import SEALED_RESPONSE, key_id_of
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


NEWER_VERSION = "a newer version of oncekey wrote the row, and this version cannot compare the requests"


@value
class Unreadable:
    """This process cannot compute the fingerprint of the row, so it cannot compare the requests: a newer version wrote
    it, or its key is not in the keyring. Or the stored response is encrypted, and this process has no keyring at all.
    """

    record: Record
    reason: str = NEWER_VERSION
    """For developers."""
    is_lost: bool = False
    """The row is final, and its encryption key is declared lost: no retry can ever be compared with it."""


@value
class TurnedAway:
    """The key is new, and this route does not take it: its request is too old, its tenant has reached a limit, or the
    key looks like personal data or has not the form that the route takes."""

    situation: Situation
    detail: str | None = None
    retry_after: float | None = None
    personal: Personal | None = None
    """What the key looks like, if it is refused for that."""
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
    # This need not take constant time: a request meets only rows of its own tenant. Its client cannot compute a keyed
    # fingerprint, so the number of equal bytes tells it nothing. Without a keyring, that number could at most tell it
    # about a request which its own tenant has sent.
    same: bool | None = record.fingerprint == wanted.fingerprint
    if (
        record.fingerprint_recipe != wanted.fingerprint_recipe
        or record.fingerprint_version != wanted.fingerprint_version
    ):
        same = _same_by_the_row(record, wanted)
    elif (
        not same
        and wanted.under_key is not None
        and wanted.fingerprint_version >= KEY_STEP  # two plain fingerprints name no key
        and not one_key(record.fingerprint, wanted.fingerprint)
    ):
        same = None  # two processes have different keys under one id
    if same is None:
        return _unreadable(record, wanted)
    if not same:
        # Compared before the state: a different request gets a mismatch, also while the first is in flight (I5).
        return Mismatch(record)
    if record.state in FINAL:
        if (response := record.response) is not None and response.schema_version == SEALED_RESPONSE and response.body:
            return Unreadable(record, _no_keyring(f"response is encrypted with key {key_id_of(response.body)}"))
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


_ANY_REQUEST: Parts = ("", "", b"", None, b"", lambda names: ())


def decide_retry(record: Record, under_key: UnderKey | None) -> Decision:
    """What a retry of the request that made this row gets, by a process that does not have that request.

    ``under_key``: of the keyring of this process; None: it has no keyring.
    """
    wanted = Reservation(
        *(record.scope, record.key, record.operation, record.fingerprint, record.fingerprint_version),
        *(record.effects, "", 0.0, record.retention_seconds, record.fingerprint_recipe),
        under_key=under_key,
    )
    decision = decide(record, wanted)
    if isinstance(decision, Claim) and decision.event is Event.RESERVE:
        return decision  # the key counts as new, so no fingerprint is compared
    version, recipe = record.fingerprint_version, record.fingerprint_recipe
    # Whether this process can compare depends on the row and the keyring, not on the request: any request shows it.
    same = same_request(version, recipe, record.fingerprint, _ANY_REQUEST, recipe, wanted.fingerprint_under)
    return _unreadable(record, wanted) if same is None else decision


def _same_by_the_row(record: Record, wanted: Reservation) -> bool | None:
    """The row has another binding, or a deploy has changed what is hashed or under which key, so the recipe and the key
    of the row are used."""
    if not is_bound_to(record.fingerprint_recipe, wanted.bindings):
        return False
    if wanted.parts is None:
        return None
    version, recipe = record.fingerprint_version, record.fingerprint_recipe
    ours = wanted.fingerprint_recipe
    return same_request(version, recipe, record.fingerprint, wanted.parts, ours, wanted.fingerprint_under)


def _unreadable(record: Record, wanted: Reservation) -> Unreadable:
    key_id = record.fingerprint_version // KEY_STEP
    keyed = wanted.fingerprint_under(key_id, b"") if key_id else None
    is_lost = keyed == LOST_KEY and record.state in FINAL  # another state can still change: the operator settles it
    if key_id and wanted.under_key is None:
        return Unreadable(record, _no_keyring(f"fingerprint was made with encryption key {key_id}"))
    return Unreadable(record, _why_unreadable(record, key_id, keyed), is_lost)


def _why_unreadable(record: Record, key_id: int, keyed: bytes | None) -> str:
    if key_id == 0:
        return NEWER_VERSION
    if keyed == LOST_KEY:
        return (
            f"its fingerprint was made with encryption key {key_id}, which the keyring of this process declares lost. "
            "So it cannot be compared, and it does not run again"
        )
    if keyed is None:
        return (
            f"its fingerprint needs encryption key {key_id}, which is not in the keyring of this process. Add key "
            f"{key_id} to OnceKey(encryption=…), and keep it there until the rows that need it have expired"
        )
    if not one_key(keyed, record.fingerprint):
        return (
            f"its fingerprint was made with another encryption key {key_id} than this process has. Give the new key a "
            f"number of its own, and put the earlier key {key_id} back into OnceKey(encryption=…)"
        )
    return NEWER_VERSION


def _no_keyring(what: str) -> str:
    return (
        f"its {what}, and this process has no keyring. Give it the keyring of the other processes, "
        "OnceKey(encryption=…); until then it refuses every retry of such a key"
    )


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
