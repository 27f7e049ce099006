"""One attempt at one job, shared by the two halves of a worker: the pump, which talks to the store, and the event loop,
in which tasks run. Also the counts of a run.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field

from oncekey.core.jobs import Conclusion, Job, JobEnd
from oncekey.outbox.tasks import Task
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter

RENEW_AT = 1 / 3
"""The part of the lease after which it is renewed: two renewals may fail before the lease runs out."""
_DONE = JobEnd.DONE  # a constant: an enum's member costs more by its class


class Attempt:
    """Made by the pump. Its lease counts from before the call of the store, so it never ends later here than there."""

    __slots__ = (
        *(
            "began",
            "conclusion",
            "cut",
            "error",
            "expired",
            "failure",
            "job",
            "leased_until",
            "lost",
            "owner",
            "renew_at",
        ),
        *("renews", "seconds", "task", "timed_out", "work"),
    )

    def __init__(self, job: Job, task: Task, owner: str, asked_at: float, lease: float) -> None:
        self.job = job
        self.task = task
        self.owner = owner
        self.began = time.monotonic()
        """When it was claimed, and then when its task was started."""
        self.seconds = 0.0
        """How long its task ran; infinite if it was given back because it waited too long."""
        self.renews = True
        """False for a sync task that overran its timeout: nothing can stop its thread, so its lease runs out."""
        self.leased(asked_at, lease)
        self.lost = False
        """The store says that another worker has the job: the result of this attempt is dropped."""
        self.expired = False
        """The lease could not be renewed in time. The store will say whether this worker still has the job."""
        self.timed_out = False
        """The task took longer than its timeout, and was cancelled for that."""
        self.cut = False
        """The worker stops, and its grace period for this attempt is over."""
        self.work: asyncio.Task[None] | None = None
        self.conclusion: Conclusion | None = None
        self.error: BaseException | None = None
        """What the task raised, for its traceback in the log."""
        self.failure = ""
        """What went wrong, without secrets, for events."""

    def leased(self, asked_at: float, lease: float) -> None:
        self.leased_until = asked_at + lease
        self.renew_at = asked_at + lease * RENEW_AT


@dataclass(slots=True)
class Counts:
    """The counts of a run. Only the pump writes them; a reader may see them a moment late."""

    done: int = 0
    failed: int = 0
    """Attempts that failed and will be repeated."""
    dead: int = 0
    released: int = 0
    lost: int = 0
    lag_seconds: float = 0.0
    """How long the last claimed job had been due."""
    began: float = field(default_factory=time.monotonic, repr=False)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def rate(self) -> float:
        """Jobs done per second, over the whole run."""
        return self.done / max(self.seconds, 1e-9)

    def as_json(self) -> dict[str, float]:
        shown = asdict(self)
        del shown["began"]
        return shown | {"seconds": round(self.seconds, 3), "rate": round(self.rate, 1)}

    def report(self, attempt: Attempt, conclusion: Conclusion | None, emitter: Emitter) -> None:
        """Count the end of an attempt, and emit its event. ``conclusion`` None: another worker has the job."""
        if conclusion is not None and conclusion.end is _DONE and not emitter.wants(events.JobDone):  # nearly always
            self.done += 1
            return
        fields = events.about_job(attempt.job)
        error, attempt.error = attempt.error, None  # its traceback refers to the attempt
        if conclusion is None:
            self.lost += 1
            emitter.emit(events.JobLeaseLost(*fields), error=error)
            return
        match conclusion.end:
            case JobEnd.DONE:
                self.done += 1
                emitter.emit(events.JobDone(*fields, seconds=time.monotonic() - attempt.began))
            case JobEnd.RETRY:
                self.failed += 1
                wait = round(conclusion.retry_in, 1)
                emitter.emit(events.JobRetried(*fields, in_seconds=wait, error=attempt.failure), error=error)
            case JobEnd.DEAD:
                self.dead += 1
                emitter.emit(events.JobDead(*fields, error=attempt.failure), error=error)
            case JobEnd.RELEASE:
                self.released += 1
                emitter.emit(events.JobReleased(*fields))
