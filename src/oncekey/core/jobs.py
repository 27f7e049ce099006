"""The outbox: the states of a job, every move between them, and the values that a store gets and returns.

A **job** is one row of ``idempotency_outbox``: work that was committed with a business write. A worker *claims* it
(owner token, lease, attempt + 1), works, and *concludes* it. Every write after the claim compares the owner token, as
with keys: a worker that was paused past its lease cannot write. As with keys (``states.py``), a move that is not in
``TABLE`` does not exist. ``testing/conformance/job_moves.py`` tries every move in every state and compares what the
store did with the table.

=========  ======================================================================  =====================================
state      meaning                                                                 left by
=========  ======================================================================  =====================================
ready      waits for its time                                                      a worker, or the reaper with its key
running    leased to a worker                                                      that worker; after the lease, another
done       over                                                                    the reaper, when it was kept for long
dead       a dead letter: attempts are used up, or the task gave up                an operator only
cancelled  the reaper timed out its key, or an operator discarded the dead letter  the reaper, when it was kept for long
=========  ======================================================================  =====================================

A running job whose lease is over may still have had its effect. So a job is done *at least* once, and its attempts use
one downstream key.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, State
from oncekey.core.values import Word, value
from oncekey.errors import IllegalTransition


class JobState(Word):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"


class JobEvent(Word):
    ENQUEUE = "enqueue"
    CLAIM = "claim"
    RENEW = "renew"
    RECORD = "record"  # the provider's id
    DONE = "done"
    RETRY = "retry"
    RELEASE = "release"
    DEAD = "dead"
    RETRY_JOB = "retry_job"  # this word and the next one stand in the audit
    DISCARD_JOB = "discard_job"
    TIME_OUT = "time_out"
    PURGE = "purge"


class JobCondition(Word):
    """What must hold in the row at the moment of the move, besides its state."""

    DUE = "due"
    OWNER_TOKEN = "the owner token of its claim"  # noqa: S105 - no password
    LEASE_OVER = "lease over"
    SETTLES = "settles its key"
    KEY_PAST_EXPIRY = "its key is pending past expiry"
    KEPT_LONG = "kept for long enough"


@dataclass(frozen=True, slots=True)
class JobMove:
    source: JobState | None  # None: no row
    event: JobEvent
    target: JobState | None  # None: the row is deleted
    by: frozenset[Actor]
    when: frozenset[JobCondition] = frozenset()


def _move(source: JobState | None, event: JobEvent, target: JobState | None, by: Actor, *when: JobCondition) -> JobMove:
    return JobMove(source, event, target, frozenset({by}), frozenset(when))


_S, _E, _A, _C = JobState, JobEvent, Actor, JobCondition

# fmt: off
TABLE: tuple[JobMove, ...] = (
    # The owner of a key adds the job in its own transaction.
    _move(None,         _E.ENQUEUE,     _S.READY,     _A.OWNER),
    # A worker claims the job, and ends its attempt.
    _move(_S.READY,     _E.CLAIM,       _S.RUNNING,   _A.WORKER, _C.DUE),
    _move(_S.RUNNING,   _E.CLAIM,       _S.RUNNING,   _A.WORKER, _C.LEASE_OVER),
    _move(_S.RUNNING,   _E.RENEW,       _S.RUNNING,   _A.WORKER, _C.OWNER_TOKEN),
    _move(_S.RUNNING,   _E.RECORD,      _S.RUNNING,   _A.WORKER, _C.OWNER_TOKEN),
    _move(_S.RUNNING,   _E.DONE,        _S.DONE,      _A.WORKER, _C.OWNER_TOKEN),
    _move(_S.RUNNING,   _E.RETRY,       _S.READY,     _A.WORKER, _C.OWNER_TOKEN),
    _move(_S.RUNNING,   _E.RELEASE,     _S.READY,     _A.WORKER, _C.OWNER_TOKEN),
    _move(_S.RUNNING,   _E.DEAD,        _S.DEAD,      _A.WORKER, _C.OWNER_TOKEN),
    # Only an operator moves a dead letter.
    _move(_S.DEAD,      _E.RETRY_JOB,   _S.READY,     _A.OPERATOR),
    _move(_S.DEAD,      _E.DISCARD_JOB, _S.CANCELLED, _A.OPERATOR),
    # The reaper times out a pending key. A job that would have settled it must not run after that.
    _move(_S.READY,     _E.TIME_OUT,    _S.CANCELLED, _A.REAPER, _C.SETTLES, _C.KEY_PAST_EXPIRY),
    _move(_S.RUNNING,   _E.TIME_OUT,    _S.CANCELLED, _A.REAPER, _C.SETTLES, _C.KEY_PAST_EXPIRY, _C.LEASE_OVER),
    # The reaper deletes jobs that are over. It never deletes a dead letter.
    _move(_S.DONE,      _E.PURGE,       None,         _A.REAPER, _C.KEPT_LONG),
    _move(_S.CANCELLED, _E.PURGE,       None,         _A.REAPER, _C.KEPT_LONG),
)
# fmt: on


def find(source: JobState | None, event: JobEvent, actor: Actor) -> JobMove:
    """The row of ``TABLE`` for this move. IllegalTransition: it has none."""
    for row in TABLE:
        if row.source is source and row.event is event and actor in row.by:
            return row
    raise IllegalTransition(f"no move '{event}' of a job from {source or 'no row'} by {actor}: see core/jobs.py")


def redirection(to_state: JobState) -> JobEvent:
    """The event by which an operator moves a dead letter to this state."""
    moves = {row.target: row.event for row in TABLE if row.source is JobState.DEAD and Actor.OPERATOR in row.by}
    if to_state not in moves:
        raise IllegalTransition(f"a dead letter goes to {' or '.join(map(str, moves))}, not to {to_state}")
    return moves[to_state]


@value
class NewJob:
    """A row that a request adds to its own transaction."""

    id: str
    scope: str
    key: str
    key_owner: str
    """The owner token of the attempt that enqueued it: the generation that a settling job compares."""
    operation: str
    task: str
    payload: bytes
    """JSON."""
    downstream_key: str
    run_at: float | None
    """Seconds since the epoch; None: at once."""
    settles: bool
    """Whether this job settles its key (a deferred request)."""


@value
class Job:
    """One row of the outbox."""

    id: str
    scope: str
    key: str
    key_owner: str
    operation: str
    task: str
    payload: bytes
    downstream_key: str
    settles: bool
    state: JobState
    attempt: int
    owner: str | None
    lease_until: float | None
    run_at: float
    provider_id: str | None
    last_error: str | None
    history: bytes
    """JSON: a list of ``{"attempt", "at", "error"}``, one for each attempt that failed; the oldest are cut."""
    created_at: float
    finished_at: float | None
    now: float

    @property
    def lag(self) -> float:
        """How many seconds ago the job was due."""
        return max(0.0, self.now - self.run_at)


@value
class DeferredTo:
    """Ask a store to which job the request of this owner token was deferred."""

    scope: str
    key: str
    owner: str


class JobEnd(Word):
    """The events by which a worker ends its attempt."""

    DONE = "done"
    RETRY = "retry"  # failed, and due again in ``retry_in`` seconds
    RELEASE = "release"  # shutdown: due at once, and the attempt is not counted. With an error: the task had begun
    DEAD = "dead"

    @property
    def target(self) -> JobState:
        """The state of the job after this end."""
        return _TARGETS[self]


_TARGETS: dict[JobEnd, JobState] = {
    end: target for end in JobEnd if (target := find(JobState.RUNNING, JobEvent(end), Actor.WORKER).target) is not None
}


@value
class Conclusion:
    """How one attempt at a job ended. The store applies it only while the job is running under this owner token."""

    id: str
    owner: str
    end: JobEnd
    retry_in: float = 0.0
    error: str | None = None
    settle: State | None = None
    """For a job that settles its key, with DONE or DEAD: the key becomes completed, failed, or unknown."""
    response: StoredResponse | None = None
    # neither stored nor compared
    of: tuple[str, str] | None = field(default=None, compare=False, repr=False)
    """The (scope, key) of the job, for a store that encrypts; None: that store looks it up."""


@value
class OutboxHealth:
    """The numbers for a health check and ``oncekey doctor``."""

    ready: int
    """Jobs that are due and not running, counted up to 10,000."""
    lag_seconds: float
    """For how long the oldest due job has waited."""
    dead: int
    """Counted up to 10,000."""
