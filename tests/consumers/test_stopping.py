"""What stops a consumer: a signal of its process. An exception by which a handler would end the process does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.consumers import Situation, signals
from oncekey.core.states import State
from oncekey.testing.servers import MotoServer, RedisServer
from tests.consumers.brokers import Broker, RedisStream, Sqs
from tests.consumers.test_adapters import QUICK, until

FAILED, EXHAUSTED, HANDLED = Situation.FAILED, Situation.EXHAUSTED, Situation.HANDLED
pytestmark = [pytest.mark.consumers, pytest.mark.timeout(120)]


def exits() -> None:
    sys.exit(1)


def interrupts() -> None:
    raise KeyboardInterrupt


def cancels() -> None:
    raise asyncio.CancelledError


async def two_attempts(broker: Broker, once: OnceKey, end: Callable[[], None]) -> None:
    """A message whose handler calls ``end`` is a dead letter after two attempts, and its neighbour is not cut off."""
    attempts, neighbours = [], []

    async def handler(raw: Any) -> None:
        if broker.body(raw) == b"good":
            neighbours.append("begun")
            while len(broker.outcomes) < 2 and broker.runs_beside:
                await asyncio.sleep(0.01)
            neighbours.append("ended")
            return
        attempts.append(raw)
        end()

    await broker.publish("good", b"good")
    await broker.publish("bad", b"bad")
    async with broker.consuming(once, handler, policy=QUICK, max_attempts=2):
        await until(lambda: len(broker.outcomes) == 3)
    assert sorted(broker.situations) == sorted([FAILED, EXHAUSTED, HANDLED])
    assert (len(attempts), neighbours) == (2, ["begun", "ended"])
    (copy,) = await broker.copies()
    assert copy.headers["oncekey-reason"].startswith("exhausted: the handler raised ")


@pytest.fixture
def once(tmp_path: Path) -> Any:
    with OnceKey(f"sqlite:///{tmp_path / 'keys.db'}", scope=SINGLE_TENANT) as made:
        yield made


@pytest.mark.parametrize("end", [exits, interrupts, cancels])
async def test_handler_that_would_end_its_process_has_failed(
    redis_server: RedisServer, once: OnceKey, end: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "may_be_a_signal", lambda error: False)  # as a signal handler of ours is set
    broker = RedisStream(redis_server.url)
    await broker.connect()
    await two_attempts(broker, once, end)
    await broker.close()


@pytest.mark.parametrize("end", [exits, interrupts])
async def test_blocking_handler_that_would_end_its_process_has_failed(
    moto_server: MotoServer, once: OnceKey, end: Callable[[], None]
) -> None:
    """Its consumer runs in a thread, where Python raises no KeyboardInterrupt because of a signal."""
    broker = Sqs(moto_server.endpoint)
    await broker.connect()
    await two_attempts(broker, once, end)
    await broker.close()


AS_STARTED_BY_HAND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""A shell lets the processes that it starts in the background ignore SIGINT, and so do their children."""

REDIS = """
import asyncio, sys
import redis.asyncio
from oncekey import SINGLE_TENANT, OnceKey
from oncekey.consumers.redis_streams import RedisStreamConsumer

once = OnceKey(sys.argv[1], scope=SINGLE_TENANT)

async def charge(entry):
    print("entered", flush=True)
    await asyncio.sleep(1.0)
    print("charged", flush=True)

async def main():
    async with redis.asyncio.Redis.from_url(sys.argv[2]) as client:
        makers = [RedisStreamConsumer(once, client, sys.argv[3], group, charge, dead_letter="dead") for group in "ab"]
        await asyncio.gather(*(each.run() for each in makers))
    print("closed", flush=True)

asyncio.run(main())
"""

SQS = """
import sys, time
import boto3
from oncekey import SINGLE_TENANT, OnceKey
from oncekey.consumers.sqs import SqsConsumer

once = OnceKey(sys.argv[1], scope=SINGLE_TENANT)

def charge(message):
    print("entered", flush=True)
    time.sleep(1.0)
    print("charged", flush=True)

client = boto3.client("sqs", endpoint_url=sys.argv[2], region_name="eu-central-1")
SqsConsumer(once, client, sys.argv[3], charge, dead_letter=sys.argv[3], wait=1).run()
print("closed", flush=True)
"""


async def stopped_by(number: signal.Signals, script: str, *arguments: str, handlers: int) -> str:
    """Send the signal while the handlers run; return what the process printed after."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AS_STARTED_BY_HAND + script, *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ},
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        for _ in range(handlers):
            assert await process.stdout.readline() == b"entered\n"
        process.send_signal(number)
        rest = await process.stdout.read()
        code = await process.wait()
    assert code == 0, rest
    return rest.decode()


async def test_sigterm_lets_the_handlers_of_all_consumers_end(redis_server: RedisServer, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'keys.db'}"
    broker = RedisStream(redis_server.url)
    await broker.connect()
    await broker.publish("m-1", b"body")
    rest = await stopped_by(signal.SIGTERM, REDIS, store, redis_server.url, broker.name, handlers=2)
    assert rest == "charged\ncharged\nclosed\n"
    await broker.close()
    with OnceKey(store, scope=SINGLE_TENANT) as once:
        assert [each.state for each in once.store.listing()] == [State.COMPLETED] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_lets_the_blocking_handler_end(
    moto_server: MotoServer, tmp_path: Path, number: signal.Signals
) -> None:
    store = f"sqlite:///{tmp_path / 'keys.db'}"
    broker = Sqs(moto_server.endpoint)
    await broker.connect()
    await broker.publish("m-1", b"body")
    rest = await stopped_by(number, SQS, store, moto_server.endpoint, broker.url, handlers=1)
    assert rest == "charged\nclosed\n"
    with OnceKey(store, scope=SINGLE_TENANT) as once:
        assert [each.state for each in once.store.listing()] == [State.COMPLETED]


UNIT = """
import signal, os
from oncekey.consumers import signals

calls = []
with signals.stopping(lambda: calls.append("a")), signals.stopping(lambda: calls.append("b")):
    assert not signals.may_be_a_signal(KeyboardInterrupt())
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["a", "b"], calls
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second signal ends the process"
    assert signals.may_be_a_signal(KeyboardInterrupt())
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

def of_the_app(number, frame):
    calls.append("app")

signal.signal(signal.SIGTERM, of_the_app)
with signals.stopping(lambda: calls.append("c")):
    os.kill(os.getpid(), signal.SIGTERM)
assert calls == ["a", "b", "app"], calls
assert signal.getsignal(signal.SIGTERM) is of_the_app
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_handler_of_the_app_is_left_alone_and_a_second_signal_is_the_systems() -> None:
    subprocess.run([sys.executable, "-c", AS_STARTED_BY_HAND + UNIT], check=True, timeout=60)
