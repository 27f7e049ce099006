"""The short answers of a store in an event loop, as the Records that the blocking verbs give."""

from __future__ import annotations

from collections.abc import Sequence

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.engine.batching.ticket import whole
from oncekey.stores.api import InLoop


async def reserved_by(fast: InLoop, batch: Sequence[Reservation]) -> list[Record | None]:
    """The row of each key; None: the store left it to a lane."""
    return rows_of(batch, await fast.reserve(batch))


def rows_of(batch: Sequence[Reservation], answers: Sequence[float | Record | None]) -> list[Record | None]:
    found = [whole(wanted, answer) for wanted, answer in zip(batch, answers, strict=True)]
    return [each and each.record for each in found]


async def moved_by(fast: InLoop, batch: Sequence[End | Swap]) -> list[Record | None]:
    return moves_of(batch, await fast.swap(batch))


def moves_of(batch: Sequence[End | Swap], answers: Sequence[float | None]) -> list[Record | None]:
    return [whole(change, answer) for change, answer in zip(batch, answers, strict=True)]
