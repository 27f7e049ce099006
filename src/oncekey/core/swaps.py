"""The request to move a row: :class:`Swap`, and :func:`swap`, which builds it as the state table says.

A store compares the row with the first half of a Swap, and sets the second half only if the row is still the same.
:class:`End` is the move that nearly every request makes, in the few values that it needs.
"""

from __future__ import annotations

from dataclasses import field
from typing import Final, Literal, Protocol

from oncekey.core.audit import Audit, AuditLine
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import (
    FENCES,
    FINAL,
    MAY_RERUN,
    STARTS,
    Actor,
    Condition,
    Effects,
    Event,
    State,
    Transition,
    find,
)
from oncekey.core.steps import Step
from oncekey.core.values import value
from oncekey.errors import IllegalTransition

RESUME_SECONDS = 30.0
"""How long upkeep waits for the client to retry a half-done request. It doubles for each try of upkeep."""
LONGEST_RESUME_SECONDS = 3600.0

# An enum's member costs more by its class, and every request needs these.
_IN_PROGRESS: Final = State.IN_PROGRESS
_COMPLETED: Final = State.COMPLETED
_COMPLETE: Final = Event.COMPLETE


@value
class Swap:
    """Move one row if it still is (from_state, owner) and the conditions hold; otherwise change nothing.

    Build it with :func:`swap`, which takes the conditions from the state table.
    """

    scope: str
    key: str
    event: Event
    # compare
    from_state: State
    owner: str
    lease_over_by: float | None  # None: the lease does not matter; n: it ended at least n seconds ago
    past_expiry: bool
    # set
    to_state: State | None  # None: delete the row
    new_owner: str | None = None
    attempt: int | None = None
    lease_seconds: float | None = None
    response: StoredResponse | None = None
    last_error: str | None = None
    recovery_point: str | None = None
    reconcile_in: float | None = None
    effects: Effects | None = None
    reconcile_tries: int | None = None
    restart: Reservation | None = None
    # compare, too
    from_effects: Effects | None = None
    """Set if a second run must be harmless: under the same (state, owner), the owner may have changed its effects."""
    # written beside the row, in the same commit, if and only if the row is moved
    step: Step | None = None
    audit: Audit | None = None
    # not part of the move
    seen: Record | None = field(default=None, compare=False, repr=False)
    """The row as the caller read it, so that a store need not return what has not changed."""

    def fits(self, row: Record, now: float) -> bool:
        """Whether ``row`` still is as this swap compares it. The queries of the SQL stores do the same."""
        return not (
            row.state is not self.from_state
            or row.owner != self.owner
            or (self.lease_over_by is not None and row.lease_until + self.lease_over_by > now)
            or (self.past_expiry and row.expires_at > now)
            or (self.from_effects is not None and row.effects is not self.from_effects)
            # discard is for a first attempt without steps
            or (self.to_state is None and row.state is State.IN_PROGRESS and (row.attempt > 1 or row.has_steps))
        )

    @property
    def forgets_steps(self) -> bool:
        """Whether the key's steps are deleted: the row is deleted, expires, or starts over."""
        return self.to_state is None or self.to_state is State.EXPIRED or self.restart is not None

    def audit_line(self, now: float) -> AuditLine | None:
        """What the audit keeps of this move; None: nothing."""
        if (audit := self.audit) is None:
            return None
        states = (self.from_state, self.to_state)
        return AuditLine(now, audit.who, self.event, self.scope, self.key, None, *states, audit.why)

    @property
    def settles(self) -> bool:
        """Whether a verdict makes an unknown key retryable. Then its retention starts again: the client has as much
        time as for a new request, and the reaper does not make the key unknown again at once."""
        return self.from_state is State.UNKNOWN and self.to_state is State.FAILED_RETRYABLE

    @property
    def plain(self) -> bool:
        """Whether it moves one row, writes nothing else, and the new row follows from ``seen``.

        A move of an unknown key is not plain: the reconciler counts its tries while (state, owner) stays the same.
        """
        return (
            self.step is None
            and self.audit is None
            and self.reconcile_tries is None
            and self.from_state is not State.UNKNOWN
            and not self.forgets_steps
        )

    @property
    def ends(self) -> bool:
        """Whether an owner ends its attempt with it: the row becomes final, and the new row follows from ``seen``."""
        return (
            self.to_state in FINAL
            and self.from_state is State.IN_PROGRESS
            and self.seen is not None
            and self.step is None
            and self.audit is None
            and self.effects is None
            and self.recovery_point is None
            and self.new_owner is None
            and self.lease_seconds is None
            and self.lease_over_by is None
            and self.attempt is None
            and self.reconcile_in is None
            and self.reconcile_tries is None
            and self.restart is None
            and self.from_effects is None
            and not self.past_expiry
        )

    def moved(self, row: Record, now: float) -> Record:
        """The row after this move of ``row`` at ``now``; for moves that neither delete nor start over."""
        to_state = self.to_state or row.state
        ends = to_state in FINAL
        return Record(
            row.scope,
            row.key,
            row.operation,
            row.fingerprint,
            row.fingerprint_version,
            self.effects or row.effects,
            to_state,
            self.attempt or row.attempt,
            self.new_owner or row.owner,
            row.lease_until if self.lease_seconds is None else now + self.lease_seconds,
            self.recovery_point or row.recovery_point,
            self.response,
            self.last_error,
            None if self.reconcile_in is None else now + self.reconcile_in,
            row.reconcile_tries if self.reconcile_tries is None else self.reconcile_tries,
            row.created_at,
            now if ends else None,
            row.retention_seconds,
            max(row.expires_at, now + row.retention_seconds) if ends or self.settles else row.expires_at,
            now,
            row.fingerprint_recipe,
            row.quarantine_seconds,
        )


class Owner(Protocol):
    """An attempt that owns its key."""

    @property
    def record(self) -> Record: ...


@value
class End:
    """The owner completes its key with a response. A Swap has thrice as many values, and a request pays for each."""

    scope: str
    key: str
    owner: str
    response: StoredResponse
    of: Owner = field(compare=False, repr=False)
    to_state: State = _COMPLETED
    last_error: str | None = None

    def swap(self) -> Swap:
        """The same move as a Swap, for a store or a lane that takes only these."""
        record = self.of.record
        return Swap(
            record.scope, record.key, _COMPLETE, _IN_PROGRESS, record.owner, None, False, _COMPLETED,
            response=self.response, seen=record,
        )  # fmt: skip


def swap(
    record: Record,
    event: Event,
    by: Actor,
    *,
    to_state: State | Literal["the only one"] | None = "the only one",
    reservation: Reservation | None = None,
    lease_seconds: float | None = None,
    response: StoredResponse | None = None,
    last_error: str | None = None,
    recovery_point: str | None = None,
    quarantine_seconds: float | None = None,
    reconcile_in: float | None = None,
    effects: Effects | None = None,
    from_effects: Effects | None = None,
    step: Step | None = None,
    audit: Audit | None = None,
    new_owner: str | None = None,
) -> Swap:
    """The Swap that moves ``record`` as ``states.TABLE`` says; IllegalTransition if it has no such move.

    The store checks conditions on time, on its own clock. This function checks conditions that cannot change while
    (state, owner) stays the same (attempt, steps, effects).

    A move to ``unknown`` ends the lease, so that the quarantine counts from the doubt. An owner whose handler may still
    run gives ``lease_seconds``: it counts from the end of that lease. ``quarantine_seconds`` replaces the row's.
    """
    move = find(record.state, event, by, to_state)
    lease_over_by, past_expiry = None, False
    if move.when:
        _check(move, record, by)
        if Condition.LEASE_OVER in move.when:
            lease_over_by = 0.0
        elif Condition.QUARANTINE_OVER in move.when:
            lease_over_by = record.quarantine if quarantine_seconds is None else quarantine_seconds
        past_expiry = Condition.PAST_EXPIRY in move.when
        if Condition.MAY_RERUN in move.when:
            from_effects = record.effects
    attempt = restart = tries = None
    starts = event in STARTS
    if starts != (reservation is not None):
        raise IllegalTransition(f"'{event}' {'needs' if starts else 'takes no'} new reservation")
    if step is not None and (starts or move.target in (None, State.EXPIRED)):
        raise IllegalTransition(f"'{event}' takes no step: it begins an attempt, or forgets the steps of the key")
    if (event in FENCES) != (new_owner is not None) or (event in FENCES and step is None):
        raise IllegalTransition(f"'{event}' {'needs an effect and' if event in FENCES else 'takes no'} new owner token")
    if starts:
        attempt, restart = (1, reservation) if event is Event.RESERVE else (record.attempt + 1, None)
        tries = record.reconcile_tries + 1 if by is Actor.RESUMER else _from_the_start(record)
    elif move.target is State.UNKNOWN:
        if event is Event.POSTPONE:
            tries = record.reconcile_tries + 1  # without ``reconcile_in`` the key becomes a dead letter
        else:
            if reconcile_in is None:
                reconcile_in = 0.0  # an unknown outcome is always on the reconciler's list (I4)
                tries = _from_the_start(record)
            if lease_seconds is None and record.state is not State.UNKNOWN:
                lease_seconds = 0.0
    elif move.target is State.FAILED_RETRYABLE and event is not Event.POSTPONE and record.has_steps:
        # Half done: on the resumer's list. After a verdict the resumer begins at once. Otherwise the client goes first.
        if record.state is State.UNKNOWN or event is Event.CORRECT:
            reconcile_in, tries = 0.0, _from_the_start(record)
        else:
            reconcile_in = resume_in(record.reconcile_tries)
    return Swap(
        record.scope,
        record.key,
        event,
        record.state,
        record.owner,
        lease_over_by,
        past_expiry,
        move.target,
        reservation.owner if reservation else new_owner,
        attempt,
        reservation.lease_seconds if reservation else lease_seconds,
        response,
        last_error,
        recovery_point,
        reconcile_in,
        # The present code says where its effects live, not the code of an earlier deploy.
        reservation.effects if reservation else effects,
        tries,
        restart,
        from_effects,
        step,
        audit,
        record,
    )


def resume_in(tries: int) -> float:
    """Seconds until upkeep may resume a half-done request, after so many tries of upkeep."""
    return min(RESUME_SECONDS * 2.0 ** min(tries, 16), LONGEST_RESUME_SECONDS)


def _from_the_start(record: Record) -> int | None:
    """The count of tries that a new attempt, or a new question, begins with; None: it is 0 already."""
    return 0 if record.reconcile_tries else None


def _check(move: Transition, record: Record, by: Actor) -> None:
    for condition, holds in (
        (Condition.FIRST_ATTEMPT, record.attempt == 1),
        (Condition.NO_STEPS, not record.has_steps),
        (Condition.HAS_STEPS, record.has_steps),
        (Condition.MAY_HAVE_BEGUN, record.has_steps or record.effects is Effects.REPEATABLE),
        (Condition.MAY_RERUN, record.effects in MAY_RERUN),
        (Condition.ONE_IN_DOUBT, record.may_have_effect_in_doubt),
        (Condition.SEVERAL_IN_DOUBT, record.may_have_effect_in_doubt),
        (Condition.NONE_IN_DOUBT, not record.may_have_effect_in_doubt),
    ):
        if condition in move.when and not holds:
            raise IllegalTransition(f"'{move.event}' by {by} needs '{condition}', which this record does not meet")


def undo(work: Reservation | Swap) -> Swap | None:
    """The Swap that gives back what ``work`` took for a caller that is gone; None: it took nothing.

    No handler ran under that owner token. So a first attempt is deleted, and a later one becomes retryable again.
    """
    half_done = False
    if isinstance(work, Reservation):
        first, owner, attempt = True, work.owner, 1
    elif work.new_owner is not None and work.attempt is not None:
        first, owner, attempt = work.attempt == 1, work.new_owner, work.attempt
        half_done = work.restart is None and work.seen is not None and work.seen.has_steps
    else:
        return None
    move = find(State.IN_PROGRESS, Event.DISCARD if first else Event.RELEASE, Actor.OWNER)
    return Swap(
        scope=work.scope,
        key=work.key,
        event=move.event,
        from_state=State.IN_PROGRESS,
        owner=owner,
        lease_over_by=None,
        past_expiry=False,
        to_state=move.target,
        attempt=None if first else attempt,
        reconcile_in=RESUME_SECONDS if half_done else None,
        last_error=None if first else "the caller gave up before the handler began",
    )
