"""A consumer in a process of its own, which test_rabbitmq_kills.py kills: ``python killed_worker.py AMQP STORE QUEUE``.

Its effect is a row in PostgreSQL, in the transaction that also completes the message's key.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from datetime import timedelta

import aio_pika
import psycopg

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.consumers.rabbitmq import RabbitConsumer

CONCURRENCY = 10
POLICY = Policy(effects="transactional", lease=timedelta(seconds=3), retry_after=timedelta(seconds=0.2))


async def main(amqp: str, store: str, name: str) -> None:
    once = OnceKey(store, scope=SINGLE_TENANT)
    free: asyncio.Queue[psycopg.AsyncConnection] = asyncio.Queue()
    for _ in range(CONCURRENCY):
        free.put_nowait(await psycopg.AsyncConnection.connect(store))

    async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        connection = free.get_nowait()
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: free.put_nowait(connection))  # when the delivery has ended, and its commit
        await current().enlist(connection)
        await connection.execute("INSERT INTO effects (id) VALUES (%s)", [message.message_id])

    connection = await aio_pika.connect(amqp)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=100)
    queue = await channel.get_queue(name)
    consumer = RabbitConsumer(
        once, queue, handle, dead_letter=f"{name}-dead", policy=POLICY, concurrency=CONCURRENCY, max_attempts=None
    )
    running = asyncio.create_task(consumer.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        await connection.close()
        await once.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
