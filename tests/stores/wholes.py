"""The short answers of a store in an event loop, as the Records that the blocking verbs give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.engine.batching.ticket import whole
from oncekey.stores.api import InLoop, Store
from tests.engine.doubles import reservation
from tests.stores.begun_keys import completion


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


async def check_recipes(store: Store, fast: InLoop) -> None:
    """A recipe is written with the batch, found by the next, and kept by the move that ends the attempt."""
    recipes = {"a": None, "b": '{"fields":["é"],"headers":[]}', "c": None}
    batch = [replace(reservation(key), fingerprint_recipe=recipe) for key, recipe in recipes.items()]
    for begins in (batch, [reservation(key) for key in recipes]):
        found = await reserved_by(fast, begins)
        assert [each and each.fingerprint_recipe for each in found] == list(recipes.values())
    begun = store.read([("tenant-1", key) for key in recipes])
    moved = await moved_by(fast, [completion(record) for record in begun if record is not None])
    assert [record and record.fingerprint_recipe for record in moved] == list(recipes.values())
    assert [record and record.fingerprint_recipe for record in begun] == list(recipes.values())
