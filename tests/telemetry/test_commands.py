"""``--metrics-port`` of upkeep and worker: a process of its own shows the numbers of the store, duties and jobs."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from flask import Flask

from oncekey import SINGLE_TENANT, OnceKey, OutcomeUnknown, Policy, current
from oncekey.testing.http.stack import until
from oncekey.testing.servers import HOST, free_port
from oncekey.web.flask import protect
from tests.telemetry.pages import number, series

P = "api_idempotency_"
APP = """
from oncekey import SINGLE_TENANT, OnceKey, StillUnknown

once = OnceKey({url!r}, scope=SINGLE_TENANT)


@once.resolver("POST /pay")
def ask(inquiry):
    return StillUnknown("the provider does not know yet")
"""


@contextmanager
def running(*arguments: str, cwd: Path) -> Iterator[httpx.Client]:
    """A client of the metrics page of a running command."""
    port = free_port()
    command = [sys.executable, "-m", "oncekey", *arguments, "--metrics-port", str(port)]
    with subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert f"metrics on http://{HOST}:{port}/metrics\n" in line
        with httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.frameworks)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with three keys whose outcome is unknown."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path / 'k.db'}"
    once = OnceKey(url, scope=SINGLE_TENANT, migrate=True)
    app = Flask("shop")

    def pay() -> str:
        raise OutcomeUnknown("the provider did not answer")

    app.add_url_rule("/pay", "pay", pay, methods=["POST"])
    protect(app, once, upkeep=False)
    for n in range(3):
        app.test_client().post("/pay", json={}, headers={"Idempotency-Key": f"unknown-key-{n}"})
    once.close()
    return url


def test_page_has_the_numbers_of_the_store(url: str, tmp_path: Path) -> None:
    with running("upkeep", "--store", url, cwd=tmp_path) as client:
        page = client.get("/metrics").text
        assert number(page, f"{P}store_up") == 1
        assert number(page, f"{P}keys", state="unknown") == 3
        assert number(page, f"{P}unknown_keys", operation="POST /pay") == 3
        assert number(page, f"{P}unknown_oldest_seconds") > 0
        assert series(page, f"{P}outbox_lag_seconds") == [{}]
        until(lambda: number(client.get("/metrics").text, f"{P}upkeep_done_total", duty="sweep") > 0, "a turn counts")


def test_upkeep_of_an_app_counts_what_its_reconciler_does(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP.format(url=url))
    with running("upkeep", "shop:once", cwd=tmp_path) as client:
        until(lambda: number(client.get("/metrics").text, f"{P}reconcile_failed_total") == 3, "each key is asked for")
        page = client.get("/metrics").text
        assert number(page, f"{P}reconcile_scheduled_total", operation="POST /pay") == 3
        assert number(page, f"{P}keys", state="unknown") == 3


@pytest.mark.frameworks
def test_port_that_is_taken_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    OnceKey(f"sqlite:///{tmp_path / 'k.db'}", scope=SINGLE_TENANT, migrate=True).start()
    store = ("--store", f"sqlite:///{tmp_path / 'k.db'}")
    with running("upkeep", *store, cwd=tmp_path) as client:
        port = str(client.base_url.port)
        command = [sys.executable, "-m", "oncekey", "upkeep", *store, "--metrics-port", port]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode != 0
    assert f"port {port} of {HOST} cannot be opened for metrics" in done.stderr
    assert "Traceback" not in done.stderr


def test_port_without_a_running_upkeep_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oncekey", "upkeep", "--store", "sqlite:///k.db", "--once", "--metrics-port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50, cwd=tmp_path)
    assert done.returncode != 0
    assert "leave out --once" in done.stderr


JOBS = """
from oncekey.outbox import Worker

worker = Worker({url!r}, poll=0.05)


@worker.task()
def send_receipt(context, payload):
    pass
"""


def test_worker_shows_its_jobs(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    (tmp_path / "jobs.py").write_text(JOBS.format(url=f"sqlite:///{path}"))
    db = sqlite3.connect(path, isolation_level=None)
    once = OnceKey(f"sqlite:///{path}", scope=SINGLE_TENANT, policy=Policy(effects="transactional"))
    app = Flask("shop")

    def order() -> str:
        operation = current().blocking
        operation.enlist(db)
        for _ in range(4):
            operation.enqueue("send_receipt", {})
        return "ordered"

    app.add_url_rule("/orders", "order", order, methods=["POST"])
    protect(app, once, upkeep=False)
    assert app.test_client().post("/orders", json={}, headers={"Idempotency-Key": "key-number-one"}).status_code == 200
    once.close()
    db.close()
    with running("worker", "jobs:worker", cwd=tmp_path) as client:
        name, labels = f"{P}outbox_done_total", {"operation": "POST /orders", "task": "send_receipt"}
        until(lambda: number(client.get("/metrics").text, name, **labels) == 4, "four jobs are done")
