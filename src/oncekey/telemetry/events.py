"""What happened, as values: the events that logs, metrics and the app's own hook are fed from.

Owns the list of events, the name of each one's metric and the level at which it is logged. No event has a field for a
key or a body (hazard 28; ``redaction.py`` has how they are shown). Must not know Prometheus or OpenTelemetry: those
read ``metric`` and ``amount`` in modules of their own.

The first twelve metric names are the usual ones of an idempotency layer; oncekey's own follow the same style.
``emitter.py`` sends the events.
"""

from __future__ import annotations

from dataclasses import dataclass
from logging import DEBUG, ERROR, INFO, WARNING
from typing import ClassVar

from oncekey.core.jobs import Job
from oncekey.core.record import Record
from oncekey.telemetry.redaction import redact


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. ``metric`` is its counter, to be raised by ``amount``."""

    metric: ClassVar[str]
    level: ClassVar[int]

    @property
    def amount(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class KeyEvent(Event):
    """About one key. Its fields are what :func:`about` gives: ``Completed(*about(record), status=201)``."""

    scope: str
    key_hint: str
    operation: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StoreEvent(Event):
    """About the store. ``verb`` is what was asked of it; ``error`` is in the words of ``describe``."""

    verb: str
    error: str


@dataclass(frozen=True, slots=True)
class JobEvent(KeyEvent):
    """About one job of the outbox, and the key it belongs to: ``JobDone(*about_job(job), seconds=0.2)``."""

    task: str
    job_id: str


# The twelve usual ones.


@dataclass(frozen=True, slots=True)
class Reserved(KeyEvent):
    """A new key was taken by its first request."""

    metric = "api.idempotency.reserve.created.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Replayed(KeyEvent):
    """A stored response was sent again."""

    metric = "api.idempotency.reserve.replay.count"
    level = DEBUG
    status: int


@dataclass(frozen=True, slots=True)
class FoundInFlight(KeyEvent):
    """A duplicate met a request that was still running."""

    metric = "api.idempotency.reserve.in_progress.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Misused(KeyEvent):
    """A key came back with a different request: a client's bug, or somebody trying."""

    metric = "api.idempotency.reserve.key_misuse.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class Retried(KeyEvent):
    """A retryable key was taken by a new attempt."""

    metric = "api.idempotency.reserve.failed_retry.count"
    level = INFO


@dataclass(frozen=True, slots=True)
class FoundUnknown(KeyEvent):
    """A retry met a key whose outcome is unknown, and was refused."""

    metric = "api.idempotency.reserve.unknown.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class StoreFailed(StoreEvent):
    """The store did not do what was asked, or did not say so in time."""

    metric = "api.idempotency.store.error.count"
    level = ERROR


@dataclass(frozen=True, slots=True)
class ZombieFound(KeyEvent):
    """A key was in progress, and its lease was over."""

    metric = "api.idempotency.zombie_key.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class Pruned(Event):
    """The reaper removed keys whose time was over."""

    metric = "api.idempotency.ttl_pruned.count"
    level = INFO
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class ReconcileScheduled(KeyEvent):
    """An unknown outcome was put on the reconciler's list."""

    metric = "api.idempotency.reconcile.scheduled.count"
    level = INFO
    in_seconds: float


@dataclass(frozen=True, slots=True)
class ReconcileResolved(KeyEvent):
    """An unknown outcome was settled. ``state`` is what the key became."""

    metric = "api.idempotency.reconcile.resolved.count"
    level = INFO
    state: str


@dataclass(frozen=True, slots=True)
class ReconcileFailed(KeyEvent):
    """An unknown outcome could not be settled this time."""

    metric = "api.idempotency.reconcile.failed.count"
    level = WARNING
    tries: int
    error: str


# Our own: how attempts ended.


@dataclass(frozen=True, slots=True)
class FoundUnreadable(KeyEvent):
    """A key was first used with a newer version of oncekey, which this one cannot compare with: 503, nothing ran."""

    metric = "api.idempotency.reserve.not_comparable.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class Completed(KeyEvent):
    """The handler succeeded, and its response is stored."""

    metric = "api.idempotency.finish.completed.count"
    level = DEBUG
    status: int


@dataclass(frozen=True, slots=True)
class Failed(KeyEvent):
    """The handler failed for good, and its error is stored."""

    metric = "api.idempotency.finish.failed.count"
    level = INFO
    status: int


@dataclass(frozen=True, slots=True)
class Released(KeyEvent):
    """The attempt ended without an effect, or can be resumed: the key can be retried."""

    metric = "api.idempotency.finish.released.count"
    level = INFO
    reason: str


@dataclass(frozen=True, slots=True)
class RanTooLong(KeyEvent):
    """A handler was still running when its ``max_run`` was over: its lease is no longer renewed, and ``effects``
    decides what the key becomes. ``handler``: whether it was cancelled; a thread cannot be."""

    metric = "api.idempotency.handler.max_run.count"
    level = WARNING
    max_seconds: float
    handler: str


@dataclass(frozen=True, slots=True)
class Doubted(KeyEvent):
    """The attempt may have had an effect: the key became unknown."""

    metric = "api.idempotency.finish.doubted.count"
    level = WARNING
    reason: str


@dataclass(frozen=True, slots=True)
class EffectLeftOpen(KeyEvent):
    """The handler answered with a success although an effect that may not be repeated did not say how it ended. The
    key is completed; its audit says so, and an operator looks for the effect at its provider."""

    metric = "api.idempotency.finish.effect_left_open.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class Discarded(KeyEvent):
    """The request was refused before the operation began: the key is unused again."""

    metric = "api.idempotency.finish.discarded.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Deferred(KeyEvent):
    """The request is done, and its job in the outbox will settle the key."""

    metric = "api.idempotency.finish.deferred.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Tombstoned(KeyEvent):
    """The key was completed, but its response could not be kept."""

    metric = "api.idempotency.finish.tombstoned.count"
    level = INFO
    reason: str


# Our own: leases and waiting.


@dataclass(frozen=True, slots=True)
class TakenOver(KeyEvent):
    """A request took a key over whose lease was over."""

    metric = "api.idempotency.lease.taken_over.count"
    level = INFO


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Event):
    """The heartbeat renewed leases; ``rows`` of them in one batch."""

    metric = "api.idempotency.lease.renewed.count"
    level = DEBUG
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class LeaseLost(KeyEvent):
    """An owner came too late: what it wanted to write (``move``) was refused."""

    metric = "api.idempotency.lease.lost.count"
    level = WARNING
    move: str


@dataclass(frozen=True, slots=True)
class WaitedOut(KeyEvent):
    """A duplicate waited for the first request as long as it may, and got a 409."""

    metric = "api.idempotency.wait.timed_out.count"
    level = INFO
    seconds: float


# Our own: the way to the store.


@dataclass(frozen=True, slots=True)
class BreakerOpened(StoreEvent):
    """The store failed too often: requests are refused without asking it."""

    metric = "api.idempotency.breaker.opened.count"
    level = ERROR


@dataclass(frozen=True, slots=True)
class BreakerClosed(Event):
    """The store answers again."""

    metric = "api.idempotency.breaker.closed.count"
    level = ERROR  # with its opening, so that whoever saw the alarm sees its end


@dataclass(frozen=True, slots=True)
class QueueFull(StoreEvent):
    """More callers waited for the store than the queue holds: this one was refused."""

    metric = "api.idempotency.store.queue_full.count"
    level = ERROR


# Our own: the outbox.


@dataclass(frozen=True, slots=True)
class JobStarted(JobEvent):
    """A worker took a job and began."""

    metric = "api.idempotency.outbox.started.count"
    level = DEBUG
    lag_seconds: float


@dataclass(frozen=True, slots=True)
class JobDone(JobEvent):
    """A task succeeded, and its job is done."""

    metric = "api.idempotency.outbox.done.count"
    level = DEBUG
    seconds: float


@dataclass(frozen=True, slots=True)
class JobRetried(JobEvent):
    """A task failed at its ``attempt``, and will be tried again ``in_seconds``."""

    metric = "api.idempotency.outbox.retried.count"
    level = WARNING
    in_seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class JobDead(JobEvent):
    """A job is a dead letter: a human must look."""

    metric = "api.idempotency.outbox.dead.count"
    level = ERROR
    error: str


@dataclass(frozen=True, slots=True)
class JobReleased(JobEvent):
    """A worker that stops gave a job back."""

    metric = "api.idempotency.outbox.released.count"
    level = INFO


@dataclass(frozen=True, slots=True)
class JobLeaseLost(JobEvent):
    """A worker came too late: its job was another's by then, and nothing was written."""

    metric = "api.idempotency.outbox.lease_lost.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class JobOverran(JobEvent):
    """A task in a thread took longer than it may: its lease is not renewed any more."""

    metric = "api.idempotency.outbox.overran.count"
    level = WARNING
    seconds: float


# Our own: upkeep.


@dataclass(frozen=True, slots=True)
class ReconcileGaveUp(KeyEvent):
    """An unknown outcome is a dead letter: nobody is asked about it any more, and a human must look."""

    metric = "api.idempotency.reconcile.dead.count"
    level = ERROR
    tries: int
    error: str


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """The reaper failed deferred requests that nobody settled before they expired; those once tried are unknown."""

    metric = "api.idempotency.pending.timed_out.count"
    level = WARNING
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class LeaseTooShort(Event):
    """Of the handlers of an operation, more than one in a hundred needs longer than its lease lasts.

    They live, since leases are renewed. But the next one that is paused, or cut off from its store, loses its key.
    """

    metric = "api.idempotency.lease.too_short.count"
    level = WARNING
    operation: str
    lease_seconds: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class DutyDone(Event):
    """Upkeep went once through a duty."""

    metric = "api.idempotency.upkeep.done.count"
    level = DEBUG
    duty: str
    seconds: float


@dataclass(frozen=True, slots=True)
class DutyFailed(Event):
    """A duty of upkeep could not be done, and will be tried again."""

    metric = "api.idempotency.upkeep.failed.count"
    level = ERROR
    duty: str
    error: str
    in_seconds: float


def about_job(job: Job) -> tuple[str, str, str, int, str, str]:
    """The fields of a :class:`JobEvent`, in order."""
    return job.scope, redact(job.key), job.operation, job.attempt, job.task, job.id


def about(record: Record) -> tuple[str, str, str, int]:
    """The fields of a :class:`KeyEvent`, in order."""
    return record.scope, redact(record.key), record.operation, record.attempt
