"""A broker's limit of deliveries: an outage of the store and a slow handler do not use it up, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.consumers import Situation
from oncekey.testing.servers import MotoServer, NatsServer, PostgresServer, RabbitServer, RedisServer
from tests.consumers.brokers import Broker, Nats, Rabbit, RedisStream, Sqs
from tests.consumers.test_adapters import Handler, until
from tests.running import running

LIMIT = 3
QUICK = Policy(effects="repeatable", retry_after=timedelta(seconds=0.2))
pytestmark = [pytest.mark.consumers, pytest.mark.timeout(240)]


class QuorumRabbit(Rabbit):
    """A quorum queue that drops a message which came back more often than LIMIT - 1 times."""

    async def connect(self) -> None:
        import aio_pika

        self.connection = await aio_pika.connect_robust(self.url)
        self.channel = await self.connection.channel()
        arguments: Any = {"x-queue-type": "quorum", "x-delivery-limit": LIMIT - 1}
        await self.channel.declare_queue(self.name, durable=True, arguments=arguments)
        self.dead_queue = await self.channel.declare_queue(self.dead, durable=True)

    def consumer(self, once: OnceKey, handler: Callable[..., Any], **settings: Any) -> Any:
        from oncekey.consumers.rabbitmq import RabbitConsumer

        given = {"delivery_limit": LIMIT - 1, **settings}
        return RabbitConsumer(once, self.queue, handler, **given)


class LimitedNats(Nats):
    """A consumer of JetStream with ``max_deliver``, and a short ``ack_wait``."""

    ack_wait = 0.6

    async def connect(self) -> None:
        import nats
        from nats.js.api import ConsumerConfig, StreamConfig

        self.client = await nats.connect(self.url)
        self.js = self.client.jetstream()
        await self.js.add_stream(StreamConfig(name=self.name, subjects=[self.name, self.dead]))
        config = ConsumerConfig(ack_wait=self.ack_wait, max_deliver=LIMIT)
        self.subscription = await self.js.pull_subscribe(self.name, durable="billing", config=config)
        self.dead_letters = await self.js.pull_subscribe(self.dead, durable="dead")


@pytest.fixture
async def nats(nats_server: NatsServer) -> AsyncIterator[Broker]:
    broker = LimitedNats(nats_server.url)
    await broker.connect()
    yield broker
    await broker.close()


@pytest.fixture
async def quorum(rabbit_server: RabbitServer) -> AsyncIterator[Broker]:
    broker = QuorumRabbit(rabbit_server.url)
    await broker.connect()
    yield broker
    await broker.close()


@pytest.fixture(params=["nats", "quorum"])
def broker(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def once(tmp_path: Path) -> Iterator[OnceKey]:
    with OnceKey(f"sqlite:///{tmp_path / 'keys.db'}", scope=SINGLE_TENANT) as made:
        yield made


@pytest.fixture
def outage() -> Iterator[tuple[PostgresServer, ThreadPoolExecutor]]:
    """A store to kill, and the thread that owns it: a start takes longer than ``ack_wait`` and must not block the
    event loop, in which the consumer extends its messages."""
    context = running(PostgresServer())
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(context.__enter__).result(), thread
        thread.submit(context.__exit__, None, None, None).result()


async def test_outage_of_the_store_uses_no_deliveries(
    broker: Broker, outage: tuple[PostgresServer, ThreadPoolExecutor], caplog: pytest.LogCaptureFixture
) -> None:
    handler, loop = Handler(broker), asyncio.get_running_loop()
    store, thread = outage
    with OnceKey(store.url, scope=SINGLE_TENANT, migrate=True) as once:
        async with broker.consuming(once, handler, policy=QUICK) as consumer:
            await broker.publish("before", b"before")
            await until(lambda: broker.situations == [Situation.HANDLED])
            asked: list[bytes] = []
            make = consumer._message

            def made(raw: Any) -> Any:
                asked.append(broker.body(raw))
                return make(raw)

            consumer._message = made
            await loop.run_in_executor(thread, store.kill)
            for number in range(3):
                await broker.publish(f"during-{number}", b"%d" % number)
            await until(lambda: all(asked.count(b"%d" % number) > LIMIT + 1 for number in range(3)), 60)
            await loop.run_in_executor(thread, store.start)
            await until(lambda: len(handler.runs) == 4, 60)
            await until(lambda: len(broker.outcomes) == 4)
    assert sorted(handler.runs) == [b"0", b"1", b"2", b"before"]
    assert broker.situations == [Situation.HANDLED] * 4
    lines = [each.getMessage() for each in caplog.records]
    assert len([line for line in lines if line.startswith("the store does not answer. The consumer of")]) == 1
    assert len([line for line in lines if line.startswith("the store answers again")]) == 1


async def test_last_delivery_that_the_broker_allows_goes_to_the_dead_letters(
    broker: Broker, once: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Handler(broker, *map(RuntimeError, "1234567"))
    await broker.publish("order-4711-of-ann", b"body")
    async with broker.consuming(once, handler, policy=QUICK, max_attempts=None):
        await until(lambda: len(broker.outcomes) == LIMIT)
        (copy,) = await broker.copies()
        handler.errors.clear()
        await broker.move_back(copy)
        await until(lambda: Situation.HANDLED in broker.situations)
    assert handler.runs == [b"body"] * (LIMIT + 1)
    setting = "max_deliver=3" if isinstance(broker, Nats) else "x-delivery-limit=2"
    reason = f"the handler raised RuntimeError. The broker delivers it no more ({setting})"
    assert copy.headers["oncekey-reason"] == f"failed: {reason}"
    (line,) = [each.getMessage() for each in caplog.records if "delivers it no more" in each.getMessage()]
    assert line.startswith("message orde~")
    assert f"goes to {broker.dead}: {reason}. Look at it: `oncekey keys show 'orde~" in line
    assert "--endpoint 'message " in line
    assert "order-4711" not in caplog.text


async def test_message_that_cannot_be_looked_up_is_a_dead_letter_at_its_last_delivery(
    broker: Broker, once: OnceKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncekey.consumers.event_loop.LONG_SECONDS", 0.1)
    handler, calls = Handler(broker), []

    def no_tenant(raw: Any) -> str:
        calls.append(raw)
        raise KeyError("tenant")

    with OnceKey(once.store, scope=lambda request: "acme") as tenants:
        await broker.publish("m-1", b"body")
        async with broker.consuming(tenants, handler, scope=no_tenant):
            await until(lambda: len(calls) == LIMIT)
            found: list[Any] = []

            async def copied() -> bool:
                found.extend(await broker.copies())
                return bool(found)

            await until(copied)
    assert not handler.runs
    assert "looking it up raised KeyError. The broker delivers it no more" in found[0].headers["oncekey-reason"]


async def test_queue_whose_limit_is_not_known_is_named_in_the_log(
    quorum: Broker, once: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Handler(quorum, RuntimeError("1"), RuntimeError("2"))
    await quorum.publish("m-1", b"body")
    async with quorum.consuming(once, handler, policy=QUICK, delivery_limit=None):
        await until(lambda: Situation.HANDLED in quorum.situations)
    (line,) = [each.getMessage() for each in caplog.records if "does not know its limit" in each.getMessage()]
    assert quorum.name in line


PATIENCE = 2
"""For how many seconds a broker waits for an answer: a consumer that stands still for one of them loses nothing."""


def _counted(extend: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """The verb of a consumer, sync or async, with a count of its calls."""

    def counted(raw: Any) -> Any:
        calls.append(1)
        return extend(raw)

    return counted


@pytest.fixture(params=["nats", "redis", "sqs"])
async def impatient(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    """A broker that delivers a message again after a time without an answer."""
    made: Broker
    if request.param == "nats":
        server: NatsServer = request.getfixturevalue("nats_server")
        made = LimitedNats(server.url)
        made.ack_wait = PATIENCE
    elif request.param == "redis":
        redis: RedisServer = request.getfixturevalue("redis_server")
        made = RedisStream(redis.url)
    else:
        moto: MotoServer = request.getfixturevalue("moto_server")
        made = Sqs(moto.endpoint)
    await made.connect()
    if isinstance(made, Sqs):
        made.client.set_queue_attributes(QueueUrl=made.url, Attributes={"VisibilityTimeout": str(PATIENCE)})
    yield made
    await made.close()


async def test_message_is_not_delivered_again_while_its_slow_handler_runs(impatient: Broker, once: OnceKey) -> None:
    """Each of these deliveries would count. The handler takes longer than the broker waits for an answer: it ends when
    the consumer has extended that time often enough, which it does three times in each."""
    runs: list[bytes] = []
    extended: list[int] = []

    async def handler(raw: Any) -> None:
        runs.append(impatient.body(raw))
        before = len(extended)
        await until(lambda: len(extended) >= before + 4, 60)
        if len(runs) == 1:
            raise RuntimeError("1")

    settings: dict[str, Any] = {"idle": timedelta(seconds=PATIENCE)} if isinstance(impatient, RedisStream) else {}
    await impatient.publish("m-1", b"body")
    async with AsyncExitStack() as stack:
        for _ in range(1 if impatient.runs_beside else 2):  # so that one is free for a second delivery
            consumer = await stack.enter_async_context(impatient.consuming(once, handler, policy=QUICK, **settings))
            consumer.extend = _counted(consumer.extend, extended)
        await until(lambda: Situation.HANDLED in impatient.situations, 60)
    assert impatient.situations == [Situation.FAILED, Situation.HANDLED]
    assert len(runs) == 2
    if isinstance(impatient, Nats):
        delivered = (await impatient.js.consumer_info(impatient.name, "billing")).delivered
        assert delivered is not None
        assert delivered.consumer_seq == 2
