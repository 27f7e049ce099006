"""One attempt at one job, as the two halves of a worker see it: the pump, which talks to the store, and the loop, in
which tasks run. Also what a run of a worker has counted so far.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field

from oncekey.core.jobs import Conclusion, Job
from oncekey.outbox.tasks import Task

RENEW_AT = 1 / 3
"""Of the lease: two renewals may be lost before the lease is."""


class Attempt:
    """Made by the pump. Its lease is counted from before the store was asked, so it is never longer here than there."""

    __slots__ = (
        *("began", "conclusion", "cut", "error", "expired", "job", "leased_until", "lost", "owner", "renew_at"),
        *("renews", "task", "told", "work"),
    )

    def __init__(self, job: Job, task: Task, owner: str, asked_at: float, lease: float) -> None:
        self.job = job
        self.task = task
        self.owner = owner
        self.began = time.monotonic()
        self.renews = True
        """A sync task that overran is not renewed any more: its lease runs out, since nothing can stop a thread."""
        self.leased(asked_at, lease)
        self.lost = False
        """The store says that it is not ours: its result is dropped."""
        self.expired = False
        """Its lease could not be renewed in time: whether it still is ours, the store will say."""
        self.cut = False
        """The worker stops, and could not wait for it any longer."""
        self.work: asyncio.Task[None] | None = None
        self.conclusion: Conclusion | None = None
        self.error: BaseException | None = None
        """What the task raised, for its traceback in the log."""
        self.told = ""
        """What went wrong, as it may be shown in events."""

    def leased(self, asked_at: float, lease: float) -> None:
        self.leased_until = asked_at + lease
        self.renew_at = asked_at + lease * RENEW_AT


@dataclass(slots=True)
class Counts:
    """What a run has done. Written by the pump alone; whoever reads it may be a moment late."""

    done: int = 0
    failed: int = 0
    """Attempts that failed and will be made again."""
    dead: int = 0
    released: int = 0
    lost: int = 0
    lag_seconds: float = 0.0
    """For how long the job that was claimed last had been due."""
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
