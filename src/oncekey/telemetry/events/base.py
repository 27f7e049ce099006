"""What every event has: a metric, a level, and the fields that say what it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oncekey.core.jobs import Job
from oncekey.core.record import Record
from oncekey.telemetry.redaction import redact


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. ``metric`` is the name of its counter, which goes up by ``amount``."""

    metric: ClassVar[str]
    level: ClassVar[int]
    unit: ClassVar[str] = "{event}"
    """What the counter counts, as OpenTelemetry writes a unit. An event with its own ``amount`` names what it is of."""
    labels: ClassVar[tuple[str, ...]] = ()
    """The fields by which its counter is split. Each has few values: never a key, never a text."""

    @property
    def amount(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class KeyEvent(Event):
    """About one key. :func:`about` gives its fields: ``Completed(*about(record), status=201)``."""

    labels: ClassVar[tuple[str, ...]] = ("operation",)
    scope: str
    key_hint: str
    operation: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StoreEvent(Event):
    """About the store. ``verb`` is what was asked of it; ``error`` is the text that ``describe`` returns."""

    labels = ("verb",)
    verb: str
    error: str


@dataclass(frozen=True, slots=True)
class JobEvent(KeyEvent):
    """About one job of the outbox, and the key it belongs to: ``JobDone(*about_job(job), seconds=0.2)``."""

    labels = ("operation", "task")
    task: str
    job_id: str


def about(record: Record) -> tuple[str, str, str, int]:
    """The fields of a :class:`KeyEvent`, in order."""
    return record.scope, redact(record.key), record.operation, record.attempt


def about_job(job: Job) -> tuple[str, str, str, int, str, str]:
    """The fields of a :class:`JobEvent`, in order."""
    return job.scope, redact(job.key), job.operation, job.attempt, job.task, job.id
