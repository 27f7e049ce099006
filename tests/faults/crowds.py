"""64 clients on one key, all at once: each key's history must be linearizable, and its ledger has one line.

Two apps with an OnceKey each share the store: in two processes, or where keys live in one process in two threads. They
walk through the same keys in step, so that every key is asked for by both at the same moment. Some clients ask for
something else under the key, some leave at a random moment (cancelled, or with a disconnect), some ask again, and some
handlers give the key back once. Half of the keys are on a route where duplicates wait.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.stores.api import Store
from oncekey.stores.memory import MemoryStore
from oncekey.testing.company import Child
from oncekey.web.asgi import IdempotencyMiddleware
from tests.faults.asgi_request import AsgiRequest, quiet
from tests.faults.campaign import Fault, Run
from tests.faults.linearizable import Call, Saw, illegal, told

CLIENTS = 64
PARTIES = 2
WAVE = 16
"""Keys that are asked for at the same time: 1,024 clients."""
PATIENCE = 30.0
BODIES = {"this": b'{"cents":100}', "that": b'{"cents":999}'}
AGAIN = (Saw.BUSY, Saw.RELEASED, Saw.LOST)
"""After these a client asks again, with the same key."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one client does. The same in every process: it comes of the seed and the key."""

    number: int
    asks: str
    after: float
    leaves: float
    """Seconds after its begin; infinite: it stays."""
    cancelled: bool
    """How it leaves: its request is cancelled, or the server tells of a disconnect."""
    tries: int


def plans(seed: int, key: str) -> list[Plan]:
    chance = random.Random(f"{seed} {key}")
    return [
        Plan(
            number,
            "that" if chance.random() < 0.1 else "this",
            chance.uniform(0, 0.004),
            chance.uniform(0, 0.012) if chance.random() < 0.12 else math.inf,
            chance.random() < 0.5,
            3 if chance.random() < 0.1 else 1,
        )
        for number in range(CLIENTS)
    ]


class Party:
    """One app with an OnceKey of its own, and its half of the clients."""

    def __init__(self, store: str | Store, number: int, seed: int, ledger: Path, meet: Callable[[], Any]) -> None:
        slow = Policy(lease=timedelta(seconds=30), wait=timedelta(seconds=20))
        patient = Policy(lease=timedelta(seconds=30), wait=timedelta(seconds=20), in_flight="wait")
        routes = {"POST /conflict": slow, "POST /wait": patient}
        self.once = OnceKey(store, scope=SINGLE_TENANT, routes=routes, migrate=True)
        self.app = IdempotencyMiddleware(self._handle, once=self.once)
        self._number = number
        self._seed = seed
        self._meet = meet
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.calls: list[tuple[str, list[Any]]] = []

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        op = current()
        await receive()
        chance = random.Random(f"{self._seed} {op.key} {op.attempt}")
        await asyncio.sleep(chance.uniform(0, 0.004))
        if op.attempt == 1 and chance.random() < 0.2:
            raise NotExecuted("once more")
        os.write(self._ledger, f"{op.key} {op.owner}\n".encode())
        await asyncio.sleep(chance.uniform(0, 0.004))
        await send({"type": "http.response.start", "status": 201, "headers": [(b"location", op.key.encode())]})
        await send({"type": "http.response.body", "body": json.dumps({"run": op.owner}).encode()})

    async def walk(self, keys: list[str]) -> list[tuple[str, list[Any]]]:
        """All keys, wave by wave, in step with the other party."""
        try:
            for start in range(0, len(keys), WAVE):
                wave = keys[start : start + WAVE]
                mine = [(key, plan) for key in wave for plan in plans(self._seed, key)]
                self._meet()
                async with asyncio.timeout(PATIENCE):
                    clients = (self._client(key, plan) for key, plan in mine if plan.number % PARTIES == self._number)
                    await asyncio.gather(*clients)
                    while self.once.engine.tasks:  # of clients that have left
                        await asyncio.sleep(0.001)
                self._meet()
                if self._number == 0:
                    await asyncio.gather(*(self._afterwards(key) for key in wave))
        finally:
            os.close(self._ledger)
            await self.once.aclose()
        return self.calls

    async def _client(self, key: str, plan: Plan) -> None:
        await asyncio.sleep(plan.after)
        for _ in range(plan.tries):
            saw = await self._ask(key, plan.asks, str(plan.number), plan.leaves, plan.cancelled)
            if saw not in AGAIN:
                return
            await asyncio.sleep(0.003)

    async def _afterwards(self, key: str) -> None:
        """When all is quiet, both requests are asked once more."""
        until = time.monotonic() + PATIENCE
        for asks in BODIES:
            while await self._ask(key, asks, "afterwards") in AGAIN and time.monotonic() < until:
                await asyncio.sleep(0.02)

    async def _ask(self, key: str, asks: str, who: str, leaves: float = math.inf, cancelled: bool = False) -> Saw:
        path = "/wait" if int(key.rpartition("-")[2]) % 2 else "/conflict"
        asked = AsgiRequest(path, key, BODIES[asks])
        began = time.monotonic()
        task = asked.start(self.app)
        if leaves < math.inf:
            await asyncio.wait([task], timeout=leaves)
            if not asked.ended:
                asked.leave()
                if cancelled:
                    task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not cancelled:
                raise
        ended = time.monotonic()
        saw = asked.saw
        self.calls.append((key, [asks, began, ended, saw.value, asked.result, f"{self._number}/{who}"]))
        return saw


def _in_processes(run: Run, keys: list[str], ledger: Path) -> list[tuple[str, list[Any]]]:
    url = run.url()
    barrier = multiprocessing.get_context("fork").Barrier(PARTIES)

    def work(number: int) -> Any:
        party = Party(url, number, run.seed, ledger, lambda: barrier.wait(PATIENCE))
        return asyncio.run(party.walk(keys))

    OnceKey(url, scope=SINGLE_TENANT, migrate=True).start()
    children = [Child(lambda number=number: work(number)) for number in range(PARTIES)]  # type: ignore[misc]
    return [call for child in children for call in child.result()]


def _in_threads(run: Run, keys: list[str], ledger: Path) -> list[tuple[str, list[Any]]]:
    store, barrier = MemoryStore(), threading.Barrier(PARTIES)

    def work(number: int) -> Any:
        return asyncio.run(Party(store, number, run.seed, ledger, lambda: barrier.wait(PATIENCE)).walk(keys))

    with ThreadPoolExecutor(PARTIES) as pool:
        return [call for calls in pool.map(work, range(PARTIES)) for call in calls]


def crowd(run: Run) -> None:
    seen: Counter[Saw] = Counter()
    while run.wanting:
        keys = [f"crowd-{number}" for number in range(run.hits, min(run.count, run.hits + 25 * WAVE))]
        ledger = run.folder / f"ledger-{run.hits}"
        ledger.touch()
        with quiet():
            calls = (_in_threads if run.store == "memory" else _in_processes)(run, keys, ledger)
        histories: dict[str, list[Call]] = defaultdict(list)
        for key, (asks, began, ended, saw, result, who) in calls:
            histories[key].append(Call(asks, began, ended, Saw(saw), result, who))
            seen[Saw(saw)] += 1
        runs: dict[str, list[str]] = defaultdict(list)
        for line in ledger.read_text().splitlines():
            key, owner = line.split()
            runs[key].append(owner)
        for key in keys:
            check(run, key, histories[key], runs[key])
        run.asked(len(calls))
        run.hit(len(keys))
    run.notes.append(", ".join(f"{number} {saw}" for saw, number in seen.most_common()))


def check(run: Run, key: str, history: list[Call], runs: list[str]) -> None:
    """One key: its order, its ledger, and that it is settled."""
    if (complaint := illegal(history)) is not None:
        run.violated("I2", f"key {key}, seed {run.seed}: {complaint}")
    if len(runs) != 1:
        run.violated("I1", f"key {key}, seed {run.seed}: the ledger has {runs}\n{told(history)}")
    results = {call.result for call in history if call.result is not None}
    if runs and results != {f'201 {{"run": "{runs[0]}"}}'}:
        run.violated("I2", f"key {key}, seed {run.seed}: the ledger has {runs}, clients saw {results}\n{told(history)}")
    last = [call.saw for call in history if call.client == "0/afterwards"][-len(BODIES) :]
    if Saw.MISMATCH not in last or not {Saw.EXECUTED, Saw.REPLAYED} & set(last):
        run.violated("I4", f"key {key}, seed {run.seed}: not settled after {PATIENCE:g} s\n{told(history)}")


FAULTS = (
    Fault(
        "64 clients on one key, linearizable",
        crowd,
        counts={"memory": 2000, "sqlite": 2000, "postgres": 2000, "redis": 2000, "dynamodb": 200, "mysql": 1000},
        short=WAVE,
        promises=("I1", "I2", "I4", "I5"),
        seconds=120.0,
    ),
)
