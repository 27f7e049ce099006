"""Settings of the adapters that make no sense: refused when the consumer is made, with what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
import redis
import redis.asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.consumers.confluent import ConfluentConsumer
from oncekey.consumers.kafka import KafkaConsumer
from oncekey.consumers.nats import NatsConsumer
from oncekey.consumers.rabbitmq import RabbitConsumer
from oncekey.consumers.redis_streams import RedisStreamConsumer
from oncekey.consumers.sqs import SqsConsumer
from oncekey.errors import ConfigurationError


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


async def handle(message: object) -> None: ...


def handle_blocking(message: object) -> None: ...


def a_redis() -> Any:
    return redis.asyncio.Redis.from_url("redis://127.0.0.1:1")


def streams(once: Any, handler: Any = handle, **settings: Any) -> RedisStreamConsumer:
    settings = {"dead_letter": "dead", **settings}
    return RedisStreamConsumer(
        once, settings.pop("client", None) or a_redis(), "payments", "billing", handler, **settings
    )


KAFKA = {"bootstrap.servers": "127.0.0.1:1", "group.id": "billing"}

WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda once: streams(None), r"RedisStreamConsumer\(once, …\): it takes a OnceKey"),
    (lambda once: streams(once, "handle"), "a function of the message"),
    (lambda once: streams(once, dead_letter=""), r"dead_letter=…\): it takes the name"),
    (lambda once: streams(once, dead_letter=None), r"dead_letter=…\): it takes the name"),
    (lambda once: streams(once, parking=5), r"parking=…\): it takes the name"),
    (lambda once: streams(once, message_id="id"), "a function of the message that returns its id"),
    (lambda once: streams(once, concurrency=0), "it takes 1 or more"),
    (lambda once: streams(once, client=redis.Redis()), "an async client"),
    (lambda once: RabbitConsumer(once, "payments", handle, dead_letter="dead"), "a queue of aio-pika"),  # type: ignore[arg-type]
    (lambda once: NatsConsumer(once, None, None, handle, dead_letter="dead"), "a JetStream context"),  # type: ignore[arg-type]
    (lambda once: SqsConsumer(once, object(), "payments", handle_blocking, dead_letter="dead"), "the URL of a queue"),
    (
        lambda once: SqsConsumer(once, boto3, "https://sqs/1/payments", handle, dead_letter="dead"),
        "it takes a plain function",
    ),
    (lambda once: ConfluentConsumer(once, KAFKA, "payments", handle_blocking, dead_letter="dead"), "a list of topics"),
    (lambda once: ConfluentConsumer(once, {}, ["payments"], handle_blocking, dead_letter="dead"), "group.id"),
    (
        lambda once: ConfluentConsumer(
            once, KAFKA | {"enable.auto.commit": True}, ["payments"], handle_blocking, dead_letter="dead"
        ),
        "a crash would lose them",
    ),
]


@pytest.mark.parametrize(("make", "says"), WRONG, ids=[says for _, says in WRONG])
async def test_setting_that_makes_no_sense_is_refused_with_what_to_write(
    once: OnceKey, make: Callable[[Any], Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make(once)


async def test_kafka_without_a_group_or_with_automatic_commits_is_refused(once: OnceKey) -> None:
    producer = AIOKafkaProducer(bootstrap_servers="127.0.0.1:1")
    for settings, says in [({}, "group_id"), ({"group_id": "billing"}, "enable_auto_commit=False")]:
        consumer = AIOKafkaConsumer("payments", bootstrap_servers="127.0.0.1:1", **settings)
        with pytest.raises(ConfigurationError, match=says):
            KafkaConsumer(once, consumer, handle, producer=producer, dead_letter="dead")
        await consumer.stop()
    with pytest.raises(ConfigurationError, match="AIOKafkaProducer"):
        KafkaConsumer(once, None, handle, producer=producer, dead_letter="dead")
    await producer.stop()


async def test_consumer_of_an_app_with_tenants_needs_a_scope() -> None:
    with OnceKey("memory://", scope=lambda request: "acme") as once:
        with pytest.raises(ConfigurationError, match="say whose messages these are"):
            streams(once)
        streams(once, scope="acme")
        streams(once, scope=lambda entry: entry["tenant"].decode())
