"""Which verb of a store answers which kind of work. A lane runs its tickets verb by verb, in this order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncekey.core.jobs import DeferredTo, Job
from oncekey.core.rates import Tally
from oncekey.core.record import Reservation
from oncekey.core.steps import Find, StepsOf
from oncekey.core.swaps import Swap
from oncekey.errors import StoreError
from oncekey.stores.api import Outbox, Store, Tallies
from oncekey.stores.cache.front import Cache, reserve_behind, swap_behind

Verb = tuple[type, str, Callable[[list[Any]], list[Any]]]
"""The type of the work, the verb's name, and the function that answers a batch of it."""

Report = Callable[[str, Exception, int], None]
"""Reports a failure of the store: the verb, the error, and how many callers get the error."""


def verbs_of(store: Store, cache: Cache | None) -> tuple[Verb, ...]:
    outbox = store if isinstance(store, Outbox) else None
    return (
        (Reservation, "reserve", store.reserve if cache is None else reserve_behind(cache, store.reserve)),
        (Swap, "swap", store.swap if cache is None else swap_behind(cache, store.swap)),
        (tuple, "read", store.read),
        (StepsOf, "steps", store.steps),
        (Find, "find", lambda asked: [_find(store, each) for each in asked]),
        (DeferredTo, "deferred_to", lambda asked: [_deferred_to(outbox, each) for each in asked]),
        (Tally, "tally", lambda asked: [_tally(store, each) for each in asked]),
    )


def _find(store: Store, asked: Find) -> list[tuple[str, str]]:
    return store.find(downstream_key=asked.downstream_key, provider_id=asked.provider_id)


def _tally(store: Store, asked: Tally) -> int:
    if not isinstance(store, Tallies):  # a OnceKey with such a limit refuses the store at its start
        raise StoreError("this store cannot count the keys of a tenant")
    return store.tally(asked)


def _deferred_to(outbox: Outbox | None, asked: DeferredTo) -> Job | None:
    """A store without an outbox has no jobs."""
    return None if outbox is None else outbox.deferred_to(asked)
