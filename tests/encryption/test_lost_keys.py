"""Values that do not open: a key that is not in the ring, a value that was moved, a process without a keyring."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.jobs import JobState
from oncekey.core.sealed import shown
from oncekey.core.states import State
from oncekey.core.steps import StepsOf
from oncekey.encryption import Keyring
from oncekey.encryption.store import sealed
from oncekey.errors import ConfigurationError, StoreError
from oncekey.outbox.worker import Worker
from oncekey.stores.api import Outbox
from oncekey.stores.memory import MemoryStore
from oncekey.stores.sqlite import SqliteStore
from tests.cli.key_table import runner
from tests.encryption.full_run import SCOPE, FullRun, planted
from tests.encryption.rings import ONE, ring

NOT_HERE = "(encrypted with key 1, which this process does not have)"


class Shop:
    """The full run's app over one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[FullRun] = []

    def app(self, keyring: Keyring | None) -> FullRun:
        def connect() -> sqlite3.Connection:
            return sqlite3.connect(self.path, timeout=5.0, check_same_thread=False)

        self.runs.append(FullRun(f"sqlite:///{self.path}", keyring, connect))
        return self.runs[-1]

    def execute(self, statement: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.path)) as own, own:
            return own.execute(statement, values).fetchall()


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    shop = Shop(tmp_path / "keys.db")
    yield shop
    for run in shop.runs:
        await run.close()


# responses


async def test_response_that_was_moved_from_another_row_is_replayed_as_a_tombstone(shop: Shop) -> None:
    app = shop.app(ring(1))
    for key in ("flat-1", "flat-2"):
        assert (await app.post("flat", key)).status_code == 201
    shop.execute(
        "UPDATE idempotency_keys SET response_body = (SELECT response_body FROM idempotency_keys WHERE key = 'flat-1') "
        "WHERE key = 'flat-2'"
    )
    again = await app.post("flat", "flat-2")
    assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
    assert planted("flat-body") not in again.text
    assert "x-secret" not in again.headers
    assert "cannot be read right now" in again.text
    assert (await app.post("flat", "flat-1")).json() == {"secret": planted("flat-body")}


async def test_response_under_a_lost_key_is_replayed_as_a_tombstone_and_is_said_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The fingerprint is under a key that is still there, as after a change of keys."""
    app = shop.app(ring(1))
    await app.post("flat", "flat-1")
    record = app.read("flat-1")
    moved = sealed(SqliteStore(shop.path), ring(3)).values.sealed_response(record.response, (SCOPE, "flat-1"))  # type: ignore[attr-defined]
    shop.execute("UPDATE idempotency_keys SET response_body = ?", moved.body)
    with caplog.at_level(logging.WARNING, "oncekey"):
        answers = [await app.post("flat", "flat-1") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {201}
    assert all(planted("flat-body") not in answer.text for answer in answers)
    assert caplog.text.count("encrypted with key 3, which is not in the keyring of this process") == 1


async def test_request_whose_key_is_lost_is_refused_and_not_run_again(shop: Shop) -> None:
    """Its fingerprint cannot be compared either, so it may be another request: neither an answer nor a second run."""
    await shop.app(ring(1)).post("flat", "flat-1")
    for keyring in (ring(3), None):
        app = shop.app(keyring)
        assert (await app.post("flat", "flat-1")).status_code == 503
        record = app.read("flat-1")
        assert (record.attempt, record.state, record.response.replayable) == (1, State.COMPLETED, False)


# steps


async def test_request_with_a_step_result_that_does_not_open_is_refused_and_runs_no_step(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    app = shop.app(ring(1))
    await app.post("phased", "phased-1")
    (kept,) = shop.execute("SELECT result FROM idempotency_steps WHERE name = 'booked'")
    shop.execute("UPDATE idempotency_steps SET result = ? WHERE name = 'charged'", kept[0])
    before = shop.execute("SELECT * FROM idempotency_steps")
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert (await app.post("phased", "phased-1")).status_code == 503
    assert "names key 1 and does not open with it" in caplog.text
    assert "the result of step 'charged' cannot be read (encrypted with key 1" in caplog.text
    assert shop.execute("SELECT * FROM idempotency_steps") == before
    assert app.read("phased-1").state is State.FAILED_RETRYABLE


# jobs


async def test_job_that_a_worker_without_the_key_claims_is_left_to_a_worker_that_has_it(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker was forgotten when encryption was switched on. Its attempts count, and it runs no task."""
    app = shop.app(ring(1))
    await app.post("deferred", "deferred-1")
    received: list[Any] = []
    for keyring in (None, ring(3), ring(1)):
        worker = Worker(f"sqlite:///{shop.path}", encryption=keyring)

        @worker.task("settle", backoff=3600.0, max_backoff=3600.0)
        def settle(context: Any, payload: Any) -> tuple[int, Any]:
            received.append((context.attempt, payload))
            return 200, {}

        await worker.serve(until="drained")
        shop.execute("UPDATE idempotency_outbox SET run_at = created_at")
    assert received == [(3, {"to": planted("deferred-payload")})]
    assert app.read("deferred-1").state is State.COMPLETED
    assert "Worker(encryption=…)" in caplog.text


async def test_job_whose_payload_never_opens_is_a_dead_letter_and_can_be_taken_up_again(shop: Shop) -> None:
    app = shop.app(ring(1))
    await app.post("enlisted", "enlisted-1")
    await app.post("deferred", "deferred-1")
    worker, received = Worker(f"sqlite:///{shop.path}"), []
    for name in ("send", "settle"):

        @worker.task(name, max_attempts=2, backoff=0.0)
        def take(context: Any, payload: Any) -> tuple[int, Any]:
            received.append(payload)
            return 200, {}

    await worker.serve(until="drained")
    assert received == []
    assert isinstance(app.store, Outbox)
    dead = app.store.jobs(JobState.DEAD, 10)
    assert len(dead) == 2
    assert all(f"the payload of this job cannot be read {NOT_HERE}" in (job.last_error or "") for job in dead)
    unsettled = app.read("deferred-1")
    assert (unsettled.state, NOT_HERE in unsettled.last_error) == (State.UNKNOWN, True)
    with pytest.raises(ConfigurationError, match=r"Worker\(encryption=…\)"):
        Worker(encryption="1:secret")  # type: ignore[arg-type]
    with_keyring = Worker(f"sqlite:///{shop.path}", encryption=ring(1))
    with_keyring.tasks.update(worker.tasks)
    shop.execute("UPDATE idempotency_outbox SET state = 'ready', attempt = 0")
    await with_keyring.serve(until="drained")
    assert received == [{"to": planted("payload")}, {"to": planted("deferred-payload")}]


# texts, and the command line


async def test_command_line_shows_contents_with_the_keyring_and_sentences_without(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = shop.app(Keyring({1: ONE}))
    await app.all()
    run = runner(f"sqlite:///{shop.path}", monkeypatch, capsys)
    assert isinstance(app.store, Outbox)
    (dead,) = [job.id for job in app.store.jobs(JobState.DEAD, 10) if job.task == "settle"]
    commands = [
        ("keys", "show", "flat-1", "--reveal"),
        ("keys", "show", "phased-1", "--reveal"),
        ("keys", "show", "unknown-1", "--reveal", "--json"),
        ("keys", "show", "deferred-3", "--reveal"),
        ("dead-letters", "show", dead, "--reveal"),
        ("dead-letters", "show", dead, "--reveal", "--json"),
        ("dead-letters", "list",),
        ("keys", "list", "--json"),
        ("keys", "show", "asked-2", "--reveal"),
    ]  # fmt: skip
    without = [run(*command) for command in commands]
    assert all(code == 0 for code, _, _ in without)
    text = "".join(out + error for _, out, error in without)
    assert NOT_HERE in text
    assert "PLANTED" not in text
    assert "oncekey-sealed" not in text
    assert "damaged" not in text
    from base64 import b64encode

    monkeypatch.setenv("OTHER_KEYS", f"1:{b64encode(ONE).decode()}")
    shown = "".join(run("--keys-env", "OTHER_KEYS", *command)[1] for command in commands)
    assert app.found_in(shown.encode()) >= {
        *("flat-body", "flat-header", "phase-result", "effect-result", "kept-request", "reason-to-confirm"),
        *("deferred-payload", "error-of-job", "resolvers-words"),
    }
    assert "encrypted with" not in shown


async def test_text_under_a_lost_key_is_a_sentence(shop: Shop) -> None:
    await shop.app(ring(1)).all()
    other = sealed(SqliteStore(shop.path), ring(3))
    sentence = "(encrypted with key 1, which is not in the keyring)"
    (record,) = other.read([(SCOPE, "asked-2")])
    assert record is not None
    assert shown(record.last_error or "") == NOT_HERE
    assert other.audit(SCOPE, "unknown-1", 10)[0].why == sentence
    (steps,) = other.steps([StepsOf(SCOPE, "phased-1")])
    assert [step.name for step in steps] == ["oncekey:request", "booked", "charged"]


def test_store_that_encrypts_already_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="encrypts already"):
        sealed(sealed(MemoryStore(), ring(1)), ring(2))


def test_unreadable_request_is_an_error_of_the_store() -> None:
    from oncekey.core.sealed import MARK, readable

    with pytest.raises(StoreError, match="cannot be read"):
        readable(MARK.encode(), "the kept request")
    assert readable(b"{}", "the kept request") == b"{}"
