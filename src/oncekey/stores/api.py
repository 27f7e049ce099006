"""The interfaces of a store: what it must do, not how.

A store is plain blocking code that takes **batches**; ``engine/batching`` turns concurrent callers into batches. A
store knows keys and states. It knows nothing of payments or policies: it compares and sets.

Every store has :class:`Keys`, :class:`Steps` and :class:`Inspect`; together they are a :class:`Store`. What else it
can do, it says by having the methods of these protocols:

=====================  ============================================================================================
:class:`Outbox`        jobs that commit with a request, and the verbs of a worker
:class:`Transactions`  a request can enlist the app's own transaction, which then completes the key
:class:`SharedCommit`  reservations and swaps in one commit
:class:`SharedTurn`    the ends of a worker's jobs and its next claim in one commit
:class:`EventLoops`    reserve and swap in an event loop, without a thread
:class:`Tallies`       the keys of one tenant can be counted, for limits
:class:`KeptValues`    the values that encryption covers can be read and written again, for a change of its keys
:class:`Sealing`       the store encrypts what it gets; ``oncekey.encryption`` has it, around another store
:class:`Epochs`        the store notices that it was emptied, and refuses until an operator accepts it
=====================  ============================================================================================

Callers ask ``isinstance(store, Outbox)`` once, when they are made, and never which class it is. What no method can
show is in :class:`Capabilities`. Every implementation keeps three rules, and ``oncekey.testing.store_suite`` checks
the last two. The first needs tests that hold a lock or stop the server:

* every verb ends within the store's own time limit, or raises ``StoreUnavailable``;
* a batch names each (scope, key) once (the lane guarantees this). The store applies it in the order of (scope, key),
  and returns the answers in the order of the batch;
* time is the store's clock, where it has one.

A caller may repeat a verb that raised: the owner token shows whether the first call succeeded or a rival did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from oncekey.core.audit import Audit, AuditLine
from oncekey.core.diagnosis import Diagnosis
from oncekey.core.health import StoreHealth
from oncekey.core.jobs import Conclusion, DeferredTo, Job, JobState, OutboxHealth
from oncekey.core.rates import Tally
from oncekey.core.record import Found, Record, Reservation, StoredResponse
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import Swap
from oncekey.stores.event_loops_api import EventLoops as EventLoops  # noqa: PLC0414 - a name of this module, too
from oncekey.stores.event_loops_api import InLoop as InLoop  # noqa: PLC0414 - a name of this module, too
from oncekey.stores.kept_api import Kept
from oncekey.stores.kept_api import KeptValues as KeptValues  # noqa: PLC0414 - a name of this module, too
from oncekey.stores.transactions_api import NOT_SEALED as NOT_SEALED  # noqa: PLC0414 - a name of this module, too
from oncekey.stores.transactions_api import Hold as Hold  # noqa: PLC0414 - a name of this module, too
from oncekey.stores.transactions_api import Sealing as Sealing  # noqa: PLC0414 - a name of this module, too
from oncekey.stores.transactions_api import Transactions as Transactions  # noqa: PLC0414 - a name of this module, too
from oncekey.stores.transactions_api import TransactionStatements as TransactionStatements  # noqa: PLC0414 - a name of this module, too

FOUND = 10
"""How many keys ``find`` names at most: one is right, and a few are enough to see that something is wrong."""


class Duty(StrEnum):
    """What upkeep looks for; one partial index each."""

    LEASES = "leases"  # in_progress, lease over
    EXPIRED = "expired"  # completed or failed (or retryable without steps), past expiry
    ABANDONED = "abandoned"  # pending, past expiry
    UNKNOWNS = "unknowns"  # unknown, its time to reconcile has come
    LAPSED = "lapsed"  # retryable with steps, past expiry: half done, and the client did not retry
    RESUMABLE = "resumable"  # retryable with steps, and the time to resume it has come


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How stores differ in ways that no method can show. Callers never look at the class of a store."""

    durable: bool
    """A commit survives kill -9 of every process and a loss of power."""
    shared: bool
    """Several processes see the same keys."""
    server_clock: bool
    """Leases are measured on a clock that all processes share, not on the host's."""
    writers: int
    """How many lanes may write at once; 1 means that reserve and swap share one."""
    embedded: bool = False
    """The database is part of the app's own processes, so only the app can run upkeep."""


class LostRace(Exception):
    """A rival reserved one of the batch's keys at the same moment. This is no fault: the caller asks the Store."""


class Keys(Protocol):
    """The rows of keys. The module's docstring has the rules."""

    @property
    def capabilities(self) -> Capabilities: ...

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        """Read each row, or insert it where there is none. Never waits for an open transaction."""
        ...

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        """Move each row that still is as its swap says. None: the row differs, or another transaction holds it now.

        A swap that deletes returns the row as it was. The swap's step and audit line are written in the same commit
        as the move, or not at all. A swap with ``forgets_steps`` also deletes all steps of the key.
        """
        ...

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        """The rows of these (scope, key) pairs, as committed."""
        ...

    def due(self, duty: Duty, limit: int) -> list[Record]:
        """At most ``limit`` rows that need this duty, oldest first; without their responses.

        Unknown keys are handed out fairly by scope (``duties.py``): the oldest of each first, and where more than
        ``limit`` are due, each call goes on with the scopes that follow those of the last one.
        """
        ...

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        """Delete at most ``limit`` rows, and return how many. Never deletes a key in flight.

        Rows of Duty.EXPIRED come first: final keys past their expiry. Then rows in the state ``expired`` whose
        retention has passed again since their expiry. ``expired_state_only``: only the latter. A reaper with ``soft``
        asks for these alone, because it moves the rows of Duty.EXPIRED to that state itself.
        """
        ...

    def migrate(self) -> list[str]:
        """Bring the tables to this version; return the names of the migrations that ran.

        Two processes may run it at once, and a second run does nothing.
        """
        ...

    def check(self) -> None:
        """Raise SchemaError unless the tables are as this version needs them. Its sentence says what to run."""
        ...

    def disconnect(self) -> None:
        """Close the calling thread's connection; the next verb opens another."""
        ...

    def close(self) -> None:
        """Close all connections of this process."""
        ...


class Steps(Protocol):
    """The steps of phased requests; a swap writes them (``Swap.step``), in the same commit as the row."""

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        """The steps of each of these keys, in the order in which they were first written."""
        ...

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[tuple[str, str]]:
        """At most ``FOUND`` (scope, key) whose steps or jobs carry one of these, in the order of (scope, key)."""
        ...


class Inspect(Protocol):
    """What operators and health checks read: no request waits for these. A swap writes the audit (``Swap.audit``)."""

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        """At most ``limit`` changes of this key by an operator or the reconciler, newest first; they outlive it."""
        ...

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        """Delete at most ``limit`` of the oldest lines of the audit that are older than this, and say how many.

        Never a line of a key that is not over: in progress, pending, unknown, or to be retried.
        """
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
        """At most ``limit`` rows that meet every given filter, in the order of (scope, key); without their responses.

        ``older_than``: created at least so many seconds ago. ``after``: only rows after this (scope, key), to read
        page by page.
        """
        ...

    def counts(self) -> StoreHealth:
        """How many keys are in which state, and what has waited too long. Cheap for any number of keys."""
        ...

    def diagnose(self) -> list[Diagnosis]:
        """How the store itself is set up: tables, indexes, clock, durability, limits. For ``oncekey doctor``."""
        ...


class Store(Keys, Steps, Inspect, Protocol):
    """What every store has."""


@runtime_checkable
class Outbox(Store, Protocol):
    """Jobs beside the keys. ``Transactions`` adds them; a worker claims and concludes them."""

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        """Take at most ``limit`` jobs of these tasks that are due, or whose worker's lease is over; oldest first.

        Claims are fair by scope (``duties.JobTurns``): after a claim that was full, half of the next one is taken in
        turns by scope, from the scope on that follows the last turn. The other half are the oldest jobs.

        Each becomes ``running`` under ``owner`` with attempt + 1. The store claims by row, without a watermark, so it
        also finds a job that commits late (hazard 10). It skips jobs that another worker is claiming right now.
        """
        ...

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        """Extend the leases of these running jobs; return the ids that this owner still holds."""
        ...

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        """End attempts. False: that owner no longer holds the job, and the store wrote nothing.

        If a conclusion settles its key, job and key change in one transaction. The key changes only if it still is
        pending under the job's ``key_owner``.
        """
        ...

    def note_provider(self, job_id: str, owner: str, provider_id: str) -> bool:
        """Store the provider's id of a running job, before the job is done."""
        ...

    def jobs(self, state: JobState, limit: int) -> list[Job]:
        """At most ``limit`` jobs in this state, oldest first: for operators."""
        ...

    def jobs_of(self, scope: str, key: str, limit: int) -> list[Job]:
        """At most ``limit`` jobs that requests of this key enqueued, oldest first; jobs may outlive the key."""
        ...

    def job(self, job_id: str) -> Job | None: ...

    def deferred_to(self, asked: DeferredTo) -> Job | None:
        """The job that is to settle the key of this owner, in any state; None: the owner's request was not deferred."""
        ...

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        """An operator moves a dead job to READY (attempts start over) or CANCELLED; None: it is not dead.

        If the dead letter made its key unknown and the key still is unknown, READY makes it pending again.
        """
        ...

    def outbox_health(self) -> OutboxHealth: ...

    def purge_jobs(self, limit: int, keep_seconds: float) -> int:
        """Delete at most ``limit`` jobs that are done or cancelled for longer than this, and return how many.

        Never deletes a dead letter: it stays until an operator redirects it. Nor the job that an unknown key was
        deferred to: as long as that job is there, no verdict lets the request run again.
        """
        ...

    def time_out(self, limit: int, response: StoredResponse) -> list[tuple[str, str]]:
        """Fail at most ``limit`` pending keys past their expiry with this response; return their (scope, key).

        If a worker tried the job, the key becomes unknown instead, without the response: an attempt that never ended,
        or that failed and was to be repeated, may have had its effect.

        The store cancels the job that would have settled the key in the same transaction. It skips a key whose job
        a worker is running under a live lease (hazard 11): the worker settles that key.
        """
        ...


@runtime_checkable
class SharedCommit(Protocol):
    """Reservations and swaps share a commit. It pays where one lane does both."""

    def both(self, begins: Sequence[Reservation], ends: Sequence[Swap]) -> tuple[list[Found], list[Record | None]]:
        """``swap`` and then ``reserve``, in one commit."""
        ...


@runtime_checkable
class SharedTurn(Protocol):
    """The ends of a worker's jobs and its next claim share a commit. A worker asks for both at nearly every turn."""

    def turn(
        self, ended: Sequence[Conclusion], owner: str, tasks: Sequence[str], limit: int, lease_seconds: float
    ) -> tuple[list[bool], list[Job]]:
        """``conclude`` and then ``claim``, in one commit. It never takes a job that is among ``ended``."""
        ...


@runtime_checkable
class Tallies(Protocol):
    """The store can count the keys of one tenant without reading those of others."""

    def tally(self, asked: Tally) -> int:
        """How many keys the tenant has, in any state and with any endpoint; at most ``asked.limit``."""
        ...


@runtime_checkable
class Epochs(Protocol):
    """The data can be lost while the app runs, as in a server that keeps it in memory. An epoch is lost with it.

    Without its epoch the store refuses every verb with SchemaError, because lost keys would look new. ``migrate`` never
    writes an epoch: only these two do, and only an operator calls them.
    """

    def init(self) -> str:
        """Write an epoch where there is none yet, and return it. A second call changes nothing."""
        ...

    def accept_loss(self, audit: Audit) -> str:
        """Write a new epoch after a loss, and return it. The audit keeps the name of the operator."""
        ...

    def left_after_loss(self, limit: int) -> Sequence[Kept]:
        """Some rows that a loss has left, as they are kept, although every verb is refused: up to ``limit`` of each
        part of the store that can be read."""
        ...
