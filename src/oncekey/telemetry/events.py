"""The events that logs, metrics and the app's own hook get.

This module owns the list of events, the name of each event's metric and the level at which it is logged. No event has a
field for a key or a body (hazard 28; ``redaction.py`` masks keys). It must not know Prometheus or OpenTelemetry: those
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
    """Something that happened. ``metric`` is the name of its counter, which goes up by ``amount``."""

    metric: ClassVar[str]
    level: ClassVar[int]

    @property
    def amount(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class KeyEvent(Event):
    """About one key. :func:`about` gives its fields: ``Completed(*about(record), status=201)``."""

    scope: str
    key_hint: str
    operation: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StoreEvent(Event):
    """About the store. ``verb`` is what was asked of it; ``error`` is the text that ``describe`` returns."""

    verb: str
    error: str


@dataclass(frozen=True, slots=True)
class JobEvent(KeyEvent):
    """About one job of the outbox, and the key it belongs to: ``JobDone(*about_job(job), seconds=0.2)``."""

    task: str
    job_id: str


# The twelve usual events.


@dataclass(frozen=True, slots=True)
class Reserved(KeyEvent):
    """The first request of a new key reserved it."""

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
    """A duplicate came while the first request was still running."""

    metric = "api.idempotency.reserve.in_progress.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Misused(KeyEvent):
    """A key came back with a different request: a bug of the client, or an attack."""

    metric = "api.idempotency.reserve.key_misuse.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class Retried(KeyEvent):
    """A new attempt took a retryable key."""

    metric = "api.idempotency.reserve.failed_retry.count"
    level = INFO


@dataclass(frozen=True, slots=True)
class FoundUnknown(KeyEvent):
    """A retry was refused, because the outcome of its key is unknown."""

    metric = "api.idempotency.reserve.unknown.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class StoreFailed(StoreEvent):
    """The store failed, or did not answer in time."""

    metric = "api.idempotency.store.error.count"
    level = ERROR


@dataclass(frozen=True, slots=True)
class ZombieFound(KeyEvent):
    """A key in progress was found with a lease that ran out."""

    metric = "api.idempotency.zombie_key.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class Pruned(Event):
    """The reaper removed expired keys."""

    metric = "api.idempotency.ttl_pruned.count"
    level = INFO
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class ReconcileScheduled(KeyEvent):
    """The reconciler will ask about an unknown outcome, in ``in_seconds`` or later."""

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
    """A try to settle an unknown outcome failed."""

    metric = "api.idempotency.reconcile.failed.count"
    level = WARNING
    tries: int
    error: str
    in_seconds: float | None = None
    """The seconds until the next try. None: there is none."""


@dataclass(frozen=True, slots=True)
class ReconcileUnasked(KeyEvent):
    """No resolver is registered for the operation of an unknown key. The log says so once per operation."""

    metric = "api.idempotency.reconcile.unasked.count"
    level = INFO
    tries: int


# oncekey's own: how attempts ended.


@dataclass(frozen=True, slots=True)
class FoundUnreadable(KeyEvent):
    """A newer version of oncekey reserved the key, and this one cannot compare the request: 503, nothing ran."""

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
    """A handler was still running when its ``max_run`` was over. Its lease is no longer renewed, and ``effects``
    decides what the key becomes. ``handler`` says whether it was cancelled: a thread cannot be."""

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
    """The handler answered with a success, but the result of an effect that may not be repeated is not known. The key
    is completed, and its audit has a line about this. An operator must look for the effect at its provider."""

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


# oncekey's own: leases and waiting.


@dataclass(frozen=True, slots=True)
class TakenOver(KeyEvent):
    """A request took over a key whose lease ran out."""

    metric = "api.idempotency.lease.taken_over.count"
    level = INFO


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Event):
    """The keeper renewed ``rows`` leases in one batch."""

    metric = "api.idempotency.lease.renewed.count"
    level = DEBUG
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class LeaseLost(KeyEvent):
    """An owner lost its lease, so its write (``move``) was refused."""

    metric = "api.idempotency.lease.lost.count"
    level = WARNING
    move: str


@dataclass(frozen=True, slots=True)
class WaitedOut(KeyEvent):
    """A duplicate waited for the first request as long as its policy allows, and got a 409."""

    metric = "api.idempotency.wait.timed_out.count"
    level = INFO
    seconds: float


# oncekey's own: the store.


@dataclass(frozen=True, slots=True)
class BreakerOpened(StoreEvent):
    """The store failed too often: requests are refused without asking it."""

    metric = "api.idempotency.breaker.opened.count"
    level = ERROR


@dataclass(frozen=True, slots=True)
class BreakerClosed(Event):
    """The store answers again."""

    metric = "api.idempotency.breaker.closed.count"
    level = ERROR  # as BreakerOpened, so that an operator sees the end of the alarm


@dataclass(frozen=True, slots=True)
class QueueFull(StoreEvent):
    """The queue in front of the store was full: a request was refused."""

    metric = "api.idempotency.store.queue_full.count"
    level = ERROR


# oncekey's own: the outbox.


@dataclass(frozen=True, slots=True)
class JobStarted(JobEvent):
    """A worker claimed a job and started its task."""

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
    """A task failed at this ``attempt``, and will be tried again in ``in_seconds``."""

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
    """A worker that stops released a job."""

    metric = "api.idempotency.outbox.released.count"
    level = INFO


@dataclass(frozen=True, slots=True)
class JobLeaseLost(JobEvent):
    """A worker lost the lease of a job to another worker, so its result was not written."""

    metric = "api.idempotency.outbox.lease_lost.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class JobOverran(JobEvent):
    """A task in a thread took longer than its timeout: the lease of its job is not renewed any more."""

    metric = "api.idempotency.outbox.overran.count"
    level = WARNING
    seconds: float


# oncekey's own: upkeep.


@dataclass(frozen=True, slots=True)
class ReconcileGaveUp(KeyEvent):
    """An unknown outcome is a dead letter: the reconciler no longer asks about it, and a human must look."""

    metric = "api.idempotency.reconcile.dead.count"
    level = ERROR
    tries: int
    error: str


@dataclass(frozen=True, slots=True)
class Resumed(KeyEvent):
    """Upkeep continues a half-done request, in an attempt of its own. ``tries`` counts them, with this one."""

    metric = "api.idempotency.resume.started.count"
    level = INFO
    tries: int


@dataclass(frozen=True, slots=True)
class ResumeFailed(KeyEvent):
    """A try of upkeep to end a half-done request failed."""

    metric = "api.idempotency.resume.failed.count"
    level = WARNING
    tries: int
    error: str


@dataclass(frozen=True, slots=True)
class ResumeGaveUp(KeyEvent):
    """A half-done request is a dead letter: upkeep tries no more, and a human must look. A retry still runs."""

    metric = "api.idempotency.resume.dead.count"
    level = ERROR
    tries: int
    error: str


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """The reaper ended deferred requests that were not settled before they expired. If the job had run, the key became
    unknown; otherwise it failed."""

    metric = "api.idempotency.pending.timed_out.count"
    level = WARNING
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class LeaseTooShort(Event):
    """More than one in a hundred handlers of an operation runs for longer than its lease.

    Renewals keep their keys. But a handler that is paused, or cut off from its store, loses its key.
    """

    metric = "api.idempotency.lease.too_short.count"
    level = WARNING
    operation: str
    lease_seconds: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class DutyDone(Event):
    """Upkeep did one of its duties once."""

    metric = "api.idempotency.upkeep.done.count"
    level = DEBUG
    duty: str
    seconds: float


@dataclass(frozen=True, slots=True)
class DutyFailed(Event):
    """A duty of upkeep failed, and will be tried again."""

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
