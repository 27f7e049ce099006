"""Settings of the adapters that make no sense: refused when the consumer is made, with what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import boto3
import pytest
import redis
import redis.asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.consumers import AsyncConsumer, BlockingConsumer
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


class Sqs:
    """What the consumer looks for in a client of boto3."""

    receive_message = None


def a_redis() -> Any:
    return redis.asyncio.Redis.from_url("redis://127.0.0.1:1")


def streams(once: Any, handler: Any = handle, **settings: Any) -> RedisStreamConsumer:
    settings = {"dead_letter": "dead", **settings}
    return RedisStreamConsumer(
        once, settings.pop("client", None) or a_redis(), "payments", "billing", handler, **settings
    )


def sqs(once: Any, **settings: Any) -> SqsConsumer:
    return SqsConsumer(once, Sqs(), "https://sqs/1/payments", handle_blocking, dead_letter="dead", **settings)


KAFKA = {"bootstrap.servers": "127.0.0.1:1", "group.id": "billing"}

WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda once: streams(None), r"RedisStreamConsumer\(once, …\): it takes a OnceKey"),
    (lambda once: streams(once, "handle"), "a function of the message"),
    (lambda once: streams(once, dead_letter=""), r"dead_letter=…\): it takes the name"),
    (lambda once: streams(once, dead_letter=None), r"dead_letter=…\): it takes the name"),
    (lambda once: streams(once, parking=5), r"parking=…\): it takes the name"),
    (lambda once: streams(once, message_id="id"), "a function of the message that returns its id"),
    (lambda once: streams(once, concurrency=0), "a whole number, 1 or more"),
    (lambda once: streams(once, concurrency="4"), "a whole number, 1 or more"),
    (lambda once: streams(once, idle=4), r"idle=4\): it takes a timedelta .* such as timedelta\(seconds=60\)"),
    (lambda once: streams(once, idle=timedelta(0)), "a timedelta of a millisecond or more"),
    (lambda once: streams(once, scope=5), r"scope=…\): it takes a tenant's name"),
    (lambda once: streams(once, policy="transactional"), "it takes a Policy"),
    (lambda once: streams(once, unknown="drop"), "it takes 'park' or 'keep'"),
    (lambda once: streams(once, max_attempts="5"), "a whole number from 1, or None"),
    (lambda once: RedisStreamConsumer(once, a_redis(), b"a", "b", handle, dead_letter="d"), "both are names"),  # type: ignore[arg-type]
    (lambda once: sqs(once, wait=60), "wait=60.* from 0 to 20"),
    (lambda once: sqs(once, wait=timedelta(seconds=5)), "wait=.*timedelta.* from 0 to 20"),
    (lambda once: ConfluentConsumer(once, "brokers", ["p"], handle_blocking, dead_letter="dead"), "it takes a dict"),  # type: ignore[arg-type]
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


@pytest.mark.parametrize("base", [AsyncConsumer, BlockingConsumer])
def test_adapter_without_its_verbs_cannot_be_made(once: OnceKey, base: Any) -> None:
    adapter = type("Adapter", (base,), {"queue_of": None, "id_of": None, "body_of": None, "header_of": None})
    with pytest.raises(TypeError, match=r"abstract methods '?ack'?, '?copy'?, '?retry'?"):
        adapter(once, handle_blocking, dead_letter="dead")
