"""Stores that a test switches off, verb by verb, and whose keys it gives to another owner."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from oncekey.core.record import Reservation
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.api import EventLoops, Store
from oncekey.stores.memory import MemoryStore

ONE = "single-tenant"
"""The scope of all keys of an app with SINGLE_TENANT and ``key_per="tenant"``."""
NOW = 1_800_000_000.0
"""The time in every FlakyStore, which stands still: so Idempotency-Expires is the same everywhere."""


class FlakyStore(MemoryStore):
    """A store in memory whose verbs fail while they are named in ``down``."""

    down: set[str]
    steal: Callable[..., None]

    def __init__(self) -> None:
        super().__init__(lambda: NOW)
        flaky(self)


def flaky(store: Any) -> Any:
    """Give a store of any kind ``down``, the names of verbs that fail, and ``steal``."""
    store.down = set()
    store.steal = lambda key="k-1": steal(store, key)
    _add_switches(store, store)
    if isinstance(store, EventLoops):
        make = store.in_loop

        def in_loop() -> Any:
            made = make()
            if made is not None:
                _add_switches(made, store)
            return made

        store.in_loop = in_loop  # type: ignore[method-assign]
    return store


def _add_switches(part: Any, store: Any) -> None:
    for verb in ("reserve", "swap", "read"):
        if hasattr(part, verb):
            setattr(part, verb, _switched(getattr(part, verb), lambda *_, verb=verb: verb in store.down))
    if hasattr(part, "both"):
        off = lambda begins, ends: (begins and "reserve" in store.down) or (ends and "swap" in store.down)  # noqa: E731
        part.both = _switched(part.both, off)


def _switched(verb: Callable[..., Any], is_off: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(verb):

        @wraps(verb)
        async def in_loop(*batches: Any) -> Any:
            if is_off(*batches):
                raise StoreUnavailable("the test has switched it off")
            return await verb(*batches)

        return in_loop

    @wraps(verb)
    def blocking(*batches: Any) -> Any:
        if is_off(*batches):
            raise StoreUnavailable("the test has switched it off")
        return verb(*batches)

    return blocking


def steal(store: Store, key: str) -> None:
    """Give the key to another owner, as if its next attempt ran in another process."""
    (row,) = store.read([(ONE, key)])
    assert row is not None, f"there is no key {key}"
    (released,) = store.swap([swap(row, Event.RELEASE, Actor.OWNER)])
    assert released is not None, "another owner has the key already"
    rival = Reservation(
        row.scope, row.key, row.operation, row.fingerprint, row.fingerprint_version, row.effects, "another owner",
        lease_seconds=60.0, retention_seconds=row.retention_seconds, fingerprint_recipe=row.fingerprint_recipe,
    )  # fmt: skip
    (stolen,) = store.swap([swap(released, Event.RETRY, Actor.REQUEST, reservation=rival)])
    assert stolen is not None
