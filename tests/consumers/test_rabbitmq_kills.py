"""A consumer of RabbitMQ is killed while it works: every message has one effect, though each is delivered three times.

``ONCEKEY_CONSUMERS_SCALE=1`` runs 2,000 messages and 20 kills; the default is a tenth of the messages.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import aio_pika
import psycopg
import pytest

from oncekey.testing.servers import RabbitServer

SCALE = float(os.environ.get("ONCEKEY_CONSUMERS_SCALE", "0.1"))
MESSAGES = max(50, round(2_000 * SCALE))
KILLS = max(4, round(20 * SCALE))
PATIENCE_SECONDS = 600.0

pytestmark = [pytest.mark.consumers, pytest.mark.timeout(1_800)]


def start(rabbit: RabbitServer, url: str, name: str) -> subprocess.Popen[bytes]:
    worker = Path(__file__).with_name("killed_worker.py")
    return subprocess.Popen([sys.executable, str(worker), rabbit.url, url, name])


async def test_message_has_one_effect_though_its_consumer_is_killed_again_and_again(
    rabbit_server: RabbitServer, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from oncekey.stores.registry import open_store

    store = open_store(postgres_url)
    store.migrate()
    store.close()
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    name = f"kills-{os.getpid()}-{seed}"
    ids = [f"m-{number}" for number in range(MESSAGES)]
    deliveries = ids * 3
    chance.shuffle(deliveries)

    connection = await aio_pika.connect(rabbit_server.url)
    channel = await connection.channel(publisher_confirms=False)
    for each in (name, f"{name}-dead"):
        await channel.declare_queue(each, durable=True)
    for message_id in deliveries:
        message = aio_pika.Message(message_id.encode(), message_id=message_id)
        await channel.default_exchange.publish(message, routing_key=name)
    confirmed = await connection.channel()
    await confirmed.default_exchange.publish(aio_pika.Message(b"m-0", message_id="m-0"), routing_key=name)
    await connection.close()

    began = time.monotonic()
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("CREATE TABLE effects (id text)")

        def effects() -> int:
            row = db.execute("SELECT count(*) FROM effects").fetchone()
            assert row is not None
            return int(row[0])

        def wait_for(number: int) -> None:
            while effects() < number:
                assert worker.poll() is None, f"the worker ended by itself (seed {seed})"
                assert time.monotonic() - began < PATIENCE_SECONDS, f"{effects()} of {MESSAGES} effects (seed {seed})"
                time.sleep(0.01)

        worker = start(rabbit_server, postgres_url, name)
        for kill in range(KILLS):
            wait_for((kill + 1) * MESSAGES // (KILLS + 2))
            time.sleep(chance.uniform(0, 0.05))
            worker.kill()
            worker.wait()
            worker = start(rabbit_server, postgres_url, name)
        wait_for(MESSAGES)
        while (left := await _ready(rabbit_server, name)) or _in_flight(db):  # the duplicates
            assert worker.poll() is None
            assert time.monotonic() - began < PATIENCE_SECONDS, f"{left} messages are left (seed {seed})"
            time.sleep(0.05)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        took = time.monotonic() - began

        counts: dict[int, int] = dict(
            db.execute("SELECT n, count(*) FROM (SELECT count(*) n FROM effects GROUP BY id) x GROUP BY n")
        )
        again = db.execute("SELECT count(*) FROM idempotency_keys WHERE attempt > 1").fetchone()
    with capsys.disabled():
        print(
            f"\n{MESSAGES} messages, {len(deliveries) + 1} published, {KILLS} kills, {took:.0f} s, "
            f"{again and again[0]} messages ran again after a kill (seed {seed})"
        )
    assert counts == {1: MESSAGES}, f"messages by their number of effects (seed {seed})"
    assert await _ready(rabbit_server, name) == 0
    assert await _ready(rabbit_server, f"{name}-dead") == 0


def _in_flight(db: psycopg.Connection) -> bool:
    row = db.execute("SELECT count(*) FROM idempotency_keys WHERE state <> 'completed'").fetchone()
    return row != (0,)


async def _ready(rabbit: RabbitServer, name: str) -> int:
    """Messages that wait in the queue. Those that a consumer holds count when its channel is closed."""
    connection = await aio_pika.connect(rabbit.url)
    try:
        channel = await connection.channel()
        queue = await channel.declare_queue(name, passive=True)
        return queue.declaration_result.message_count or 0
    finally:
        await connection.close()
