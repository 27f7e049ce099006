"""A consumer is killed while it works: every message has one effect, though each is delivered three times and more.

``ONCEKEY_CONSUMERS_SCALE=1`` runs 2,000 messages and 20 kills for each broker; the default is a tenth.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncekey.stores.registry import open_store
from tests.consumers.brokers import Broker, Nats, Rabbit, RedisStream

SCALE = float(os.environ.get("ONCEKEY_CONSUMERS_SCALE", "0.1"))
MESSAGES = max(50, round(2_000 * SCALE))
KILLS = max(4, round(20 * SCALE))
PATIENCE_SECONDS = 600.0

BROKERS: dict[str, Callable[[str], Any]] = {"rabbitmq": Rabbit, "nats": Nats, "redis": RedisStream}
SERVERS = {"rabbitmq": "rabbit_server", "nats": "nats_server", "redis": "redis_server"}

pytestmark = [pytest.mark.consumers, pytest.mark.timeout(1_800)]


@pytest.mark.parametrize("kind", BROKERS)
async def test_message_has_one_effect_though_its_consumer_is_killed_again_and_again(
    kind: str, request: pytest.FixtureRequest, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = request.getfixturevalue(SERVERS[kind])
    store = open_store(postgres_url)
    store.migrate()
    store.close()
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    deliveries = [f"m-{number}" for number in range(MESSAGES)] * 3
    chance.shuffle(deliveries)
    broker: Broker = BROKERS[kind](server.url)
    await broker.connect()
    for message_id in deliveries:
        await broker.publish(message_id, message_id.encode())

    def start() -> subprocess.Popen[bytes]:
        command = [str(Path(__file__).with_name("killed_worker.py")), kind, server.url, postgres_url, broker.name]
        return subprocess.Popen([sys.executable, *command])

    began = time.monotonic()
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("CREATE TABLE effects (id text)")

        def count(sql: str) -> int:
            row: Any = db.execute(sql).fetchone()
            return int(row[0])

        async def until(done: Callable[[], Any]) -> None:
            while not (answer := done()) or (asyncio.iscoroutine(answer) and not await answer):
                assert worker.poll() is None, f"the worker ended by itself (seed {seed})"
                effects = count("SELECT count(*) FROM effects")
                assert time.monotonic() - began < PATIENCE_SECONDS, f"{effects} of {MESSAGES} effects (seed {seed})"
                await asyncio.sleep(0.01)

        async def effects_reach(number: int) -> None:
            await until(lambda: count("SELECT count(*) FROM effects") >= number)

        worker = start()
        for kill in range(KILLS):
            await effects_reach((kill + 1) * MESSAGES // (KILLS + 2))
            await asyncio.sleep(chance.uniform(0, 0.05))
            worker.kill()
            worker.wait()
            worker = start()
        await until(lambda: count("SELECT count(*) FROM idempotency_keys WHERE state = 'completed'") == MESSAGES)

        async def all_answered() -> bool:
            return await broker.left() == 0

        for _ in range(10):
            await until(all_answered)  # the duplicates
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
            if await all_answered():
                break
            worker = start()  # RabbitMQ does not count what the worker had, and gave back at its end
            await asyncio.sleep(2)
        took = time.monotonic() - began
        counts: dict[int, int] = dict(
            db.execute("SELECT n, count(*) FROM (SELECT count(*) n FROM effects GROUP BY id) x GROUP BY n").fetchall()
        )
        again = count("SELECT count(*) FROM idempotency_keys WHERE attempt > 1")
    with capsys.disabled():
        print(
            f"\n{kind}: {MESSAGES} messages, {len(deliveries)} published, {KILLS} kills, {took:.0f} s, {again} "
            f"messages ran again after a kill (seed {seed})"
        )
    assert counts == {1: MESSAGES}, f"messages by their number of effects (seed {seed})"
    assert await broker.left() == 0
    assert not await broker.copies()
    await broker.close()
