"""Every adapter does what the table says, with its real broker where one can be had.

RabbitMQ, NATS and Redis are servers. SQS is moto's server. Kafka is librdkafka's mock of a broker, which both client
libraries connect to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, Confirmed, OnceKey, Policy, Refused, Refuted
from oncekey.consumers import Action, AsyncConsumer, Situation
from tests.consumers.brokers import AioKafka, Broker, Confluent, Nats, Rabbit, RedisStream, Sqs

QUICK = Policy(effects="repeatable", retry_after=timedelta(seconds=0.2))
pytestmark = [pytest.mark.consumers, pytest.mark.timeout(240)]

HANDLED, DUPLICATE, FAILED = Situation.HANDLED, Situation.DUPLICATE, Situation.FAILED


@pytest.fixture(scope="session")
def kafka() -> Any:
    from confluent_kafka import Producer

    cluster = Producer({"bootstrap.servers": "mock:1", "test.mock.num.brokers": 1, "log_level": 0})
    broker = next(iter(cluster.list_topics(timeout=20).brokers.values()))
    yield f"{broker.host}:{broker.port}"
    del cluster  # the mock lives as long as this producer


MAKERS: dict[str, tuple[str, Callable[[Any], Broker]]] = {
    "rabbitmq": ("rabbit_server", lambda server: Rabbit(server.url)),
    "nats": ("nats_server", lambda server: Nats(server.url)),
    "redis": ("redis_server", lambda server: RedisStream(server.url)),
    "sqs": ("moto_server", lambda server: Sqs(server.endpoint)),
    "aiokafka": ("kafka", AioKafka),
    "confluent": ("kafka", Confluent),
}


@pytest.fixture(params=MAKERS)
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    fixture, make = MAKERS[request.param]
    made = make(request.getfixturevalue(fixture))
    await made.connect()
    yield made
    await made.close()


@pytest.fixture
def once(tmp_path: Path) -> Any:
    with OnceKey(f"sqlite:///{tmp_path / 'keys.db'}", scope=SINGLE_TENANT) as made:
        yield made


async def until(ready: Callable[[], Any], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            answer = ready()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.02)


class Handler:
    """Counts its runs by body. ``errors`` are raised one by one before a run counts as good."""

    def __init__(self, broker: Broker, *errors: Exception) -> None:
        self.broker = broker
        self.errors = list(errors)
        self.runs: list[bytes] = []

    async def __call__(self, raw: Any) -> None:
        self.runs.append(self.broker.body(raw))
        if self.errors:
            raise self.errors.pop(0)


async def test_message_runs_once_although_it_is_delivered_three_times(broker: Broker, once: OnceKey) -> None:
    handler = Handler(broker)
    for number in [*range(5)] * 3:
        await broker.publish(f"m-{number}", f"body {number}".encode())
    async with broker.consuming(once, handler):
        await until(lambda: sum(each.action is Action.ACK for each in broker.outcomes) >= 15)
    assert sorted(handler.runs) == [f"body {number}".encode() for number in range(5)]
    assert (broker.situations.count(HANDLED), broker.situations.count(DUPLICATE)) == (5, 10)
    await until(lambda: _nothing_left(broker))


async def _nothing_left(broker: Broker) -> bool:
    return await broker.left() == 0


async def test_message_in_flight_elsewhere_is_kept_or_delivered_again_until_it_is_settled(
    broker: Broker, once: OnceKey
) -> None:
    """Another consumer handles the message when this one gets it. This one acknowledges it when the other has ended.

    It keeps the message meanwhile, so that the broker counts one delivery; Kafka counts none and delivers it again.
    """
    handler, asked = Handler(broker), asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    await broker.publish("m-1", b"body")
    async with broker.consuming(once, handler, policy=QUICK) as consumer:
        elsewhere: list[Any] = []
        make = consumer._message

        def made(raw: Any) -> Any:
            if not elsewhere:
                elsewhere.append(make(raw))
                elsewhere[0].__enter__()
            loop.call_soon_threadsafe(asked.release)
            return make(raw)

        consumer._message = made
        for _ in range(3):
            await asyncio.wait_for(asked.acquire(), 30)
        assert DUPLICATE not in broker.situations
        elsewhere[0].__exit__(None, None, None)
        await until(lambda: DUPLICATE in broker.situations)
    if consumer.holds:
        assert broker.situations == [DUPLICATE]
    else:
        assert broker.situations[0] is Situation.IN_FLIGHT
    assert not handler.runs
    await until(lambda: _nothing_left(broker))


async def test_message_that_must_not_run_is_copied_to_the_dead_letters(
    broker: Broker, once: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Handler(broker)
    await broker.publish("m-1", b"first body")
    async with broker.consuming(once, handler) as consumer:
        await until(lambda: HANDLED in broker.situations)
        await broker.publish("m-1", b"other body")
        await until(lambda: Situation.OTHER_BODY in broker.situations)
        with caplog.at_level(logging.ERROR, "oncekey"):
            await broker.publish(None, b"no id")
            await until(lambda: Situation.BAD_ID in broker.situations)
        handler.errors.append(Refused("no such customer"))
        await broker.publish("m-2", b"refused")
        await until(lambda: Situation.REFUSED in broker.situations)
    hint = "pass message_id" if type(consumer).__name__ == "NatsConsumer" else consumer.id_hint
    assert hint in caplog.text
    assert handler.runs == [b"first body", b"refused"]
    copies = {copy.body: copy for copy in await broker.copies()}
    other, no_id, refused = (copies.pop(body) for body in (b"other body", b"no id", b"refused"))
    assert not copies
    assert other.headers["oncekey-reason"].startswith("other_body: a message with the same id")
    assert other.headers["oncekey-message-id"] == "m-1"
    assert "oncekey-message-id" not in no_id.headers
    assert no_id.headers["oncekey-reason"].startswith("bad_id: it has no usable id")
    assert refused.headers["oncekey-reason"] == "refused: the handler raised Refused"
    assert refused.headers["oncekey-queue"] == next(iter(consumer._queues))
    await until(lambda: _nothing_left(broker))


async def test_failed_message_is_delivered_again_after_a_delay_and_is_a_dead_letter_at_last(
    broker: Broker, once: OnceKey
) -> None:
    handler = Handler(broker, RuntimeError("1"), *map(RuntimeError, "234"))
    await broker.publish("m-1", b"body")
    async with broker.consuming(once, handler, policy=QUICK, max_attempts=2):
        await until(lambda: len(broker.outcomes) == 2)
        (copy,) = await broker.copies()
        handler.errors.clear()
        await broker.move_back(copy)
        await until(lambda: HANDLED in broker.situations)
    assert broker.situations == [FAILED, Situation.EXHAUSTED, HANDLED]
    assert handler.runs == [b"body"] * 3
    await until(lambda: _nothing_left(broker))


@pytest.mark.parametrize(("verdict", "again"), [(Confirmed(201), DUPLICATE), (Refuted("no such charge"), HANDLED)])
async def test_unknown_message_is_parked_and_runs_again_only_by_a_verdict(
    broker: Broker, once: OnceKey, verdict: Any, again: Situation
) -> None:
    """The copy may be moved back at any time. It is the same message, also where the id is the position."""
    position = getattr(__import__(f"oncekey.consumers.{MODULES[type(broker)]}", fromlist=["x"]), "position", None)
    settings: dict[str, Any] = {"policy": Policy(quarantine=timedelta(milliseconds=1))}
    if position is not None:
        settings["message_id"] = position
    handler = Handler(broker, RuntimeError("did it happen?"))
    await broker.publish("m-1", b"body")
    async with broker.consuming(once, handler, **settings) as consumer:
        await until(lambda: len(broker.outcomes) == 1)
        (copy,) = await broker.copies()
        await broker.move_back(copy)  # too early
        await until(lambda: len(broker.outcomes) == 2)
        (copy,) = await broker.copies()
        assert copy.headers["oncekey-reason"].startswith("unknown: it may have been handled")
        operation = f"message {next(iter(consumer._queues))}"
        key = copy.headers["oncekey-message-id"]
        settled = await once.ingest(verdict, key=key, operation=operation)
        assert settled.over, settled
        await broker.move_back(copy)
        await until(lambda: len(broker.outcomes) == 3)
    assert broker.situations == [Situation.UNKNOWN, Situation.UNKNOWN, again]
    assert len(handler.runs) == (1 if again is DUPLICATE else 2)
    await until(lambda: _nothing_left(broker))


MODULES = {
    Rabbit: "rabbitmq",
    Nats: "nats",
    RedisStream: "redis_streams",
    Sqs: "sqs",
    AioKafka: "kafka",
    Confluent: "confluent",
}


async def test_unknown_message_stays_with_the_broker_if_declared_so(broker: Broker, once: OnceKey) -> None:
    handler = Handler(broker, RuntimeError("did it happen?"))
    await broker.publish("m-1", b"body")
    async with broker.consuming(once, handler, unknown="keep"):
        await until(lambda: len(broker.outcomes) >= 1)
    assert broker.outcomes[0].action is Action.RETRY
    assert handler.runs == [b"body"]
    await until(lambda: _one_left(broker))
    assert not await broker.copies()


async def _one_left(broker: Broker) -> bool:
    return await broker.left() == 1


async def test_consumer_that_is_stopped_ends_the_message_in_hand(broker: Broker, once: OnceKey) -> None:
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()
    running: list[Any] = []
    ended = []

    async def handler(raw: Any) -> None:
        """Work that ends after the consumer was stopped."""
        loop.call_soon_threadsafe(entered.set)
        stopped = running[0]._stopping.wait
        await (stopped() if isinstance(running[0], AsyncConsumer) else asyncio.to_thread(stopped))
        ended.append(raw)

    async with broker.consuming(once, handler) as consumer:
        running.append(consumer)
        await broker.publish("m-1", b"body")
        await asyncio.wait_for(entered.wait(), 30)
    assert len(ended) == 1
    assert broker.situations == [HANDLED]
    await until(lambda: _nothing_left(broker))


@pytest.mark.parametrize("broker", ["rabbitmq", "nats"], indirect=True)
async def test_handler_that_answers_the_broker_itself_is_told_so(
    broker: Broker, once: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(raw: Any) -> None:
        await raw.ack()

    await broker.publish("secret-id", b"body")
    async with broker.consuming(once, handler):
        await until(lambda: broker.outcomes)
    assert "answered the broker itself" in caplog.text
    assert "secret-id" not in caplog.text
    assert broker.situations == [HANDLED]
    await until(lambda: _nothing_left(broker))


async def test_copy_that_fails_leaves_the_message_with_the_broker(
    broker: Broker, once: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Handler(broker, Refused("no such customer"))
    await broker.publish("m-1", b"body")

    async def copy(*args: Any) -> None:
        raise ConnectionError("the dead letters cannot be reached")

    def copy_blocking(*args: Any) -> None:
        raise ConnectionError("the dead letters cannot be reached")

    async with broker.consuming(once, handler) as consumer:
        consumer.copy = copy if isinstance(consumer, AsyncConsumer) else copy_blocking
        await until(lambda: broker.outcomes)
    assert "could not be copied" in caplog.text
    await until(lambda: _one_left(broker))
