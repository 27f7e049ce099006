"""The store without HTTP: reserve + complete pairs per second, in one process of its own.

``python -m benchmarks.store_alone URL --way lanes|raw`` prints one line of JSON; the benchmark starts it as
a child, so that nothing else shares the interpreter. ``lanes``: 128 asyncio callers, each awaiting one pair
after the other through the engine's lanes, as requests do. ``raw``: batches of 64 straight into the store,
from one thread: what is left when queueing and futures cost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from benchmarks.pgbench import BODY, FINGERPRINT, HEADERS
from benchmarks.serving import ROOT, child_environment
from oncekey.core.record import Found, Record, Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event
from oncekey.core.swaps import Swap, swap
from oncekey.engine.process import Owners
from oncekey.stores.api import Store
from oncekey.stores.registry import open_store

Way = Literal["lanes", "raw"]
CALLERS = 128
RAW_BATCH = 64
TIMEOUT = 5.0
RESPONSE = StoredResponse(201, tuple((name, value) for name, value in json.loads(HEADERS)), BODY)

Reserve = Callable[[Reservation], Awaitable[Found]]
Complete = Callable[[Swap], Awaitable[Record | None]]


_owners = Owners()  # as the engine makes them


class PairFailed(Exception):
    """A reservation or a completion did not do what a new key makes it do: the number would mean nothing."""


def reservation() -> Reservation:
    return Reservation(
        scope="bench",
        key=str(uuid.uuid4()),
        operation="POST /payments",
        fingerprint=FINGERPRINT,
        fingerprint_version=2,
        effects=Effects.EXTERNAL,
        owner=_owners.new(),
        lease_seconds=60.0,
        retention_seconds=86400.0,
    )


def completion(asked: Reservation, found: Found) -> Swap:
    if found.record is None or found.record.owner != asked.owner:
        raise PairFailed("a new key was not reserved")
    return swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)


# ---------------------------------------------------------------- raw


def raw(store: Store, seconds: float, batch: int = RAW_BATCH) -> float:
    """Pairs per second of one thread that hands the store whole batches, after a short warm-up."""
    pairs = 0
    began = time.perf_counter() + min(1.0, seconds / 4)
    while (now := time.perf_counter()) < began + seconds:
        asked = [reservation() for _ in range(batch)]
        answers = store.reserve(asked)
        moved = store.swap([completion(mine, found) for mine, found in zip(asked, answers, strict=True)])
        if None in moved:
            raise PairFailed("a completion found another owner")
        if now >= began:
            pairs += batch
    return pairs / (time.perf_counter() - began)


# ---------------------------------------------------------------- lanes


async def callers(reserve: Reserve, complete: Complete, seconds: float, count: int = CALLERS) -> float:
    """Pairs per second of that many callers, each with one pair at a time, after a short warm-up."""
    began = time.perf_counter() + min(1.0, seconds / 4)
    end = began + seconds

    async def call() -> int:
        pairs = 0
        while (now := time.perf_counter()) < end:
            asked = reservation()
            if await complete(completion(asked, await reserve(asked))) is None:
                raise PairFailed("a completion found another owner")
            if now >= began:
                pairs += 1
        return pairs

    done = await asyncio.gather(*(call() for _ in range(count)))
    return sum(done) / (time.perf_counter() - began)


async def through_lanes(url: str, seconds: float) -> float:
    """The one place that knows the engine: how a caller hands a reservation or a swap to a lane."""
    from oncekey.engine.batching.router import Router
    from oncekey.engine.batching.ticket import whole
    from oncekey.web import tuning

    store = open_store(url)
    store.migrate()
    router = Router(store)
    tuning.settle()  # as the middleware does when a server has started
    loop = asyncio.get_running_loop()

    async def submit(work: Reservation | Swap) -> Any:
        return whole(work, await router.ask(work, loop, TIMEOUT))

    try:
        return await callers(submit, submit, seconds)
    finally:
        router.close()
        store.close()


# ---------------------------------------------------------------- as a child process


def run(url: str, way: Way, seconds: float) -> float:
    """Measure in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.store_alone", url, "--way", way, "--seconds", str(seconds)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=child_environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    if ended.returncode != 0:
        raise PairFailed(f"{way} failed\n{ended.stderr[-3000:]}")
    rate: float = json.loads(ended.stdout)["pairs_per_second"]
    return rate


def prepare(url: str) -> None:
    """Create the tables."""
    store = open_store(url)
    store.migrate()
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_alone", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--way", choices=("lanes", "raw"), default="lanes")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    seconds = min(max(options.seconds, 0.1), 120.0)
    if options.way == "raw":
        store = open_store(options.url)
        store.migrate()
        rate = raw(store, seconds)
        store.close()
    else:
        import uvloop

        rate = uvloop.run(through_lanes(options.url, seconds))
    print(json.dumps({"way": options.way, "pairs_per_second": round(rate, 1)}))


if __name__ == "__main__":
    main()
