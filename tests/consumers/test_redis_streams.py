"""Redis Streams: what is particular to its pending list."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

from oncekey import SINGLE_TENANT, OnceKey
from tests.consumers.brokers import RedisStream
from tests.consumers.test_adapters import Handler, until


async def test_entry_of_a_dead_consumer_is_claimed_behind_many_that_are_being_handled(
    redis_url: str, tmp_path: Path
) -> None:
    """Redis looks at ten times COUNT entries in one XAUTOCLAIM, and the consumer goes on from there."""
    broker = RedisStream(redis_url)
    await broker.connect()
    for number in range(301):
        await broker.publish(f"m-{number}", f"{number}".encode())
    await broker.client.xgroup_create(broker.name, "billing", id="0")
    found: Any = await broker.client.xreadgroup("billing", "other", {broker.name: ">"}, count=301)
    entries = found[broker.name.encode()][0] if isinstance(found, dict) else found[0][1]
    hours = 2 * 60 * 60 * 1000
    await broker.client.xclaim(broker.name, "billing", "dead", 0, [entries[-1][0]], idle=hours)
    handler = Handler(broker)
    with OnceKey(f"sqlite:///{tmp_path / 'keys.db'}", scope=SINGLE_TENANT) as once:
        async with broker.consuming(once, handler, idle=timedelta(hours=1), concurrency=2):
            await until(lambda: handler.runs == [b"300"])
            await broker.publish("new", b"new")
            await until(lambda: handler.runs == [b"300", b"new"])
    await broker.close()


class SwallowsCancellation:
    """A client whose look for entries swallows one cancellation, as ``asyncio.wait_for`` of Python 3.11 may."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.waits = asyncio.Event()

    async def execute_command(self) -> None: ...

    async def xreadgroup(self, *args: Any, **options: Any) -> list[Any]:
        self.waits.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()  # for ever
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


async def test_consumer_ends_although_its_library_swallows_the_cancellation(redis_url: str) -> None:
    broker = RedisStream(redis_url)
    await broker.connect()
    broker.client = client = SwallowsCancellation(broker.client)
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        async with asyncio.timeout(20), broker.consuming(once, Handler(broker)):
            await client.waits.wait()
    await broker.close()
