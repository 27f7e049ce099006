"""The verbs of an event loop, sealed: this is the way of nearly every request of an async app."""

from __future__ import annotations

from collections.abc import Sequence

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.encryption.values import Values
from oncekey.stores.api import InLoop


class SealedInLoop:
    def __init__(self, inner: InLoop, values: Values) -> None:
        self._inner = inner
        self._values = values

    async def reserve(self, batch: Sequence[Reservation]) -> Sequence[float | Record | None]:
        return self._opened(await self._inner.reserve(batch))

    async def swap(self, batch: Sequence[End | Swap]) -> Sequence[float | None]:
        return await self._inner.swap(self._sealed(batch))

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[Sequence[float | Record | None], Sequence[float | None]]:
        found, times = await self._inner.both(begins, self._sealed(ends))
        return self._opened(found), times

    def _sealed(self, ends: Sequence[End | Swap]) -> list[End | Swap]:
        seal = self._values.sealed_end
        return [seal(end) for end in ends]

    def _opened(self, found: Sequence[float | Record | None]) -> list[float | Record | None]:
        opened = self._values.opened_record
        return [opened(each) if isinstance(each, Record) else each for each in found]

    def abandon(self) -> None:
        self._inner.abandon()
