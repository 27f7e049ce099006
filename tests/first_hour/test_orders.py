"""The first hour with an existing Flask app, protected route by route, and a worker whose task fails."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.first_hour.newcomer import Terminal


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path, "orders", "sqlite:///orders.db")


@pytest.fixture
def served(terminal: Terminal) -> Iterator[Terminal]:
    (terminal.folder / "serve.py").write_text(
        "import os\nfrom werkzeug.serving import run_simple\nfrom orders import app\n"
        "run_simple('127.0.0.1', int(os.environ['PORT']), app, threaded=True)\n"
    )
    with terminal.server("serve"):
        yield terminal


def orders(terminal: Terminal) -> int:
    with closing(sqlite3.connect(terminal.folder / "orders.db")) as connection:
        (count,) = connection.execute("SELECT count(*) FROM orders").fetchone()
        return int(count)


def test_declared_route_runs_once_and_the_others_need_no_key(served: Terminal) -> None:
    first, second = (served.post("/orders", "order-0001", {"item": "tea"}) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.headers["idempotency-replayed"] == "true"
    assert orders(served) == 1
    assert served.post("/search", None).status_code == 200
    assert served.post("/orders", None, {"item": "tea"}).status_code == 400


def test_session_that_is_closed_in_the_handler_stores_nothing_and_the_log_says_why(served: Terminal) -> None:
    answers = [served.post("/closing", "order-0003", {"item": "tea"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert orders(served) == 0
    assert "keep the session or connection open until the response is sent" in served.log


def test_routes_that_are_not_declared_are_seen(served: Terminal) -> None:
    """In the log, once; in the list; and in CI, where the command fails."""
    for _ in range(2):
        served.post("/search", None)
    (line,) = [line for line in served.log.splitlines() if "have no declaration" in line]
    assert "POST /search" in line
    code, listed = served.oncekey("routes", "orders:app", "--strict")
    assert code == 1
    assert "/search" in listed
    assert "UNPROTECTED" in listed
    assert "orders:order" in listed  # where the other one is declared


def test_failing_task_shows_its_traceback_and_its_next_time(served: Terminal) -> None:
    assert served.post("/orders", "order-0002", {"item": "tea"}).status_code == 201
    log = served.folder / "worker.log"
    with log.open("wb") as file:
        worker = subprocess.Popen(
            [sys.executable, "-m", "oncekey", "worker", "orders:worker", "--log-format", "json", "--log-level", "info"],
            cwd=served.folder,
            env=os.environ | {"ONCEKEY_STORE": served.store},
            stderr=file,
            stdout=file,
        )
    try:
        served.until(lambda: "the mail server refused" in log.read_text(), "the worker says nothing")
    finally:
        worker.terminate()
        worker.wait(30)
    entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (retried, *_) = [entry for entry in entries if entry.get("event") == "JobRetried"]
    assert retried["level"] == "WARNING"
    assert retried["fields"]["attempt"] == 1
    assert 0 <= retried["fields"]["in_seconds"] <= 1  # random, up to the first backoff
    assert "Traceback" in retried["traceback"]
    assert "ConnectionError: the mail server refused the connection" in retried["traceback"]
