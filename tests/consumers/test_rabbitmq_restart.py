"""RabbitMQ goes away and comes back while a consumer runs: the consumer goes on, and nothing runs twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.testing.servers import RabbitServer
from tests.consumers.brokers import Rabbit
from tests.consumers.test_adapters import Handler, until

pytestmark = [pytest.mark.consumers, pytest.mark.timeout(600)]


async def test_consumer_goes_on_when_rabbitmq_is_back(rabbit_server: RabbitServer, tmp_path: Path) -> None:
    broker = Rabbit(rabbit_server.url)
    await broker.connect()
    handler = Handler(broker)
    with OnceKey(f"sqlite:///{tmp_path / 'keys.db'}", scope=SINGLE_TENANT) as once:
        async with broker.consuming(once, handler):
            await broker.publish("m-1", b"before")
            await until(lambda: handler.runs == [b"before"])
            rabbit_server.kill()
            rabbit_server.start()  # in this thread: a server ends with the thread that started it

            async def published() -> bool:
                try:
                    await broker.publish("m-1", b"before")
                    await broker.publish("m-2", b"after")
                except (aio_pika.exceptions.AMQPError, ConnectionError, RuntimeError):
                    return False
                return True

            await until(published, 120)
            await until(lambda: len(handler.runs) == 2, 120)
            assert handler.runs == [b"before", b"after"]
    await broker.close()


async def test_run_ends_with_an_error_when_a_plain_connection_is_lost(
    rabbit_server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oncekey.consumers.rabbitmq import RabbitConsumer

    connection = await aio_pika.connect(rabbit_server.url)
    channel = await connection.channel()
    queue: Any = await channel.declare_queue("plain", durable=True)
    consumes, consume = asyncio.Event(), type(queue).consume

    async def told(self: Any, *args: Any) -> Any:
        tag = await consume(self, *args)
        consumes.set()
        return tag

    monkeypatch.setattr(type(queue), "consume", told)
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        task = asyncio.create_task(RabbitConsumer(once, queue, print, dead_letter="plain").run())
        await asyncio.wait_for(consumes.wait(), 30)
        await connection.close()
        with pytest.raises(ConnectionError, match="was closed"):
            await asyncio.wait_for(task, 30)
