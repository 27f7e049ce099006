"""The outbox verbs of a store without an outbox: a dictionary has no transaction that a job could share.

The verbs exist, so that upkeep and the command line need not ask which store it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oncekey.core.audit import Audit
from oncekey.core.jobs import Conclusion, DeferredTo, Job, JobState, OutboxHealth
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import Swap, swap
from oncekey.stores.api import Duty


class NoOutbox:
    """The answers of :class:`oncekey.stores.memory.MemoryStore` about jobs."""

    if TYPE_CHECKING:

        def due(self, duty: Duty, limit: int) -> list[Record]: ...
        def swap(self, batch: Sequence[Swap]) -> list[Record | None]: ...

    def claim(self, owner: str, tasks: Sequence[str], limit: int, lease_seconds: float) -> list[Job]:
        del owner, tasks, limit, lease_seconds
        return []

    def renew_jobs(self, owner: str, ids: Sequence[str], lease_seconds: float) -> list[str]:
        del owner, ids, lease_seconds
        return []

    def conclude(self, batch: Sequence[Conclusion]) -> list[bool]:
        return [False] * len(batch)

    def note_provider(self, job_id: str, owner: str, provider_id: str) -> bool:
        del job_id, owner, provider_id
        return False

    def jobs(self, state: JobState, limit: int) -> list[Job]:
        del state, limit
        return []

    def jobs_of(self, scope: str, key: str, limit: int) -> list[Job]:
        del scope, key, limit
        return []

    def job(self, job_id: str) -> Job | None:
        del job_id
        return None

    def deferred_to(self, asked: DeferredTo) -> Job | None:
        del asked
        return None

    def redirect(self, job_id: str, to_state: JobState, audit: Audit) -> Job | None:
        del job_id, to_state, audit
        return None

    def outbox_health(self) -> OutboxHealth:
        return OutboxHealth(ready=0, lag_seconds=0.0, dead=0)

    def purge_jobs(self, limit: int, keep_seconds: float) -> int:
        del limit, keep_seconds
        return 0

    def time_out(self, limit: int, response: StoredResponse) -> list[tuple[str, str]]:
        """This store has no jobs, so none was tried: every pending key past its expiry fails."""
        late = self.due(Duty.ABANDONED, limit)
        moves = [
            swap(record, Event.TIME_OUT, Actor.REAPER, to_state=State.FAILED, response=response) for record in late
        ]
        return [(record.scope, record.key) for record in self.swap(moves) if record is not None] if moves else []
