"""``oncekey keys show``: all that is known of a key, and what a client would get now, as it then does."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.admin import changes
from oncekey.core.audit import Audit
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.web.asgi import IdempotencyMiddleware
from tests.cli.key_table import RESPONSE, KeyTable, Run, runner

KEY = "order-1-of-today"
Message = MutableMapping[str, Any]


def test_show_has_record_response_steps_jobs_and_history(table: KeyTable, operate: Run) -> None:
    """Record, response, steps, jobs and history; bodies, results and the key only where they are asked for."""
    record = table.step(table.reserve(KEY, effects=Effects.PHASED), "charge")
    doubted = table.move(record, Event.DOUBT, last_error="TimeoutError")
    job_id = table.add("send_receipt", {"to": "ada@example.com"}, of=record)
    table.move(doubted, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE, audit=Audit("ann", "it is paid"))
    code, out, error = operate("keys", "show", KEY, "--scope", "acme")
    assert (code, error) == (0, "")
    for words in ("POST /payments", "completed, attempt 1", "charge", "ch_charge", job_id, "ann", "it is paid"):
        assert words in out
    assert "the same request gets now: 201: the stored response, 28 bytes\n" in out
    told = json.loads(operate("keys", "show", KEY, "--scope", "acme", "--json")[1])
    for secret in (KEY, "4242", "ada@example.com"):
        assert secret not in out + json.dumps(told)
    assert told["record"]["state"] == "completed"
    headers = [["content-type", "application/json"]]
    assert told["response"] == {"status": 201, "headers": headers, "replayable": True, "bytes": 28, "body": None}
    words = "the stored response, 28 bytes"
    assert told["now"] == {"runs": False, "status": 201, "problem": None, "words": words}
    (line,) = told["history"]
    assert (line["who"], line["event"], line["before"], line["after"], line["why"]) == (
        *("ann", "confirm", "unknown", "completed", "it is paid"),
    )
    for revealed in (["--reveal"], ["--reveal", "--json"]):
        out = operate("keys", "show", KEY, "--scope", "acme", *revealed)[1]
        assert KEY in out
        assert out.count("4242") == 2  # the response's and the step's
    assert "ada@example.com" in out


def test_the_jobs_of_a_key(table: KeyTable) -> None:
    """Only its own, oldest first, and not more than are asked for."""
    records = [table.put(f"order-{number}-of-today", State.COMPLETED) for number in range(2)]
    added = [table.add("send_receipt", of=records[number % 2]) for number in range(6)]
    scope, key = records[0].scope, records[0].key
    assert [job.id for job in table.store.jobs_of(scope, key, 10)] == added[::2]
    assert [job.id for job in table.store.jobs_of(scope, key, 2)] == added[:4:2]
    assert table.store.jobs_of("zeta", key, 10) == []


def test_show_changes_nothing(table: KeyTable, operate: Run) -> None:
    """Also where a request would move the key: this one would become unknown."""
    table.put(KEY, State.IN_PROGRESS, age=1000)
    before = table.there(KEY)
    code, out, _ = operate("keys", "show", KEY, "--scope", "acme")
    assert code == 0
    assert "409: The outcome of this Idempotency-Key is not known yet (urn:oncekey:problem:outcome-unknown)" in out
    assert table.there(KEY) == before
    assert table.audit(KEY) == []


def test_a_key_that_is_not_there(table: KeyTable, operate: Run) -> None:
    """One sentence; another tenant's key is not there either, and what was asked for is not repeated."""
    table.put(KEY, State.COMPLETED)
    for key, scope in ((KEY, "zeta"), ("a-key-that-is-absent", "acme")):
        code, out, error = operate("keys", "show", key, "--scope", scope)
        assert (code, out, error.count("\n")) == (1, "", 1)
        assert "there is no key" in error
        assert "give its scope with --scope" in error
        assert key not in error


def test_show_of_a_forgotten_key_has_its_history(table: KeyTable, operate: Run) -> None:
    """The history outlives the key."""
    changes.forget(table.store, table.put(KEY, State.FAILED), Audit("ann", "a wrong answer"))
    code, out, _ = operate("keys", "show", KEY, "--scope", "acme")
    assert code == 0
    assert "there is no such key any more" in out
    assert "a wrong answer" in out
    assert "it runs, as a new request: there is no such key" in out
    may_have_cache = not table.is_sqlite
    assert ("an app with cache= may replay the forgotten answer for up to its cache_ttl" in out) == may_have_cache
    told = json.loads(operate("keys", "show", KEY, "--scope", "acme", "--json")[1])
    assert (told["record"], told["response"], told["history"][0]["after"]) == (None, None, None)


# -- what a client would get, against what it gets -----------------------------------------------------------------

MOVES = {
    "completed": "state = 'completed'",
    "expired and not reaped": "expires_at = expires_at - 1e6",
    "a tombstone": "response_body = NULL",
    "failed": "state = 'failed', response_status = 402",
    "in flight": "state = 'in_progress', lease_until = lease_until + 60",
    "in flight, lease over": "state = 'in_progress', lease_until = lease_until - 1e6",
    "in flight, lease over, repeatable": "state = 'in_progress', lease_until = 0, effects = 'repeatable'",
    "pending": "state = 'pending'",
    "retryable": "state = 'failed_retryable', response_status = NULL",
    "unknown": "state = 'unknown'",
    "expired": "state = 'expired'",
    "forgotten": "scope = 'another'",
}


@pytest.fixture
def once(tmp_path: Path, name: str) -> Iterator[OnceKey]:
    """``keys show`` says what the next request gets if the route is declared as it was for the last one."""
    policy = Policy(effects="repeatable" if "repeatable" in name else "external")
    with OnceKey(f"sqlite:///{tmp_path / 'app.db'}", scope=SINGLE_TENANT, policy=policy) as once:
        yield once


@pytest.mark.parametrize("name", MOVES)
async def test_predicted_response_equals_the_real_response(
    name: str,
    once: OnceKey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same request is sent for real, after asking what it would get."""
    url = f"sqlite:///{tmp_path / 'app.db'}"
    calls = 0

    async def pay(scope, receive, send) -> None:
        nonlocal calls
        calls += 1
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"paid"})

    async def ask() -> tuple[int, bytes]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [(b"idempotency-key", KEY.encode())]}
        await app(scope, receive, send)
        return sent[0]["status"], sent[-1]["body"]

    app = IdempotencyMiddleware(pay, once=once)
    assert await ask() == (201, b"paid")
    table = KeyTable(url)
    table.execute(f"UPDATE idempotency_keys SET {MOVES[name]}")
    table.close()
    run = runner(url, monkeypatch, capsys)
    if name == "forgotten":
        assert run("keys", "show", KEY)[0] == 1
        return
    code, out, _ = run("keys", "show", KEY, "--json")
    now = json.loads(out)["now"]
    status, body = await ask()
    assert (code, now["runs"]) == (0, calls == 2)
    if now["runs"]:
        assert (now["status"], status) == (None, 201)
    else:
        assert now["status"] == status
        assert ("not kept" in now["words"]) == (name == "a tombstone")
        problem = json.loads(body).get("type") if body.startswith(b"{") and name != "a tombstone" else None
        assert now["problem"] == problem
