"""Events of the outbox: what a worker did with a job."""

from __future__ import annotations

from dataclasses import dataclass
from logging import DEBUG, ERROR, INFO, WARNING

from oncekey.telemetry.events.base import JobEvent


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
