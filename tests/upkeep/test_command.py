"""``oncekey upkeep`` as a user meets it: a process of its own, its output, its signals and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from oncekey.core.states import Actor, Effects, Event, State
from oncekey.stores.sqlite import SqliteStore
from tests.cli.key_table import runner
from tests.upkeep.key_store import KeyStore

APP = """
from oncekey import SINGLE_TENANT, Confirmed, OnceKey

once = OnceKey({url!r}, scope=SINGLE_TENANT)


@once.resolver("POST /payments")
async def ask(inquiry):
    return Confirmed(201, {{"found": inquiry.downstream_key("charge")}})
"""


def _real(shop: KeyStore) -> KeyStore:
    """On SQLite the command reads the host's clock, and so must the test."""
    if isinstance(shop.store, SqliteStore):
        shop.clock.now = time.time()
    return shop


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "oncekey", "upkeep", *arguments]


def _run(*arguments: str, cwd: Path | None = None, store: str = "") -> tuple[int, str, str]:
    environment = os.environ | {"ONCEKEY_STORE": store}
    done = subprocess.run(
        _command(*arguments), capture_output=True, text=True, cwd=cwd, env=environment, timeout=50, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_running_command_with_log_format_json_writes_only_json_lines(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    with closing(SqliteStore(tmp_path / "keys.db")) as store:
        store.check()
    command = _command("--store", url, "--log-format", "json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=50)
    assert [json.loads(line)["message"] for line in (first + rest).splitlines()] == ["oncekey upkeep: running"]
    assert process.returncode == 0


def test_upkeep_once_with_json_prints_one_document(shop: KeyStore) -> None:
    """A dry run counts and changes nothing; then it is done, and both are one document."""
    rows = _real(shop)
    keys = rows.reserved(2, lease=0.001) + rows.reserved(1, effects=Effects.REPEATABLE, lease=0.001)
    keys += rows.finished(3, retention=0.001)
    rows.age(1)
    if rows.kind == "sqlite":
        time.sleep(max(0.0, rows.clock.now - time.time()))
    code, out, _ = _run("--once", "--dry-run", "--json", "--store", rows.url)
    said = json.loads(out)
    assert (code, said["dry_run"]) == (0, True)
    assert said["done"]["sweep"] == {"released": 1, "doubted": 2}
    assert (said["done"]["reap"]["deleted"], "reconcile" in said["done"]) == (3, False)
    assert said["health"]["keys"]["in_progress"] == 3
    assert rows.states(keys) == [State.IN_PROGRESS] * 3 + [State.COMPLETED] * 3
    code, out, error = _run("--once", "--json", store=rows.url)
    said = json.loads(out)
    assert (code, said["done"]["sweep"], said["done"]["reap"]["deleted"]) == (0, {"released": 1, "doubted": 2}, 3)
    assert said["health"]["keys"]["unknown"] == 2
    assert set(said["health"]["duties"]) == {"sweep", "reap", "report"}
    assert error.count("ZombieFound") == 3, "every reset is a line in the log"
    assert keys[0].key not in error


def test_with_the_app_resolvers_are_asked(shop: KeyStore, tmp_path: Path) -> None:
    rows = _real(shop)
    (record,) = rows.unknown()
    (tmp_path / "shopapp.py").write_text(APP.format(url=rows.url))
    code, out, error = _run("shopapp:once", "--once", cwd=tmp_path)
    assert (code, error) == (0, "")
    assert "reconcile: were 1 due, 1 confirmed, 0 refuted, 0 happened, 0 not happened, 0 postponed, 0 dead" in out
    found = rows.get(record)
    assert found.response is not None
    assert (found.state, found.response.status) == (State.COMPLETED, 201)


RESUMING = """
from oncekey import SINGLE_TENANT, OnceKey, Policy

once = OnceKey({url!r}, scope=SINGLE_TENANT, routes={{"POST /payments": Policy(effects="phased")}})


@once.resume("POST /payments")
async def go_on(op):
    return 201, {{"ride": op.result("ride")}}
"""


def test_with_the_app_half_done_requests_go_on(shop: KeyStore, tmp_path: Path) -> None:
    """The route's policy comes from the app, and what was done is printed."""
    rows = _real(shop)
    (record,) = rows.half_done()
    rows.moved([record], Event.POSTPONE, Actor.OPERATOR, reconcile_in=0.0)
    (tmp_path / "ridesapp.py").write_text(RESUMING.format(url=rows.url))
    code, out, error = _run("ridesapp:once", "--once", cwd=tmp_path)
    assert (code, error) == (0, "")
    assert "resume: were 1 due, 1 completed, 0 failed, 0 deferred, 0 retryable, 0 unknown, 0 dead, 0 left" in out
    found = rows.get(record)
    assert found.response is not None
    assert (found.state, found.response.body) == (State.COMPLETED, b'{"ride":{"id":7}}')


def test_upkeep_runs_until_sigterm(shop: KeyStore) -> None:
    """It sweeps by itself; SIGTERM ends it quickly and cleanly, with the health as its last word."""
    rows = _real(shop)
    (record,) = rows.reserved(effects=Effects.REPEATABLE, lease=0.001)
    running = subprocess.Popen(
        _command("--store", rows.url, "--sweep-every", "0.05", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 40
        while rows.get(record).state is not State.FAILED_RETRYABLE:
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.05)  # another process: nothing here can be waited at
        running.send_signal(signal.SIGTERM)
        out, _ = running.communicate(timeout=10)
    finally:
        running.kill()
    said = json.loads(out)
    assert running.returncode == 0
    assert said["health"]["ok"] is True
    assert said["health"]["duties"]["sweep"]["succeeded_seconds_ago"] is not None


def test_upkeep_errors_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], postgres_url: str
) -> None:
    """No store, no tables, no such module: exit code 1, no traceback."""
    for arguments, words in (
        (("--once",), "no store is given"),
        (("--once", "--store", postgres_url), "oncekey migrate"),
        (("nowhere:once", "--once"), "there is no module"),
        (("app:once", "--store", "memory://"), "give one of them"),
    ):
        code, out, error = runner("", monkeypatch, capsys)("upkeep", *arguments)
        assert (code, out, error.count("\n")) == (1, "", 1)
        assert words in error


def test_upkeep_without_json_has_a_line_per_duty(shop: KeyStore) -> None:
    """Without --json: a line for each duty, one about the whole, and what to do where something is wrong."""
    rows = _real(shop)
    rows.unknown()
    rows.age(400)
    if rows.kind == "sqlite":
        return  # the host's clock cannot be moved
    code, out, _ = _run("--once", "--soft", "--store", rows.url)
    assert code == 0
    assert out.splitlines()[:2] == [
        "sweep: were 0 released, 0 doubted",
        "reap: were 0 timed out, 0 doubted, 0 expired, 0 deleted, 0 jobs, 0 audit lines",
    ]
    assert "1 unknown, oldest 40" in out
    assert "! an unknown outcome has been due for 40" in out


def test_failed_duty_exits_1_and_the_others_run(postgres_url: str) -> None:
    """The others are done, both are told, and the exit code is 1."""
    rows = KeyStore(postgres_url)
    (record,) = rows.reserved(effects=Effects.REPEATABLE)
    rows.age(100)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("ALTER TABLE idempotency_outbox RENAME COLUMN finished_at TO gone")
    code, out, error = _run("--once", "--json", "--store", postgres_url)
    said = json.loads(out)
    assert (code, said["done"]["sweep"]["released"], said["health"]["ok"]) == (1, 1, False)
    assert "error" in said["done"]["reap"]
    assert "DutyFailed duty=reap" in error
    assert rows.get(record).state is State.FAILED_RETRYABLE
    code, out, _ = _run("--once", "--store", postgres_url)
    assert (code, "reap: failed:" in out) == (1, True)
    rows.close()
