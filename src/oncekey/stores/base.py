"""The seam: what a store must do, and nothing of how.

A store is plain blocking code that takes **batches**; ``engine/lane.py`` turns concurrent callers into them. It knows
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

from oncekey.core.diagnosis import Diagnosis
from oncekey.core.jobs import Conclusion, Job, JobState, OutboxHealth
from oncekey.core.record import Audit, AuditLine, Found, Record, Reservation, StoredResponse, StoreHealth, Swap
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf

FOUND = 10
"""How many keys ``find`` names at most: one is right, and a few are enough to see that something is wrong."""


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
    in_loop: bool = False
    """Whether the hot verbs can be had without a lane, for the caller's event loop (:meth:`Store.in_loop`)."""
    together: bool = False
    """Reservations and swaps can share a commit (:meth:`Store.both`), which is worth it where one lane does both."""
    enlists: Literal["postgresql", "sqlite"] | None = None
    """Whose transactions a request may enlist, and so whether there is an outbox; None: none."""


class LostRace(Exception):
    """A rival reserved one of the batch's keys at the same moment: nothing is wrong, ask the Store."""


class InLoop(Protocol):
    """The two hot verbs for an event loop. What goes wrong is raised, and the lanes then ask the Store instead."""

    async def reserve(self, batch: Sequence[Reservation]) -> Sequence[Found | None]:
        """None: not here; the lanes are asked about it."""
        ...

    async def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        """Only what ``ends``: every other move is for the lanes."""
        ...

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[Swap]
    ) -> tuple[Sequence[Found | None], list[Record | None]]:
        """``swap`` and then ``reserve``, in one commit."""
        ...

    def abandon(self) -> None:
        """Let go of the connection, from any thread; the next verb opens another."""
        ...


class Store(Protocol):
    """See the module's docstring for the rules."""

    @property
    def capabilities(self) -> Capabilities: ...

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        """Read each row, or insert it where there is none. Never waits for somebody's open transaction."""
        ...

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        """Move each row that still is as its swap says. None: it is not, or somebody holds it right now.

        The record that a deleting swap returns is the row as it was. Its step and its audit line are written with the
        move, in one commit, or not at all; where a swap ``forgets_steps``, all steps of the key go with it.
        """
        ...

    def both(self, begins: Sequence[Reservation], ends: Sequence[Swap]) -> tuple[list[Found], list[Record | None]]:
        """``swap`` and then ``reserve``, in one commit; for stores whose capabilities say ``together``."""
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

    def purge(self, limit: int, *, tombstones_only: bool = False) -> int:
        """Delete at most ``limit`` rows of Duty.EXPIRED, and say how many. Never anything in flight.

        Also those in state ``expired`` whose retention has passed a second time. A reaper that keeps tombstones asks
        for these alone: it moves what is due to ``expired`` itself.
        """
        ...

    # -- for operators and webhooks: never in the way of a request ---------------------------------------------------

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        """At most ``limit`` changes of this key by hand or by the reconciler, newest first; they outlive the key."""
        ...

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[tuple[str, str]]:
        """At most ``FOUND`` (scope, key) whose steps or jobs carry one of these, in the order of (scope, key)."""
        ...

    def listing(
        self,
        state: State | None = None,
        scope: str | None = None,
        operation: str | None = None,
        older_than: float | None = None,
        limit: int = 100,
        after: tuple[str, str] | None = None,
    ) -> list[Record]:
        """At most ``limit`` rows that meet every filter given, in the order of (scope, key); without their responses.

        ``older_than``: created at least so many seconds ago. ``after``: only what follows this (scope, key), for
        reading on.
        """
        ...

    def counts(self) -> StoreHealth:
        """How many keys are in which state, and what has waited too long. Cheap, however many there are."""
        ...

    def diagnose(self) -> list[Diagnosis]:
        """How the store itself is set up: tables, indexes, clock, durability, limits. For ``oncekey doctor``."""
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

    def jobs_of(self, scope: str, key: str, limit: int) -> list[Job]:
        """At most ``limit`` jobs that the requests of this key have enqueued, oldest first; they may outlive it."""
        ...

    def job(self, job_id: str) -> Job | None: ...

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        """An operator moves a dead job to READY (attempts start over) or CANCELLED; None: it is not dead.

        READY also takes a key that the dead letter made unknown back to pending, if it still is so.
        """
        ...

    def outbox_health(self) -> OutboxHealth: ...

    def purge_jobs(self, limit: int, keep_seconds: float) -> int:
        """Delete at most ``limit`` jobs that are done or cancelled for longer than this, and say how many.

        Never a dead letter: it stays until somebody has looked.
        """
        ...

    def time_out(self, limit: int, response: StoredResponse) -> list[tuple[str, str]]:
        """Fail at most ``limit`` pending keys past their expiry with this response; which (scope, key) they were.

        One whose job was tried becomes unknown instead, without the response: an attempt that never ended, or that
        failed and would have been repeated, may have had its effect.

        The job that would have settled the key is cancelled in the same transaction. A key whose job a worker is
        running under a live lease is left alone (hazard 11): the worker settles it.
        """
        ...

    def in_loop(self) -> InLoop:
        """A connection for one event loop, where ``capabilities.in_loop`` says that there is one."""
        ...

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
