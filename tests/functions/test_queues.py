"""Tasks of Dramatiq, RQ and arq, with their own workers; and a handler of AWS Lambda."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, InProgress, OnceKey, OutcomeUnknown, current
from oncekey.core.routes import Route
from oncekey.core.states import State
from oncekey.errors import ConfigurationError
from oncekey.functions.attempt import Attempt

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


# -- Dramatiq --------------------------------------------------------------------------------------------------


@pytest.fixture
def broker() -> Iterator[Any]:
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    made = StubBroker()
    made.emit_after("process_boot")
    dramatiq.set_broker(made)
    yield made
    made.flush_all()
    made.close()


def test_dramatiq_actor_runs_once_and_is_retried_with_its_key(once: OnceKey, broker: Any) -> None:
    import dramatiq

    charged: list[str] = []
    results: list[Any] = []
    refused = threading.Event()

    @dramatiq.actor(max_retries=50, min_backoff=1, max_backoff=5)  # a retry for InProgress
    @once.function("charge", key="order")
    def charge(order: str, cents: int) -> None:
        charged.append(order)

    @dramatiq.actor(max_retries=5, min_backoff=1, max_backoff=5)
    @once.function("stumble", key="order", effects="repeatable")
    def stumble(order: str) -> None:
        charged.append(order)
        if current().attempt < 3:
            raise TimeoutError
        results.append(current().attempt)

    @dramatiq.actor(max_retries=50, min_backoff=10, max_backoff=50)
    def guarded(order: str) -> None:
        try:
            results.append(slow(order))
        except InProgress:
            refused.set()
            raise

    @once.function("slow", key="order")
    def slow(order: str) -> str:
        charged.append(order)
        return "ran"

    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=4)
    worker.start()
    try:
        for _ in range(3):
            charge.send("a", 5)
        stumble.send("b")
        broker.join("default", timeout=30_000)
        worker.join()
        assert (sorted(charged), results) == (["a", "b", "b", "b"], [3])

        with _other_process_has(once, "slow", "c") as attempt:
            guarded.send("c")
            assert refused.wait(30)
            attempt.keep(b'"by the other"')
        broker.join("default", timeout=30_000)
        worker.join()
        assert results == [3, "by the other"]
    finally:
        worker.stop()
    assert "c" not in charged


def _other_process_has(once: OnceKey, name: str, key: str) -> Attempt:
    """Of a function whose only argument is the key."""
    return Attempt(once, Route(name, once.policy_of(name)), tenant="single-tenant", key=key, body=b"{}")


def test_dramatiq_decorator_below_is_refused(once: OnceKey, broker: Any) -> None:
    import dramatiq

    with pytest.raises(ConfigurationError, match="the queue's decorator above it"):

        @once.function("charge", key="order")
        @dramatiq.actor
        def charge(order: str) -> None: ...


async def test_dramatiq_async_actor_runs_once(once: OnceKey, broker: Any) -> None:
    """AsyncIO of Dramatiq has one event loop in a thread of its own."""
    import dramatiq
    from dramatiq.middleware.asyncio import AsyncIO

    broker.add_middleware(AsyncIO())
    charged: list[str] = []

    @dramatiq.actor
    @once.function("charge", key="order", in_flight="wait", wait=timedelta(seconds=20))
    async def charge(order: str) -> None:
        await asyncio.sleep(0.01)
        charged.append(order)

    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=4)
    worker.start()
    try:
        for _ in range(4):
            charge.send("a")
        await asyncio.to_thread(broker.join, "default", timeout=30_000)
        await asyncio.to_thread(worker.join)
    finally:
        worker.stop()
    assert charged == ["a"]


# -- RQ --------------------------------------------------------------------------------------------------------


def test_rq_job_runs_once_in_forked_processes(redis_url: str, tmp_path: Path) -> None:
    """RQ forks a process for every job, so each has the OnceKey of its parent."""
    import redis
    import rq

    ledger, store = tmp_path / "ledger", f"sqlite:///{tmp_path / 'keys.db'}"
    ledger.touch()
    connection = redis.Redis.from_url(redis_url)
    queue, tasks = rq.Queue(connection=connection), "tests.functions.queue_tasks"
    first, second = (queue.enqueue(f"{tasks}.charge", "a", cents=5) for _ in range(2))
    stumbling = queue.enqueue(f"{tasks}.stumble", "b", retry=rq.Retry(max=3))
    dying = queue.enqueue(f"{tasks}.die", "c")
    environ = os.environ | {"ONCEKEY_STORE": store, "LEDGER": str(ledger)}
    command = [sys.executable, "-m", "rq.cli", "worker", "--burst", "--url", redis_url]
    subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=100, capture_output=True)
    assert first.return_value() == second.return_value() == {"number": 1}
    assert stumbling.return_value() == 3
    assert sorted(ledger.read_text().split()) == ["a", "b", "b", "b", "c"]
    assert dying.is_failed
    with OnceKey(store, scope=SINGLE_TENANT) as once:
        record = once.store.read([(once.key_scope("single-tenant", "die"), "c")])[0]
        assert record is not None
        assert record.state is State.IN_PROGRESS  # its lease runs out; then it is unknown, and not run again
    connection.close()


def test_rq_decorator_below_is_refused(once: OnceKey, redis_url: str) -> None:
    import redis
    from rq.decorators import job

    connection = redis.Redis.from_url(redis_url)

    def charge(order: str) -> None: ...

    task = job("default", connection=connection)(charge)
    with pytest.raises(ConfigurationError, match="the queue's decorator above it"):
        once.function("charge", key="order")(task)
    connection.close()


# -- arq -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_arq_job_runs_once_and_is_retried_with_its_key(once: OnceKey, redis_url: str) -> None:
    """arq wants an older redis than the store, so it is installed only in the cell ``arq`` of ``make matrix``."""
    arq = pytest.importorskip("arq")
    charged: list[str] = []

    @once.function("charge", key="order", effects="repeatable", ignore=["ctx"], in_flight="wait")
    async def charge(ctx: dict[str, Any], order: str) -> int:
        charged.append(order)
        if order == "b" and current().attempt < 2:
            raise arq.Retry
        return len(charged)

    settings = arq.connections.RedisSettings.from_dsn(redis_url)
    pool = await arq.create_pool(settings)
    jobs = [await pool.enqueue_job("charge", order) for order in ("a", "a", "b")]
    task = arq.func(charge, name="charge")
    worker = arq.Worker(functions=[task], redis_settings=settings, burst=True, poll_delay=0.05, handle_signals=False)
    await worker.async_run()
    results = [await job.result(timeout=20) for job in jobs if job is not None]
    await worker.close()
    await pool.aclose()
    assert results[0] == results[1]
    assert sorted(charged) == ["a", "b", "b"]


# -- AWS Lambda ------------------------------------------------------------------------------------------------


def test_lambda_handler_runs_once_for_each_event(once: OnceKey) -> None:
    """An asynchronous invocation is delivered at least once, and tried again after an exception."""
    charged: list[str] = []

    @once.function("handler", key=lambda event: event["detail"]["order"], ignore=["context"])
    def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
        charged.append(event["detail"]["order"])
        if event["detail"]["cents"] < 0:
            raise TimeoutError
        return {"statusCode": 200, "body": json.dumps({"number": len(charged)})}

    def invoked(detail: dict[str, Any]) -> Any:
        event = json.loads(json.dumps({"id": "e-1", "detail": detail}))
        return handler(event, SimpleNamespace(aws_request_id="r", get_remaining_time_in_millis=lambda: 3000))

    answers = [invoked({"order": "a", "cents": 5}) for _ in range(2)]
    assert answers[0] == answers[1] == {"statusCode": 200, "body": '{"number": 1}'}
    with pytest.raises(TimeoutError):
        invoked({"order": "b", "cents": -1})
    with pytest.raises(OutcomeUnknown):
        invoked({"order": "b", "cents": -1})
    assert charged == ["a", "b"]
