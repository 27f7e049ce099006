"""Dead letters: jobs after their last attempt, and keys that upkeep leaves alone after its last try."""

from __future__ import annotations

from oncekey.core.jobs import Job, JobState
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.values import value
from oncekey.stores.api import Outbox, Store

_PAGE = 500


@value
class DeadLetters:
    jobs: list[Job]
    """Oldest first."""
    keys: list[Record]
    """In the order of (scope, key)."""
    more: bool
    """There are more than ``limit``."""


def dead_letters(store: Store, limit: int) -> DeadLetters:
    """At most ``limit`` of each kind."""
    jobs = store.jobs(JobState.DEAD, limit + 1) if isinstance(store, Outbox) else []
    keys = _dead_keys(store, limit + 1)
    return DeadLetters(jobs[:limit], keys[:limit], max(len(jobs), len(keys)) > limit)


def _dead_keys(store: Store, limit: int) -> list[Record]:
    """Unknown outcomes and half-done requests after upkeep's last try."""
    found = [*_dead_in(store, State.UNKNOWN, limit), *_dead_in(store, State.FAILED_RETRYABLE, limit)]
    return sorted(found, key=lambda record: (record.scope, record.key))[:limit]


def _dead_in(store: Store, state: State, limit: int) -> list[Record]:
    found: list[Record] = []
    after = None
    while len(found) < limit:
        page = store.listing(state, limit=_PAGE, after=after)
        found += [record for record in page if record.dead]
        if len(page) < _PAGE:
            break
        after = (page[-1].scope, page[-1].key)
    return found[:limit]
