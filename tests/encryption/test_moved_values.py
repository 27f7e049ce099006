"""A value that was copied to another row or column of the tables does not open there: every encrypted column."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncekey.admin import changes
from oncekey.core.audit import Audit
from oncekey.core.sealed import is_sealed, is_sealed_text
from oncekey.core.steps import StepsOf
from oncekey.stores.api import Outbox
from tests.encryption.full_run import SCOPE, FullRun
from tests.encryption.rings import ring

FOREIGN = "and it does not belong here, or was changed)"


def body(run: FullRun, key: str) -> Any:
    return run.read(key).response.body


def error(run: FullRun, key: str) -> Any:
    return run.read(key).last_error


def result(run: FullRun, key: str, name: str = "booked") -> Any:
    (steps,) = run.store.steps([StepsOf(SCOPE, key)])
    return next(step.result for step in steps if step.name == name)


def request(run: FullRun, key: str) -> Any:
    return result(run, key, "oncekey:request")


def why(run: FullRun, key: str) -> Any:
    return run.store.audit(SCOPE, key, 1)[0].why


def job(run: FullRun, key: str) -> Any:
    assert isinstance(run.store, Outbox)
    return run.store.jobs_of(SCOPE, key, 1)[0]


def payload(run: FullRun, key: str) -> Any:
    return job(run, key).payload


def job_error(run: FullRun, key: str) -> Any:
    return job(run, key).last_error


def job_history(run: FullRun, key: str) -> Any:
    return job(run, key).history.decode()


KEYS, STEPS, OUTBOX, AUDIT = (f"idempotency_{name}" for name in ("keys", "steps", "outbox", "audit"))
MOVES = [
    # to, the column, where it is read; from: another row, or another column of the same row
    ("response to another key", KEYS, "response_body", "flat-2", body, KEYS, "response_body", "flat-1"),
    ("error to another key", KEYS, "last_error", "asked-3", error, KEYS, "last_error", "asked-2"),
    ("reason to an error", KEYS, "last_error", "unknown-1", error, AUDIT, "why", "unknown-1"),
    ("payload to an error", KEYS, "last_error", "enlisted-1", error, OUTBOX, "payload", "enlisted-1"),
    ("result to another key", STEPS, "result", "phased-2", result, STEPS, "result", "phased-1"),
    ("result to another step", STEPS, "result", "phased-2", request, STEPS, "result", "phased-2"),
    ("reason to another key", AUDIT, "why", "unknown-1", why, AUDIT, "why", "flat-3"),
    ("error to a reason", AUDIT, "why", "unknown-2", why, KEYS, "last_error", "unknown-2"),
    ("payload to another job", OUTBOX, "payload", "enlisted-2", payload, OUTBOX, "payload", "enlisted-1"),
    ("result to a payload", OUTBOX, "payload", "enlisted-2", payload, STEPS, "result", "phased-1"),
    ("error to another job", OUTBOX, "last_error", "enlisted-2", job_error, OUTBOX, "last_error", "enlisted-1"),
    ("history to another job", OUTBOX, "history", "enlisted-2", job_history, OUTBOX, "history", "enlisted-1"),
]


@pytest.fixture
async def ran(tmp_path: Path) -> AsyncIterator[tuple[FullRun, Path]]:
    path = tmp_path / "keys.db"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=5.0, check_same_thread=False)

    run = FullRun(f"sqlite:///{path}", ring(1), connect)
    await run.all()
    changes.refute(run.store, run.read("unknown-2"), Audit("ann", "it did not happen"), quarantine_seconds=0.0)
    yield run, path
    await run.close()


async def test_value_does_not_open_in_another_row_or_column(ran: tuple[FullRun, Path]) -> None:
    run, path = ran
    for what, table, column, key, read, from_table, from_column, from_key in MOVES:
        before = read(run, key)
        with closing(sqlite3.connect(path)) as own:
            (row,) = own.execute(f"SELECT rowid FROM {table} WHERE key = ?{_which(table, read)}", [key]).fetchone()
            (old,) = own.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", [row]).fetchone()
            (moved,) = own.execute(
                f"SELECT {from_column} FROM {from_table} WHERE key = ?{_which(from_table, result)}", [from_key]
            ).fetchone()
            assert moved not in (None, old), what
            _write(own, table, column, row, moved)
            after = read(run, key)
            _write(own, table, column, row, old)
        assert _unopened(after), (what, after)
        assert read(run, key) == before, what  # put back, it opens


def _which(table: str, read: Callable[..., Any]) -> str:
    """Of several rows with one key: the step that is read, and the newest line of the audit."""
    if table == STEPS:
        return f" AND name = '{'oncekey:request' if read is request else 'booked'}'"
    return " ORDER BY id DESC" if table == AUDIT else ""


def _write(own: sqlite3.Connection, table: str, column: str, row: int, value: Any) -> None:
    with own:
        own.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [value, row])


def _unopened(value: Any) -> bool:
    if value is None or isinstance(value, bytes):
        return value is None or is_sealed(value)
    return is_sealed_text(value) or FOREIGN in value
