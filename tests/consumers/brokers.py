"""The brokers behind one interface, so that every adapter passes the same suite (test_adapters.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

from oncekey import OnceKey
from oncekey.consumers import AsyncConsumer, BlockingConsumer, Outcome, Situation

_numbers = count(1)


class Copy(NamedTuple):
    """A message in the dead letters."""

    body: bytes
    headers: dict[str, str]


class Broker(ABC):
    """One queue of one broker, and its dead letters. ``connect`` first."""

    runs_beside = True
    """Whether two messages can be handled at the same time by one consumer."""

    def __init__(self) -> None:
        self.name = f"payments-{os.getpid()}-{next(_numbers)}"
        self.dead = f"{self.name}-dead"
        self.outcomes: list[Outcome] = []
        """How each delivery ended."""

    @abstractmethod
    async def connect(self) -> None: ...

    async def close(self) -> None:
        return None

    @abstractmethod
    async def publish(self, message_id: str | None, body: bytes, headers: dict[str, str] | None = None) -> None: ...

    @abstractmethod
    def consumer(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> Any: ...

    @abstractmethod
    def body(self, raw: Any) -> bytes:
        """The body of the library's own message, as a handler reads it."""

    @abstractmethod
    async def left(self) -> int:
        """How many messages of the queue are not acknowledged."""

    @abstractmethod
    async def copies(self) -> list[Copy]:
        """What came into the dead letters since the last call."""

    async def move_back(self, copy: Copy) -> None:
        """As an operator does: send the copy to the queue again, with its headers."""
        await self.publish(None, copy.body, copy.headers)

    @contextlib.asynccontextmanager
    async def consuming(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> AsyncIterator[Any]:
        """A consumer that runs until the end of the block."""
        consumer = self.consumer(once, handler, dead_letter=self.dead_place, **settings)
        self.record(consumer)
        if isinstance(consumer, AsyncConsumer):
            task = asyncio.create_task(consumer.run())
            try:
                yield consumer
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            return
        assert isinstance(consumer, BlockingConsumer)
        raised: list[BaseException] = []

        def run() -> None:
            try:
                consumer.run()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield consumer
        finally:
            consumer.stop()
            await asyncio.to_thread(thread.join)
            assert not raised

    def record(self, consumer: Any) -> None:
        """Keep the outcomes of this consumer."""
        on_message = consumer.on_message

        async def recorded(raw: Any) -> Outcome:
            self.outcomes.append(outcome := await on_message(raw))
            return outcome

        def recorded_blocking(raw: Any) -> Outcome:
            self.outcomes.append(outcome := on_message(raw))
            return outcome

        consumer.on_message = recorded if isinstance(consumer, AsyncConsumer) else recorded_blocking

    @property
    def situations(self) -> list[Situation]:
        return [outcome.situation for outcome in self.outcomes]

    @property
    def dead_place(self) -> str:
        return self.dead


def plain(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of the suite, which is async, for a library that blocks."""
    return lambda raw: asyncio.run(handler(raw))


class Rabbit(Broker):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    async def connect(self) -> None:
        import aio_pika

        self.connection = await aio_pika.connect_robust(self.url)
        self.channel = await self.connection.channel()
        await self.channel.set_qos(prefetch_count=20)
        await self.channel.declare_queue(self.name, durable=True)
        self.dead_queue = await self.channel.declare_queue(self.dead, durable=True)

    async def close(self) -> None:
        await self.connection.close()

    async def publish(self, message_id: str | None, body: bytes, headers: dict[str, str] | None = None) -> None:
        import aio_pika

        # aio-pika would make an id; a producer in another language makes none
        message = aio_pika.Message(body, message_id=message_id or " ", headers={**(headers or {})})
        await self.channel.default_exchange.publish(message, routing_key=self.name)

    def consumer(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> Any:
        from oncekey.consumers.rabbitmq import RabbitConsumer

        return RabbitConsumer(once, self.queue, handler, **settings)

    def body(self, raw: Any) -> bytes:
        return bytes(raw.body)

    @contextlib.asynccontextmanager
    async def consuming(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> AsyncIterator[Any]:
        """On a channel of its own. When that closes, RabbitMQ takes back what is not acknowledged."""
        async with self.connection.channel() as channel:
            await channel.set_qos(prefetch_count=20)
            self.queue = await channel.get_queue(self.name)
            async with super().consuming(once, handler, **settings) as consumer:
                yield consumer

    async def left(self) -> int:
        """Messages that are ready. Those that a consumer holds count when it has stopped."""
        async with self.connection.channel() as channel:
            found = await channel.declare_queue(self.name, passive=True)
            return found.declaration_result.message_count or 0

    async def copies(self) -> list[Copy]:
        found = []
        while (message := await self.dead_queue.get(fail=False)) is not None:
            found.append(Copy(message.body, {name: str(text) for name, text in message.headers.items()}))
            await message.ack()
        return found


class Nats(Broker):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    async def connect(self) -> None:
        import nats
        from nats.js.api import ConsumerConfig, StreamConfig

        self.client = await nats.connect(self.url)
        self.js = self.client.jetstream()
        # The dead letters are in the same stream: JetStream must not take a copy for a duplicate of its original.
        await self.js.add_stream(StreamConfig(name=self.name, subjects=[self.name, self.dead], duplicate_window=120))
        config = ConsumerConfig(ack_wait=1.0, max_ack_pending=100)
        self.subscription = await self.js.pull_subscribe(self.name, durable="billing", config=config)
        self.dead_letters = await self.js.pull_subscribe(self.dead, durable="dead")

    async def close(self) -> None:
        await self.client.close()

    async def publish(self, message_id: str | None, body: bytes, headers: dict[str, str] | None = None) -> None:
        """JetStream would drop a repeated Nats-Msg-Id by itself, so the tests have a header of their own."""
        all_headers = {**(headers or {})}
        all_headers.pop("Nats-Msg-Id", None)
        if message_id is not None:
            all_headers["id"] = message_id
        await self.js.publish(self.name, body, headers=all_headers or None)

    def consumer(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> Any:
        from oncekey.consumers.nats import NatsConsumer

        settings.setdefault("message_id", lambda raw: (raw.headers or {}).get("id"))
        return NatsConsumer(once, self.js, self.subscription, handler, **settings)

    def body(self, raw: Any) -> bytes:
        return bytes(raw.data)

    async def left(self) -> int:
        info = await self.js.consumer_info(self.name, "billing")
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def copies(self) -> list[Copy]:
        found = []
        while (await self.dead_letters.consumer_info()).num_pending:
            (message,) = await self.dead_letters.fetch(1, timeout=30)
            await message.ack()
            found.append(Copy(message.data, dict(message.headers or {})))
        return found


class RedisStream(Broker):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    async def connect(self) -> None:
        import redis.asyncio

        self.client: Any = redis.asyncio.Redis.from_url(self.url)
        self._read = "0-0"

    async def close(self) -> None:
        await self.client.aclose()

    async def publish(self, message_id: str | None, body: bytes, headers: dict[str, str] | None = None) -> None:
        fields: dict[Any, Any] = {**(headers or {}), "body": body}
        if message_id is not None:
            fields["message-id"] = message_id
        await self.client.xadd(self.name, fields)

    def consumer(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> Any:
        from oncekey.consumers.redis_streams import RedisStreamConsumer

        settings.setdefault("idle", timedelta(seconds=2))
        return RedisStreamConsumer(once, self.client, self.name, "billing", handler, **settings)

    def body(self, raw: Any) -> bytes:
        return bytes(raw["body"])

    async def left(self) -> int:
        groups = await self.client.xinfo_groups(self.name)
        if not groups:
            return int(await self.client.xlen(self.name))
        (group,) = groups
        behind = await self.client.xrange(self.name, min=f"({group['last-delivered-id'].decode()}")
        return int(group["pending"]) + len(behind)

    async def copies(self) -> list[Copy]:
        found = []
        for entry_id, fields in await self.client.xrange(self.dead, min=f"({self._read}"):
            self._read = entry_id.decode()
            headers = {name.decode(): text.decode() for name, text in fields.items()}
            found.append(Copy(headers.pop("body").encode(), headers))
        return found


class Sqs(Broker):
    runs_beside = False

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint

    async def connect(self) -> None:
        import boto3

        self.client = boto3.client("sqs", endpoint_url=self.endpoint, region_name="eu-central-1")
        self.url, self.dead_url = (
            self.client.create_queue(QueueName=name)["QueueUrl"] for name in (self.name, self.dead)
        )

    @property
    def dead_place(self) -> str:
        return self.dead_url

    async def publish(self, message_id: str | None, body: bytes, headers: dict[str, str] | None = None) -> None:
        given = {**(headers or {}), **({} if message_id is None else {"message-id": message_id})}
        attributes = {name: {"DataType": "String", "StringValue": text} for name, text in given.items()}
        await asyncio.to_thread(
            self.client.send_message,
            QueueUrl=self.url,
            MessageBody=body.decode(),
            MessageAttributes=attributes,
        )

    def consumer(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> Any:
        from oncekey.consumers.sqs import SqsConsumer

        return SqsConsumer(once, self.client, self.url, plain(handler), wait=1, **settings)

    def body(self, raw: Any) -> bytes:
        return str(raw["Body"]).encode()

    async def left(self) -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = await asyncio.to_thread(self.client.get_queue_attributes, QueueUrl=self.url, AttributeNames=names)
        return sum(int(number) for number in found["Attributes"].values())

    async def copies(self) -> list[Copy]:
        found = []
        while messages := self.client.receive_message(
            QueueUrl=self.dead_url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages"):
            for each in messages:
                headers = {name: str(a["StringValue"]) for name, a in each.get("MessageAttributes", {}).items()}
                found.append(Copy(each["Body"].encode(), headers))
                self.client.delete_message(QueueUrl=self.dead_url, ReceiptHandle=each["ReceiptHandle"])
        return found


class _Kafka(Broker):
    """librdkafka's mock of a broker, in this process: no Kafka can be had as a package."""

    runs_beside = False

    def __init__(self, bootstrap: str) -> None:
        super().__init__()
        self.bootstrap = bootstrap
        self.group = f"{self.name}-billing"  # the mock takes long for a group that others have left
        self._published = 0
        self._dead_at: dict[int, int] = {}

    async def connect(self) -> None:
        from confluent_kafka import Producer

        self.producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0})

    async def publish(self, message_id: str | None, body: bytes, headers: dict[str, str] | None = None) -> None:
        given: dict[str, Any] = {**(headers or {}), **({} if message_id is None else {"message-id": message_id})}
        self.producer.produce(self.name, body, headers=given, partition=0)
        await asyncio.to_thread(self.producer.flush, 10)
        self._published += 1

    async def left(self) -> int:
        """By the offset that the group has committed."""
        from confluent_kafka import Consumer, TopicPartition

        asking = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.group, "log_level": 0})
        try:
            (found,) = await asyncio.to_thread(asking.committed, [TopicPartition(self.name, 0)], 10)
        finally:
            asking.close()
        return self._published - max(found.offset, 0)

    async def copies(self) -> list[Copy]:
        return await asyncio.to_thread(self._copies)

    def _copies(self) -> list[Copy]:
        from confluent_kafka import Consumer, TopicPartition

        reading = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "dead", "log_level": 0})
        found = []
        try:
            if self.dead not in reading.list_topics(timeout=10).topics:
                return []
            for partition in reading.list_topics(self.dead, timeout=10).topics[self.dead].partitions:
                first = self._dead_at.get(partition, 0)
                _, end = reading.get_watermark_offsets(TopicPartition(self.dead, partition), timeout=10)
                if end <= first:
                    continue
                reading.assign([TopicPartition(self.dead, partition, first)])
                while self._dead_at.get(partition, 0) < end:
                    message = reading.poll(10)
                    assert message is not None
                    assert message.error() is None
                    self._dead_at[partition] = int(message.offset() or 0) + 1
                    headers: Any = message.headers() or []
                    found.append(Copy(bytes(message.value() or b""), {name: text.decode() for name, text in headers}))
        finally:
            reading.close()
        return found


class AioKafka(_Kafka):
    @contextlib.asynccontextmanager
    async def consuming(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> AsyncIterator[Any]:
        from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

        self.aio = AIOKafkaConsumer(
            self.name,
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        self.aio_producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap)
        await self.aio.start()
        await self.aio_producer.start()
        try:
            async with super().consuming(once, handler, **settings) as consumer:
                yield consumer
        finally:
            await self.aio_producer.stop()
            await self.aio.stop()

    def consumer(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> Any:
        from oncekey.consumers.kafka import KafkaConsumer

        return KafkaConsumer(once, self.aio, handler, producer=self.aio_producer, **settings)

    def body(self, raw: Any) -> bytes:
        return bytes(raw.value)


class Confluent(_Kafka):
    def consumer(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> Any:
        from oncekey.consumers.confluent import ConfluentConsumer

        client = {
            "bootstrap.servers": self.bootstrap,
            "group.id": self.group,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
        return ConfluentConsumer(once, client, [self.name], plain(handler), **settings)

    def body(self, raw: Any) -> bytes:
        return bytes(raw.value())
