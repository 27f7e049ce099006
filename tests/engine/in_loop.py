"""What tests of the loop lane share: a store that gives an event loop its hot verbs, and a router that uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import Swap, swap
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.ticket import AsyncTicket
from tests.engine.doubles import PATIENCE, RESPONSE, FakeStore, reservation


class Quick:
    """What a store gives an event loop; it can be held, and told to fail before or after it has done its work."""

    def __init__(self, store: FastStore) -> None:
        self.store = store
        self.abandoned = 0

    async def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        return await self._answer("reserve", batch, self.store.inner.reserve)

    async def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        return await self._answer("swap", batch, self.store.inner.swap)

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[Swap]
    ) -> tuple[list[Found], list[Record | None]]:
        def call(batch: Any) -> list[Any]:
            moved = self.store.inner.swap(ends)
            return [self.store.inner.reserve(begins), moved]

        found, moved = await self._answer("both", [*ends, *begins], call)
        return found, moved

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


async def ask(router: Router, *work: Reservation | Swap, timeout: float = PATIENCE) -> list[Any]:
    loop = asyncio.get_running_loop()
    tickets = [AsyncTicket(item, loop, timeout) for item in work]
    for ticket in tickets:
        router.submit(ticket)
    return await asyncio.gather(*[ticket.wait() for ticket in tickets], return_exceptions=True)


async def warmed(store: FastStore, **options: Any) -> Router:
    """A router whose threads have prepared and checked the tables: from here on a loop lane may run."""
    router = Router(store, **options)
    wanted = reservation("warm-up")
    (found,) = await ask(router, wanted)
    await ask(router, swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    assert store.asked_here == []
    store.batches.clear()
    return router


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())
