"""The seam: what a store must do, and nothing of how.

A store is plain blocking code that takes **batches**; ``engine/lanes.py`` turns concurrent callers into them. It knows
keys, not payments, and no policy: it compares and sets. Three rules bind every implementation, and
``oncekey.testing.store_suite`` checks them:

* every verb ends within the store's own time limit, or raises ``StoreUnavailable``;
* a batch names each (scope, key) once (the lane sees to it), is applied in the order of (scope, key), and its answers
  stand in the order of the batch;
* time is the store's clock, where it has one.

Calling a verb again after it raised is safe: the owner token tells one's own earlier success from a rival's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from oncekey.core.jobs import Conclusion, Job, JobState, OutboxHealth
from oncekey.core.record import Audit, Found, Record, Reservation, Swap
from oncekey.core.steps import Step, StepsOf


class Duty(StrEnum):
    """What upkeep looks for; one partial index each."""

    LEASES = "leases"  # in_progress, lease over
    EXPIRED = "expired"  # completed or failed (or retryable without steps), past expiry
    ABANDONED = "abandoned"  # pending, past expiry
    UNKNOWNS = "unknowns"  # unknown, its time to reconcile has come
    LAPSED = "lapsed"  # retryable with steps, past expiry: half done, and nobody came back


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What differs between stores, so that callers and the public suite never ask which store it is."""

    durable: bool
    """A commit survives kill -9 of every process and a loss of power."""
    shared: bool
    """Several processes see the same keys."""
    server_clock: bool
    """Leases are measured on a clock that all processes share, not on the host's."""
    writers: int
    """How many lanes may write at once; 1 means that reserve and swap share one."""
    enlists: Literal["postgresql", "sqlite"] | None = None
    """Whose transactions a request may enlist, and so whether there is an outbox; None: none."""


class Store(Protocol):
    """See the module's docstring for the rules."""

    @property
    def capabilities(self) -> Capabilities: ...

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        """Read each row, or insert it where there is none. Never waits for somebody's open transaction."""
        ...

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        """Move each row that still is as its swap says. None: it is not, or somebody holds it right now.

        The record that a deleting swap returns is the row as it was.
        """
        ...

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        """The rows of these (scope, key) pairs, as committed."""
        ...

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        """The steps of each of these keys, in the order in which they were first written."""
        ...

    def due(self, duty: Duty, limit: int) -> list[Record]:
        """At most ``limit`` rows that a duty is about, oldest first; without their responses."""
        ...

    def purge(self, limit: int) -> int:
        """Delete at most ``limit`` rows of Duty.EXPIRED, and say how many. Never anything in flight."""
        ...

    # -- the outbox: where ``capabilities.enlists`` is None, claim finds nothing -----------------------------------

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        """Take at most ``limit`` jobs of these tasks that are due, or whose worker's lease is over; oldest first.

        Each becomes ``running`` under ``owner`` with attempt + 1. By row, never by a watermark: a job that commits
        late is found (hazard 10). Skips what another worker is claiming right now.
        """
        ...

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        """Extend the leases of these running jobs; the ids that are still this owner's."""
        ...

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        """End attempts. False: the job is no longer that owner's, and nothing was written.

        Where a conclusion settles its key, row and key change in one transaction, and the key only if it still is
        pending under the job's ``key_owner``.
        """
        ...

    def note_provider(self, job_id: str, owner: str, provider_id: str) -> bool:
        """Keep the provider's id of a running job, before it is done."""
        ...

    def jobs(self, state: JobState, limit: int) -> list[Job]:
        """At most ``limit`` jobs in this state, oldest first: for operators."""
        ...

    def job(self, job_id: str) -> Job | None: ...

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        """An operator moves a dead job to READY (attempts start over) or CANCELLED; None: it is not dead.

        READY also takes a key that the dead letter made unknown back to pending, if it still is so.
        """
        ...

    def outbox_health(self) -> OutboxHealth: ...

    def migrate(self) -> list[str]:
        """Bring the tables to this version; the names of the migrations that ran. Safe to run twice and at once."""
        ...

    def check(self) -> None:
        """SchemaError, with one sentence that says what to run, unless the tables are as this version wants them."""
        ...

    def disconnect(self) -> None:
        """Close the calling thread's connection; the next verb opens another."""
        ...

    def close(self) -> None:
        """Close whatever this process holds open."""
        ...
