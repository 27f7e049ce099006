"""Load on the demo while a real Prometheus fetches its metrics: the twelve counters are what the client provoked."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey.stores.registry import open_store
from oncekey.telemetry import monitoring
from oncekey.telemetry.instruments import USUAL, counter_name
from oncekey.telemetry.prometheus import metric_name
from oncekey.testing.servers import HOST, PrometheusServer
from tests.demo.process import Demo
from tests.telemetry.dashboards import expressions

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(240)]

NAMES = {kind.__name__: f"{metric_name(counter_name(kind))}_total" for kind in USUAL}
TTL_SECONDS = 4


class Client:
    """Counts by the answers which event each of its requests must have had."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo
        self.seen: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()

    def pay(self, key: str, cents: int = 1200, *, simulate: str | None = None) -> httpx.Response | None:
        try:
            answer = self.demo.pay(key, cents, simulate=simulate)
        except httpx.TransportError:  # the app was killed after it had begun
            answer = None
        self.seen[self._event(key, answer)] += 1
        return answer

    def _event(self, key: str, answer: httpx.Response | None) -> str:
        problem = "" if answer is None or answer.status_code < 400 else answer.json().get("type", "")
        if answer is not None and answer.headers.get("idempotency-replayed"):
            return "Replayed"
        if answer is not None and answer.status_code == 422:
            return "Misused"
        if answer is not None and answer.status_code == 409 and "in-flight" in problem:
            return "FoundInFlight"
        if answer is not None and answer.status_code == 409 and self.attempts[key]:
            return "FoundUnknown"  # the first request of its key gets the same answer when its own outcome is unknown
        if answer is not None and answer.status_code == 503:
            return "StoreFailed"
        self.attempts[key] += 1
        return "Reserved" if self.attempts[key] == 1 else "Retried"

    def record(self, key: str) -> Any:
        with closing(open_store(self.demo.store)) as store:
            [record] = store.read([("tenant-a", key)])
            store.disconnect()
        return record

    def until(self, key: str, state: str) -> Any:
        return self.demo.until(lambda: (found := self.record(key)) and found.state == state and found, f"not {state}")

    def settles(self, key: str) -> None:
        """Wait until the reconciler has settled the key, and count its tries. They are seconds apart, so that none is
        missed."""
        tries = [0]

        def settled() -> bool:
            record = self.record(key)
            tries.append(record.reconcile_tries)
            return record.state == "failed_retryable"

        self.demo.until(settled, "not settled")
        self.seen["ReconcileResolved"] += 1
        self.seen["ReconcileFailed"] += max(tries)
        self.seen["ReconcileScheduled"] += 1 + max(tries)  # when it became unknown, and after each failed try


def provoke(client: Client) -> None:
    """Every one of the twelve but the last, several times."""
    demo = client.demo
    # new keys, replays, misuse
    for number in range(20):
        client.pay(f"ordinary-key-{number}")
        for _ in range(number % 4):
            client.pay(f"ordinary-key-{number}")
    for number in range(7):
        client.pay("ordinary-key-3", 5000 + number)
    # in flight: the first of these requests runs, the others find it running
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: client.pay("slow-key-0000", simulate="slow"), range(6)))
    # an error of the handler, which may be retried
    for _ in range(4):
        client.pay("error-key-0000", simulate="error")
    # unknown outcomes, and retries that find them
    for number in range(3):
        client.pay(f"timeout-key-{number}", simulate="timeout")
        for _ in range(number + 1):
            client.pay(f"timeout-key-{number}", simulate="timeout")
    for number in range(3):
        client.settles(f"timeout-key-{number}")
    # a killed process: its lease runs out; the provider does not answer the reconciler for a while
    os.kill(provider := demo.process_of("provider"), signal.SIGCONT)
    before = demo.process_of("app")
    client.pay("crash-key-0000", simulate="crash")
    os.kill(provider, signal.SIGSTOP)
    demo.until(lambda: demo.process_of("app") != before, "the app was not started again")
    demo.wait_until_up()
    client.seen["ZombieFound"] += 1
    client.until("crash-key-0000", "unknown")
    demo.until(lambda: client.record("crash-key-0000").reconcile_tries >= 1, "the provider was not asked")
    os.kill(provider, signal.SIGCONT)
    client.settles("crash-key-0000")
    client.pay("crash-key-0000", simulate="crash")  # it resumes
    # a store that another process has locked
    with closing(sqlite3.connect(demo.store.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for number in range(3):
            client.pay(f"locked-key-{number}")
        other.execute("ROLLBACK")
    client.pay("after-the-lock")


@contextmanager
def watched_demo(folder: Path, *options: str) -> Iterator[tuple[Client, PrometheusServer]]:
    """The demo, and a Prometheus that fetches its metrics every second and evaluates our rules."""
    rules = folder / "oncekey.rules.yml"
    rules.write_text(monitoring.rules())
    with (
        Demo(f"sqlite:///{folder / 'demo.db'}", folder, "--metrics", *options) as demo,
        PrometheusServer([f"{HOST}:{demo.port}"], rules=[rules]) as prometheus,
    ):
        yield Client(demo), prometheus


def compare(client: Client, prometheus: PrometheusServer) -> None:
    """The page and Prometheus have exactly what the client provoked."""
    expected = {name: float(client.seen[kind]) for kind, name in NAMES.items()}
    page = client.demo.http.get("/metrics/").text
    assert {name: total(page, name) for name in expected} == expected
    client.demo.until(
        lambda: {name: prometheus.number(f"sum({name})") for name in expected} == expected,
        "Prometheus has other numbers than the page",
    )


def test_counters_in_prometheus_are_what_the_client_provoked(tmp_path: Path) -> None:
    with watched_demo(tmp_path, "--no-provider-honours") as (client, prometheus):
        provoke(client)
        assert {kind for kind in NAMES if not client.seen[kind]} == {"Pruned"}
        compare(client, prometheus)
        running = "sum(api_idempotency_handler_running)"
        client.demo.until(lambda: prometheus.number(running) == 0, "a handler of the killed process counts still")
        assert prometheus.number("max(api_idempotency_store_up)") == 1
        for expression in expressions():
            prometheus.query(expression)  # raises if Prometheus cannot read it


def test_expired_keys_are_counted_when_they_are_deleted(tmp_path: Path) -> None:
    with watched_demo(tmp_path, "--ttl", str(TTL_SECONDS)) as (client, prometheus):
        keys = [f"short-lived-{number}" for number in range(9)]
        for key in keys:
            client.pay(key)
        client.demo.until(lambda: not any(client.record(key) for key in keys), "keys were not deleted")
        client.seen["Pruned"] = len(keys)
        compare(client, prometheus)


def test_metrics_of_the_demo_have_the_jobs_of_its_worker(tmp_path: Path) -> None:
    """App and worker are two processes, and the app's page shows both."""
    with Demo(f"sqlite:///{tmp_path / 'demo.db'}", tmp_path, "--metrics", "--background") as demo:
        for number in range(5):
            assert demo.pay(f"deferred-key-{number}").status_code == 202
        done = "api_idempotency_outbox_done_total"
        demo.until(lambda: total(demo.http.get("/metrics/").text, done) == 5, "the page has not the worker's jobs")
        assert total(demo.http.get("/metrics/").text, "api_idempotency_reserve_created_total") == 5


def total(page: str, name: str) -> float:
    """The sum of a counter over its labels."""
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
