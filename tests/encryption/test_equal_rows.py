"""Two tenants send the same requests and get the same answers: what a reader of the database sees of that.

Every column that is equal in a row of one and the row of the other is named here, and docs/encryption.md says that it
is readable.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from oncekey.core.health import NO_RESOLVER
from oncekey.encryption import Keyring
from tests.encryption.dumps import TABLES
from tests.encryption.full_run import FullRun
from tests.encryption.rings import ring

Rows = Callable[[str], list[dict[str, Any]]]

READABLE = {
    "idempotency_keys": {
        *("key", "operation", "effects", "state", "attempt", "recovery_point", "reconcile_tries", "retention_seconds"),
        *("quarantine_seconds", "fingerprint_version", "fingerprint_recipe"),
        *("response_status", "response_schema_version"),
    },
    "idempotency_steps": {"key", "name", "kind", "state", "repeatable"},
    "idempotency_outbox": {"key", "operation", "task", "state", "attempt", "settles", "owner"},
    "idempotency_audit": {"key", "who", "event", "before", "after"},
}
"""Names that the app chose, words of oncekey's own, and counts. Not the contents of any request or response."""
CONTENTS = {
    "idempotency_keys": {"fingerprint", "response_body", "last_error"},
    "idempotency_steps": {"result", "downstream_key"},
    "idempotency_outbox": {"payload", "last_error", "history", "downstream_key"},
    "idempotency_audit": {"why"},
}
"""What must be there in some pair of rows, or the test would show nothing."""

OWN_WORDS = (NO_RESOLVER, "[]")
"""In columns that otherwise have contents: a sentence that upkeep counts, and the headers of a sealed response."""
TIMES = ("_at", "_until", "at")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.stores)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[], Any], Rows]:
    if request.param == "sqlite":
        connect = partial(sqlite3.connect, tmp_path / "keys.db", timeout=5.0, check_same_thread=False)
        return f"sqlite:///{tmp_path / 'keys.db'}", connect, partial(_of_sqlite, tmp_path / "keys.db")
    url: str = request.getfixturevalue("ready_url")
    return url, partial(psycopg.connect, url), partial(_of_postgres, url)


def _of_sqlite(path: Path, table: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as own:
        own.row_factory = sqlite3.Row
        return [dict(row) for row in own.execute(f"SELECT * FROM {table}")]


def _of_postgres(url: str, table: str) -> list[dict[str, Any]]:
    with psycopg.connect(url, row_factory=dict_row) as own:
        return own.execute(f"SELECT * FROM {table}".encode()).fetchall()


async def run_of_two(database: tuple[str, Callable[[], Any], Rows], keyring: Keyring | None) -> Rows:
    """The same run for two tenants, with the same keys."""
    url, connect, rows = database
    for tenant in ("acme", "globex"):
        run = FullRun(url, keyring, connect, tenant=tenant)
        await run.all()
        await run.close()
    return rows


def pairs(found: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row of one tenant, with each row of the other that is about the same."""
    for one in found:
        for other in found:
            same = all(one.get(name) == other.get(name) for name in ("key", "name", "task", "event"))
            if (one["scope"], other["scope"]) == ("acme", "globex") and same:
                yield one, other


def equal_columns(found: list[dict[str, Any]]) -> set[str]:
    """But for times: one transaction may write the rows of several tenants."""
    return {
        name
        for one, other in pairs(found)
        for name, value in one.items()
        if value is not None and value == other[name] and value not in OWN_WORDS and not name.endswith(TIMES)
    }


async def test_two_tenants_with_equal_requests_share_only_what_is_readable(
    database: tuple[str, Callable[[], Any], Rows],
) -> None:
    rows = await run_of_two(database, ring(2, 1))
    for table in TABLES:
        found = rows(table)
        assert equal_columns(found) <= READABLE[table] <= set(found[0]), table
        there = {name for one, _ in pairs(found) for name, value in one.items() if value is not None}
        assert CONTENTS[table] <= there, table
    # All of these requests have one body. Their fingerprints say which key made them, and no more.
    fingerprints = [bytes(row["fingerprint"]) for row in rows("idempotency_keys")]
    assert len({each[:4] for each in fingerprints}) == 1
    assert len({each[4:] for each in fingerprints}) == len(fingerprints) > 30


async def test_without_encryption_equal_contents_are_seen(database: tuple[str, Callable[[], Any], Rows]) -> None:
    """Otherwise the test above would compare rows whose contents differ anyway."""
    rows = await run_of_two(database, None)
    never_equal = {"downstream_key", "history"}  # made of scope and key; has times
    for table in TABLES:
        assert CONTENTS[table] - never_equal <= equal_columns(rows(table)), table
