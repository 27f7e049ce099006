"""The numbers of the whole store, as metrics. Upkeep hands them to the exporters of its process.

They cost what a look at the health costs: each number is counted in an index, up to 10,000 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oncekey.core.states import State
from oncekey.stores.api import Store
from oncekey.telemetry import instruments
from oncekey.telemetry.exporter import Exporter, tell
from oncekey.telemetry.instruments import Reading
from oncekey.upkeep.health import Health, look

STATES = (State.IN_PROGRESS, State.PENDING, State.UNKNOWN)


def show(exporters: Iterable[Exporter], store: Store) -> None:
    """Let the exporters show this store's numbers."""
    tell(tuple(exporters), "show_store", lambda: list(readings(look(store))))


def hide(exporters: Iterable[Exporter]) -> None:
    tell(tuple(exporters), "show_store", None)


def readings(health: Health) -> Iterator[Reading]:
    keys, outbox = health.keys, health.outbox
    for state in STATES:
        yield instruments.BY_STATE, (state.value,), keys.counts[state]
    for each in keys.unknowns:
        yield instruments.UNKNOWN, (each.operation,), each.keys
    yield instruments.DEAD, ("key",), keys.dead
    yield instruments.DEAD, ("job",), outbox.dead
    yield instruments.OLDEST_UNKNOWN, (), keys.oldest_unknown_seconds
    yield instruments.LEASE_OVER, (), keys.lease_over_seconds
    yield instruments.EXPIRED_OVER, (), health.expired_over_seconds
    yield instruments.RECONCILE_OVER, (), health.reconcile_over_seconds
    yield instruments.OUTBOX_READY, (), outbox.ready
    yield instruments.OUTBOX_LAG, (), outbox.lag_seconds
