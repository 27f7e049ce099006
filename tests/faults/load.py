"""Clients that keep two app processes busy with payments of every kind, while something strikes one of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count

from tests.faults.campaign import Run
from tests.faults.clients import Ask, Client, History, Name
from tests.faults.fork_server import Process
from tests.faults.shop import Shop

SERVERS = 2
CLIENTS = 40
"""Fewer where the store is slow."""
TENANTS = ("acme", "globex")
PATIENCE = 60.0
"""Seconds after the last strike; and for the servers to get to work before the next."""


class Load:
    """Until the run has its count. ``strike`` gets the servers, may replace them, and says which keys it has hit."""

    def __init__(
        self,
        run: Run,
        shop: Shop,
        *,
        timeout: float = 10.0,
        waits_for_unknown: bool = False,
        counts_strikes: bool = False,
    ) -> None:
        """``counts_strikes``: the run's count is of strikes that hit a key, and not of keys."""
        self.run = run
        self.shop = shop
        self.history = History()
        self.strikes = 0
        self._clients = round(CLIENTS / run.pace)
        self._timeout = timeout
        self._waits_for_unknown = waits_for_unknown
        self._counts_strikes = counts_strikes
        self._asks = self._every_ask()
        self._hit: set[Name] = set()
        self._stop = asyncio.Event()
        self._patience_ends = math.inf

    def _every_ask(self) -> Iterator[Ask]:
        """Each tenant has the same keys: they are different requests."""
        kinds = self.shop.kinds
        for number in count():
            for place, tenant in enumerate(TENANTS):
                yield Ask(kinds[(number + place) % len(kinds)], f"key-{number:06d}", 100 + number, tenant)

    async def work(self, strike: Callable[[list[Process]], Awaitable[set[Name]]]) -> None:
        servers = [self.shop.start() for _ in range(SERVERS)]
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client())
            while self.run.wanting:
                await self._until_busy(servers)
                await asyncio.sleep(self.run.random.uniform(0.0, 0.1))
                hit = await strike(servers)
                self.strikes += 1
                self.run.hit(min(len(hit), 1) if self._counts_strikes else len(hit - self._hit))
                self._hit |= hit
            self._stop.set()
            self._patience_ends = time.monotonic() + PATIENCE

    async def _until_busy(self, servers: Sequence[Process]) -> None:
        """It works before it is struck again."""
        served = self.history.answered
        async with asyncio.timeout(PATIENCE):
            while self.history.answered < served + self._clients // 2:
                await asyncio.sleep(0.01)
                assert all(server.alive for server in servers), f"an app process ended: {self.shop.last_words()}"

    def _out_of_patience(self) -> bool:
        """I4 gives a bound after the fault has ended. Until then a key may be struck again and again."""
        return time.monotonic() > self._patience_ends

    async def _client(self) -> None:
        chance, waits = self.run.random, self._waits_for_unknown
        with Client(self.shop.port, self.history, timeout=self._timeout, asked=self.run.asked) as client:
            while not self._stop.is_set():
                ask = next(self._asks)
                outcome = await client.pay(ask, chance, patience=self._out_of_patience, waits_for_unknown=waits)
                if outcome == "final" and chance.random() < 0.05:
                    await client.send(Ask(ask.kind, ask.key, ask.cents + 1, ask.scope))  # a mismatch: never an answer
