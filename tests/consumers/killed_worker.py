"""A consumer in a process of its own, which test_kills.py kills: ``python killed_worker.py BROKER URL STORE QUEUE``.

Its effect is a row in PostgreSQL, in the transaction that also completes the message's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg

from oncekey import SINGLE_TENANT, OnceKey, Policy, current

CONCURRENCY = 10
POLICY = Policy(effects="transactional", lease=timedelta(seconds=3), retry_after=timedelta(seconds=0.2))


@contextlib.asynccontextmanager
async def rabbitmq(url: str, name: str, once: OnceKey, handle: Any, settings: dict[str, Any]) -> AsyncIterator[Any]:
    import aio_pika

    from oncekey.consumers.rabbitmq import RabbitConsumer

    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=100)
        yield RabbitConsumer(once, await channel.get_queue(name), handle, **settings)


@contextlib.asynccontextmanager
async def nats(url: str, name: str, once: OnceKey, handle: Any, settings: dict[str, Any]) -> AsyncIterator[Any]:
    import nats as library

    from oncekey.consumers.nats import NatsConsumer

    async with await library.connect(url) as client:
        js = client.jetstream()
        subscription = await js.pull_subscribe_bind("billing", name)
        known_as = {"message_id": lambda raw: raw.headers["id"]}
        yield NatsConsumer(once, js, subscription, handle, **known_as, **settings)


@contextlib.asynccontextmanager
async def redis(url: str, name: str, once: OnceKey, handle: Any, settings: dict[str, Any]) -> AsyncIterator[Any]:
    import redis.asyncio as library

    from oncekey.consumers.redis_streams import RedisStreamConsumer

    async with library.Redis.from_url(url) as client:
        idle = timedelta(seconds=2)
        yield RedisStreamConsumer(once, client, name, "billing", handle, idle=idle, **settings)


async def main(broker: str, url: str, store: str, name: str) -> None:
    once = OnceKey(store, scope=SINGLE_TENANT)
    free: asyncio.Queue[psycopg.AsyncConnection] = asyncio.Queue()
    for _ in range(CONCURRENCY):
        free.put_nowait(await psycopg.AsyncConnection.connect(store))

    async def handle(message: object) -> None:
        connection = free.get_nowait()
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: free.put_nowait(connection))  # when the delivery has ended, and its commit
        operation = current()
        await operation.enlist(connection)
        await connection.execute("INSERT INTO effects (id) VALUES (%s)", [operation.key])

    connect: Any = {"rabbitmq": rabbitmq, "nats": nats, "redis": redis}[broker]
    settings = {"dead_letter": f"{name}-dead", "policy": POLICY, "concurrency": CONCURRENCY, "max_attempts": None}
    async with connect(url, name, once, handle, settings) as consumer:
        running = asyncio.create_task(consumer.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await running
    await once.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
