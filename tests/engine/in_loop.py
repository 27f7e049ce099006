"""What tests of the loop lane share: a store that gives an event loop its hot verbs, and a router that uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import whole
from tests.engine.doubles import PATIENCE, FakeStore, reservation


class Quick:
    """What a store gives an event loop; it can be held, and told to fail before or after it has done its work."""

    def __init__(self, store: FastStore) -> None:
        self.store = store
        self.abandoned = 0

    async def reserve(self, batch: Sequence[Reservation]) -> list[float | Record | None]:
        return await self._answer("reserve", batch, self._reserved)

    async def swap(self, batch: Sequence[End | Swap]) -> list[float | None]:
        return await self._answer("swap", batch, self._moved)

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[list[float | Record | None], list[float | None]]:
        def call(batch: Any) -> list[Any]:
            moved = self._moved(ends)
            return [self._reserved(begins), moved]

        found, moved = await self._answer("both", [*ends, *begins], call)
        return found, moved

    def _reserved(self, batch: Sequence[Reservation]) -> list[float | Record | None]:
        """The time where the key is new, and otherwise its row."""
        inner = self.store.inner
        before = inner.read([(wanted.scope, wanted.key) for wanted in batch])
        found = [found.record for found in inner.reserve(batch)]
        return [now and (now if there else now.now) for there, now in zip(before, found, strict=True)]

    def _moved(self, batch: Sequence[End | Swap]) -> list[float | None]:
        moved = self.store.inner.swap([change.swap() if isinstance(change, End) else change for change in batch])
        return [None if record is None else record.now for record in moved]

    async def _answer(self, verb: str, batch: Any, call: Callable[[Any], list[Any]]) -> list[Any]:
        store = self.store
        store.asked_here.append((verb, list(batch)))
        store.arrived.set()
        if store.held is not None:
            await store.held.wait()
        if store.fails_before is not None:
            raise store.fails_before
        answer = call(batch)
        if store.fails_after is not None:
            raise store.fails_after
        return answer

    def abandon(self) -> None:
        self.abandoned += 1


class FastStore(FakeStore):
    def __init__(self) -> None:
        super().__init__(writers=2)
        self.asked_here: list[tuple[str, list[Any]]] = []
        self.arrived = asyncio.Event()
        self.held: asyncio.Event | None = None
        self.fails_before: BaseException | None = None
        self.fails_after: BaseException | None = None
        self.opened: list[Quick] = []

    def in_loop(self) -> Quick:
        self.opened.append(Quick(self))
        return self.opened[-1]


async def ask(router: Router, *work: Reservation | Swap | End, timeout: float = PATIENCE) -> list[Any]:
    """The answers as a flow gets them, or the errors."""
    loop = asyncio.get_running_loop()
    futures = [router.ask(item, loop, timeout) for item in work]
    answers = await asyncio.gather(*futures, return_exceptions=True)
    return [whole(item, answer) for item, answer in zip(work, answers, strict=True)]


async def warmed(store: FastStore, **options: Any) -> Router:
    """A router whose lane for reservations has prepared and checked the tables: from here on a loop lane may run."""
    router = Router(store, **options)
    await ask(router, reservation("warm-up"))
    assert store.asked_here == []
    store.batches.clear()
    return router


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())
