"""Takes payments from RabbitMQ, once each: ``python examples/rabbitmq_payments.py``.

Every payment is one row in PostgreSQL, committed together with the message's key. Kill it at any moment and start it
again: a message that was interrupted runs again from its beginning, and one that was committed is only acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from oncekey import SINGLE_TENANT, OnceKey, Policy, Refused, current
from oncekey.consumers.rabbitmq import RabbitConsumer

STORE = os.environ.get("ONCEKEY_STORE", "postgresql://localhost/payments")
BROKER = os.environ.get("PAYMENTS_BROKER", "amqp://guest:guest@127.0.0.1/")

once = OnceKey(STORE, scope=SINGLE_TENANT, policy=Policy(effects="transactional"), migrate=True)
engine = create_async_engine(STORE.replace("postgresql://", "postgresql+psycopg://"))


async def pay(message: AbstractIncomingMessage) -> None:
    payment = json.loads(message.body)
    if payment["cents"] <= 0:
        raise Refused("a payment is more than nothing")  # to the dead letters
    session = AsyncSession(engine)  # do not close it here: oncekey commits it after this function
    await current().enlist(session)
    row = {"message_id": message.message_id, "cents": payment["cents"]}
    await session.execute(text("INSERT INTO payments VALUES (:message_id, :cents)"), row)


async def main() -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS payments (message_id text, cents bigint)"))
    async with await aio_pika.connect_robust(BROKER) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=50)
        queue = await channel.declare_queue("payments", durable=True)
        await channel.declare_queue("payments.dead", durable=True)
        await RabbitConsumer(once, queue, pay, dead_letter="payments.dead").run()
    await once.aclose()  # after SIGTERM: the payments in hand have ended


if __name__ == "__main__":
    asyncio.run(main())
