"""docs/consumers.md: its table is the table, and its examples run with the brokers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncekey import OnceKey
from oncekey.consumers import TABLE, Action, BlockingConsumer, Consumer
from oncekey.testing.servers import MotoServer, NatsServer, RabbitServer, RedisServer

PAGE = (Path(__file__).parents[2] / "docs" / "consumers.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_table_of_the_page_is_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)`: (.*) \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE)
    assert rows == [(str(each), row.reason, str(row.park), str(row.keep)) for each, row in TABLE.items()]


def test_parameters_of_a_message_are_those_of_the_page() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (?:`(.*?)`|required) \| .*\|$", PAGE.split("parameter of `once.message`")[1], re.MULTILINE
    )
    taken = list(inspect.signature(OnceKey.message).parameters.values())[1:]
    empty = inspect.Parameter.empty
    assert sorted(rows) == sorted(
        (each.name, "" if each.default is empty else json.dumps(each.default).replace("null", "None")) for each in taken
    )


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names of the page's examples, and what ``print`` was given."""
    monkeypatch.chdir(tmp_path)
    printed: list[tuple[Any, ...]] = []
    names: dict[str, Any] = {"__name__": "page", "print": lambda *words: printed.append(words), "printed": printed}
    for block in BLOCKS:
        exec(block, names)
    yield names
    names["once"].close()


async def test_loop_of_the_page_runs_a_message_once(page: Any) -> None:
    handled = []

    async def handle(body: bytes) -> None:
        handled.append(body)

    actions = [await page["deliver"]("m-1", b"{}", handle) for _ in range(2)]
    assert (actions, handled) == ([Action.ACK, Action.ACK], [b"{}"])
    assert "an earlier delivery was handled" in str(page["printed"][0][0])

    async def fail(body: bytes) -> None:
        raise RuntimeError

    assert await page["deliver"]("m-2", b"{}", fail) is Action.PARK


async def charged(page: Any, run: Any, publish: Callable[[], Any], *, deliveries: int = 2) -> list[Any]:
    """Run an example until the deliveries of a message have ended, which is published twice when its queue exists."""
    loop, ended, finish = asyncio.get_running_loop(), asyncio.Semaphore(0), Consumer._ended

    def told(self: Any, *args: Any) -> None:
        finish(self, *args)
        loop.call_soon_threadsafe(ended.release)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Consumer, "_ended", told)
        task = asyncio.create_task(run)
        async with asyncio.timeout(60):
            published = 0
            while published < 2:
                assert not task.done(), task.exception()
                try:
                    await publish()
                    published += 1
                except Exception:  # the example has not made its queue yet
                    await asyncio.sleep(0.05)
            for _ in range(deliveries):
                await ended.acquire()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    words: list[Any] = page["printed"]
    return words


@pytest.mark.consumers
@pytest.mark.timeout(240)
async def test_example_of_rabbitmq_charges_once(page: Any, rabbit_server: RabbitServer) -> None:
    import aio_pika

    source = BLOCKS[0].replace("amqp://guest:guest@127.0.0.1/", rabbit_server.url)
    exec(source, page)
    connection = await aio_pika.connect_robust(rabbit_server.url)
    channel = await connection.channel(on_return_raises=True)

    async def publish() -> None:
        message = aio_pika.Message(b"5", message_id="order-42")
        await channel.default_exchange.publish(message, routing_key="payments")

    assert await charged(page, page["main"](), publish) == [("charging", b"5")]
    for name in ("payments", "payments.dead"):
        await channel.queue_delete(name)
    await connection.close()


@pytest.mark.consumers
async def test_example_of_nats_charges_once(page: Any, nats_server: NatsServer) -> None:
    import nats

    client = await nats.connect(nats_server.url)
    js = client.jetstream()

    async def publish() -> None:
        await js.publish("payments", b"5", headers={"Nats-Msg-Id": "order-42"})

    page["charge"].__code__ = compile_charge("raw.data").__code__
    # JetStream itself drops the second one, by its id.
    assert await charged(page, page["consume_nats"](nats_server.url), publish, deliveries=1) == [("charging", b"5")]
    await js.delete_stream("payments")
    await client.close()


@pytest.mark.consumers
async def test_example_of_redis_streams_charges_once(page: Any, redis_server: RedisServer) -> None:
    import redis.asyncio

    page["charge"].__code__ = compile_charge("raw['amount']").__code__
    client = redis.asyncio.Redis.from_url(redis_server.url)

    async def publish() -> None:
        await client.xadd("payments", {"message-id": "order-42", "amount": "5"})

    assert await charged(page, page["consume_redis"](redis_server.url), publish) == [("charging", b"5")]
    await client.delete("payments", "payments:dead")
    await client.aclose()


@pytest.mark.consumers
async def test_copies_of_nats_are_moved_back_as_the_same_message(page: Any, nats_server: NatsServer) -> None:
    import nats

    client = await nats.connect(nats_server.url)
    js = client.jetstream()
    await js.add_stream(name="moving", subjects=["moving", "moving.dead"])
    headers = {"Nats-Msg-Id": "oncekey:moving:1", "oncekey-message-id": "order-42"}
    await js.publish("moving.dead", b"5", headers=headers)
    await page["move_back_nats"](js, "moving.dead", "moving", count=1)
    (moved,) = await (await js.pull_subscribe("moving", durable="billing")).fetch(1, timeout=5)
    assert (moved.data, moved.headers) == (b"5", {"oncekey-message-id": "order-42"})
    assert (await js.consumer_info("moving", "moving-back")).num_pending == 0
    await js.delete_stream("moving")
    await client.close()


@pytest.mark.consumers
async def test_copies_of_redis_streams_are_moved_back_as_the_same_message(page: Any, redis_server: RedisServer) -> None:
    import redis.asyncio

    client: Any = redis.asyncio.Redis.from_url(redis_server.url)
    fields = {b"oncekey-message-id": b"order-42", b"amount": b"5"}
    await client.xadd("moving:dead", fields)
    await page["move_back_redis"](client, "moving:dead", "moving")
    assert [found for _, found in await client.xrange("moving")] == [fields]
    assert await client.xlen("moving:dead") == 0
    await client.delete("moving", "moving:dead")
    await client.aclose()


@pytest.mark.consumers
async def test_quorum_queue_of_the_page_gives_its_dead_letters_to_the_same_queue(
    page: Any, rabbit_server: RabbitServer
) -> None:
    """A message that kills its consumer every time: here, one whose channel is closed."""
    import aio_pika

    async with await aio_pika.connect(rabbit_server.url) as connection:
        channel = await connection.channel()
        dead = await channel.declare_queue("payments.dead", durable=True)
        arguments = {**page["QUORUM"], "x-delivery-limit": 1}
        queue = await channel.declare_queue("quorum-payments", durable=True, arguments=arguments)
        message = aio_pika.Message(b"5", message_id="order-42")
        await channel.default_exchange.publish(message, routing_key="quorum-payments")
        for _ in range(2):
            async with connection.channel() as dying:
                got = await (await dying.get_queue("quorum-payments")).get(timeout=10)
                assert got is not None
                await got.nack(requeue=True)
        async with asyncio.timeout(30):
            while (letter := await dead.get(fail=False)) is None:
                await asyncio.sleep(0.05)
        assert letter.message_id == "order-42"
        await letter.ack()
        for each in (queue, dead):
            await each.delete(if_unused=False, if_empty=False)


def compile_charge(expression: str) -> Any:
    """The page's handler, for a library whose message has no ``body``."""
    names: dict[str, Any] = {}
    exec(f"async def charge(raw):\n    print('charging', {expression})\n", names)
    return names["charge"]


async def blocking(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a blocking example in a thread, and stop it when this is cancelled."""
    made: list[Any] = []
    init = BlockingConsumer.__init__

    def record(self: Any, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        made.append(self)

    monkeypatch.setattr(BlockingConsumer, "__init__", record)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        await asyncio.Event().wait()
    finally:
        made[0].stop()
        await asyncio.to_thread(thread.join)


@pytest.mark.consumers
async def test_example_of_sqs_charges_once(page: Any, moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    settings = {"endpoint_url": moto_server.endpoint, "region_name": "eu-central-1"}
    client: Any = boto3.client("sqs", **settings)  # type: ignore[call-overload]
    url, dead = (client.create_queue(QueueName=name)["QueueUrl"] for name in ("payments", "payments-dead"))

    async def publish() -> None:
        attributes = {"message-id": {"DataType": "String", "StringValue": "order-42"}}
        client.send_message(QueueUrl=url, MessageBody="5", MessageAttributes=attributes)

    run = blocking(lambda: page["consume_sqs"](url, dead, **settings), monkeypatch)
    assert await charged(page, run, publish) == [("charging", "5")]


@pytest.mark.consumers
@pytest.mark.parametrize("library", ["kafka", "confluent"])
async def test_example_of_kafka_charges_once(page: Any, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from confluent_kafka import Producer

    cluster = Producer({"bootstrap.servers": "mock:1", "test.mock.num.brokers": 1, "log_level": 0})
    broker = next(iter(cluster.list_topics(timeout=20).brokers.values()))
    servers = f"{broker.host}:{broker.port}"

    async def publish() -> None:
        cluster.produce("payments", b"5", headers={"message-id": "order-42"})
        await asyncio.to_thread(cluster.flush, 10)

    await publish()
    if library == "kafka":
        page["charge"].__code__ = compile_charge("raw.value").__code__
        run = page["consume_kafka"](servers)
    else:
        run = blocking(lambda: page["consume_confluent"](servers), monkeypatch)
    assert await charged(page, run, publish) == [("charging", b"5")]


@pytest.mark.consumers
@pytest.mark.timeout(240)
async def test_example_file_takes_each_payment_once(rabbit_server: RabbitServer, postgres_url: str) -> None:
    """``examples/rabbitmq_payments.py``, as its first line says."""
    import aio_pika
    import psycopg

    example = Path(__file__).parents[2] / "examples" / "rabbitmq_payments.py"
    environ = os.environ | {"ONCEKEY_STORE": postgres_url, "PAYMENTS_BROKER": rabbit_server.url}
    process = subprocess.Popen([sys.executable, str(example)], env=environ)
    connection = await aio_pika.connect(rabbit_server.url)
    channel = await connection.channel()
    queue, dead = [await channel.declare_queue(name, durable=True) for name in ("payments", "payments.dead")]
    for message_id, cents in [("p-1", 500), ("p-2", 700), ("p-1", 500), ("p-3", 0)]:
        message = aio_pika.Message(json.dumps({"cents": cents}).encode(), message_id=message_id)
        await channel.default_exchange.publish(message, routing_key="payments")
    async with asyncio.timeout(120):
        while (letter := await dead.get(fail=False)) is None:
            assert process.poll() is None
            await asyncio.sleep(0.1)
        while (await queue.declare()).message_count:
            await asyncio.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 60) == 0
    assert letter.message_id == "p-3"
    with psycopg.connect(postgres_url) as db:
        assert db.execute("SELECT * FROM payments ORDER BY 1").fetchall() == [("p-1", 500), ("p-2", 700)]
    for name in ("payments", "payments.dead"):
        await channel.queue_delete(name)
    await connection.close()
