"""The values of the outbox: work that was committed with a business write, and how an attempt at it ended.

A **job** is one row of ``idempotency_outbox``. A worker *claims* it (owner token, lease, attempt + 1), works, and
*concludes* it. Every write after the claim compares the owner token, as with keys: a worker that was paused past its
lease cannot write.
"""

from __future__ import annotations

from enum import StrEnum

from oncekey.core.record import StoredResponse
from oncekey.core.states import State
from oncekey.core.values import value


class JobState(StrEnum):
    READY = "ready"  # waits for its time
    RUNNING = "running"  # leased to a worker; another worker may take it when the lease is over
    DONE = "done"
    DEAD = "dead"  # a dead letter: an operator must look
    CANCELLED = "cancelled"  # the reaper timed out its key, or an operator discarded it


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


class JobEnd(StrEnum):
    DONE = "done"
    RETRY = "retry"  # failed, and due again in ``retry_in`` seconds
    RELEASE = "release"  # shutdown: ready at once, and the attempt does not count; an error means that it had begun
    DEAD = "dead"


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


@value
class OutboxHealth:
    """The numbers for a health check and ``oncekey doctor``."""

    ready: int
    """Jobs that are due and not running, counted up to 10,000."""
    lag_seconds: float
    """For how long the oldest due job has waited."""
    dead: int
    """Counted up to 10,000."""
