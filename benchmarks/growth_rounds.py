"""What is measured on a store with very many keys: requests, sweeps and reaps, by the product's own verbs.

A request goes through the middleware in this process, 64 at a time, with a random key of a random tenant: the index
is met where a stranger's key would meet it (``load.c`` starts all keys of a run alike, and so stays in one corner).
Each measurement is of a fixed amount of work, so that the small store does not outgrow its size.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from benchmarks.growth_fill import TENANTS, Shape, replayable_key
from benchmarks.store_alone import PairFailed, completion, reservation
from oncekey import OnceKey
from oncekey.core.fingerprint import fingerprint
from oncekey.core.record import Reservation
from oncekey.core.states import Effects
from oncekey.stores.registry import open_store
from oncekey.upkeep import Sweeper
from oncekey.upkeep.health import look
from oncekey.web.asgi import IdempotencyMiddleware

AT_ONCE = 64
BATCH = 500
BODY = b'{"amount":1299,"currency":"EUR","recipient":"acct_42"}'
ANSWER = b'{"id":"%s","amount":1299,"currency":"EUR","status":"created","reference":"%s"}'
FINGERPRINT = fingerprint(method="POST", path="/payments", query=b"", content_type="application/json", body=BODY)

chance = random.Random(7)
Message = MutableMapping[str, Any]


async def pay(scope: Any, receive: Any, send: Any) -> None:
    """The app: an answer of about 300 bytes with its headers."""
    while (await receive()).get("more_body"):
        pass
    number = b"%032x" % chance.getrandbits(128)
    body = ANSWER % (number, number * 4)
    headers = [(b"content-type", b"application/json"), (b"location", b"/payments/" + number)]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def random_key() -> str:
    return str(UUID(int=chance.getrandbits(128), version=4))


class Subject:
    """One store of one size, open all the time: its rounds are taken in turns with those of the other sizes."""

    def __init__(self, url: str, shape: Shape) -> None:
        self.url = url
        self.shape = shape
        self.once = OnceKey(url, scope=lambda request: request.headers["x-tenant"])
        self.app = IdempotencyMiddleware(pay, once=self.once)
        self.store = open_store(url)
        self._replayed = 0

    def close(self) -> None:
        self.once.close()
        self.store.close()

    async def request(self, tenant: str, key: str, *, replay: bool) -> None:
        """One POST, answered as it must be; anything else ends the run."""
        sent: list[Message] = []
        waiting: list[Message] = [{"type": "http.request", "body": BODY, "more_body": False}]

        async def receive() -> Message:
            return waiting.pop() if waiting else await asyncio.Future()

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [
            (b"host", b"bench"),
            (b"x-tenant", tenant.encode()),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(BODY)),
            (b"idempotency-key", b'"%s"' % key.encode()),
        ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/payments",
            "raw_path": b"/payments",
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, receive, send)
        replayed = any(name == b"idempotency-replayed" for name, _ in sent[0]["headers"])
        if sent[0]["status"] != 201 or replayed is not replay:
            raise PairFailed(f"{sent[0]['status']}, replayed: {replayed} where {replay} was wanted: {sent[1:]}")

    async def first(self, count: int) -> float:
        """Requests per second with new keys."""

        async def one() -> None:
            await self.request(f"tenant-{chance.randrange(TENANTS)}", random_key(), replay=False)

        return await rate(one, count)

    async def replay(self, count: int) -> float:
        """Requests per second with keys that are completed, spread over the whole table."""

        async def one() -> None:
            number = self._replayed = (self._replayed + 7919) % self.shape.replayable
            await self.request(self.shape.tenant_of(number), replayable_key(number), replay=True)

        return await rate(one, count)

    def pairs(self, count: int) -> float:
        """Reserve and complete per second, straight into the store, in batches of 64."""
        began = time.perf_counter()
        for _ in range(count // AT_ONCE):
            asked = [spread() for _ in range(AT_ONCE)]
            answers = self.store.reserve(asked)
            if None in self.store.swap([completion(mine, found) for mine, found in zip(asked, answers, strict=True)]):
                raise PairFailed("a completion found another owner")
        return count / (time.perf_counter() - began)

    def sweep(self) -> float:
        """Seconds for one turn of a sweeper that finds 500 leases over. Their keys are as young as they are in life."""
        lapsed = [replace(spread(), lease_seconds=0.0, effects=Effects.REPEATABLE) for _ in range(BATCH)]
        self.store.reserve(lapsed)
        sweeper = Sweeper(self.store, batch=BATCH + 1)
        began = time.perf_counter()
        swept = sweeper.run()
        took = time.perf_counter() - began
        if swept.released != BATCH:
            raise PairFailed(f"the sweeper released {swept.released} of {BATCH}")
        return took

    def reap(self) -> float:
        """Seconds for one batch of a reaper: the oldest 500 keys, long not looked at."""
        began = time.perf_counter()
        if self.store.purge(BATCH) != BATCH:
            raise PairFailed("there was not enough to reap: give the store a larger shape")
        return time.perf_counter() - began

    def health(self) -> float:
        began = time.perf_counter()
        look(self.store)
        return time.perf_counter() - began


def spread() -> Reservation:
    return replace(reservation(), scope=f"tenant-{chance.randrange(TENANTS)}", key=random_key())


async def rate(one: Callable[[], Awaitable[None]], count: int) -> float:
    """How many per second, 64 at a time."""
    left = count

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - began)
