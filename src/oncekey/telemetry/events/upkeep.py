"""Events of upkeep: unknown outcomes, half-done requests, expired keys, and its duties themselves."""

from __future__ import annotations

from dataclasses import dataclass
from logging import DEBUG, ERROR, INFO, WARNING

from oncekey.telemetry.events.base import Event, KeyEvent


@dataclass(frozen=True, slots=True)
class ReconcileScheduled(KeyEvent):
    """The reconciler will ask about an unknown outcome, in ``in_seconds`` or later."""

    metric = "api.idempotency.reconcile.scheduled.count"
    level = INFO
    in_seconds: float


@dataclass(frozen=True, slots=True)
class ReconcileResolved(KeyEvent):
    """An unknown outcome was settled. ``state`` is what the key became, and ``age_seconds`` how old the key was."""

    metric = "api.idempotency.reconcile.resolved.count"
    level = INFO
    state: str
    age_seconds: float


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
class Pruned(Event):
    """The reaper removed expired keys."""

    metric = "api.idempotency.ttl_pruned.count"
    level = INFO
    unit = "{key}"
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """The reaper ended deferred requests that were not settled before they expired. If the job had run, the key became
    unknown; otherwise it failed."""

    metric = "api.idempotency.pending.timed_out.count"
    level = WARNING
    unit = "{key}"
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class DutyDone(Event):
    """Upkeep did one of its duties once."""

    metric = "api.idempotency.upkeep.done.count"
    level = DEBUG
    labels = ("duty",)
    duty: str
    seconds: float


@dataclass(frozen=True, slots=True)
class DutyFailed(Event):
    """A duty of upkeep failed, and will be tried again."""

    metric = "api.idempotency.upkeep.failed.count"
    level = ERROR
    labels = ("duty",)
    duty: str
    error: str
    in_seconds: float
