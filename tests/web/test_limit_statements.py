"""What a hostile request costs the database itself: its statements are counted on SQLite and on PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncekey import Policy
from oncekey.limits import Limits
from oncekey.stores.registry import open_store
from oncekey.testing.http.stack import Stack, request
from oncekey.testing.servers import PostgresServer
from tests.enlist.wire_counter import WireCounter
from tests.web.status_questions import status_of
from tests.web.test_limits import LARGE, ODD_HEADERS

TENANT = {"X-Tenant": "eve"}
EACH = 20
CAP = 5
Counted = tuple[str, Callable[[], int], Callable[[], int]]
"""The address of an empty store, the statements since the last call, and the rows in its table."""


@pytest.fixture(params=["sqlite", "postgres"])
def counted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    count_rows = "SELECT count(*) FROM idempotency_keys"
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url: str = request.getfixturevalue("postgres_url")

        def rows_of_postgres() -> int:
            with psycopg.connect(url) as own:
                (number,) = own.execute(count_rows).fetchone() or (0,)
                return int(number)

        with WireCounter(server.port) as counter:
            proxied = url.replace(f":{server.port}/", f":{counter.port}/")
            yield proxied, lambda: counter.count()[0], rows_of_postgres
        return
    path, connect = tmp_path / "keys.db", sqlite3.connect
    seen: list[str] = []

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(seen.append)
        return connection

    def since() -> int:
        number = len(seen)
        del seen[:number]
        return number

    def rows_of_sqlite() -> int:
        own = connect(path)
        (number,) = own.execute(count_rows).fetchone()
        own.close()
        return int(number)

    monkeypatch.setattr(sqlite3, "connect", traced)
    yield f"sqlite:///{path}", since, rows_of_sqlite


def new_keys(first: str) -> list[dict[str, Any]]:
    return [request(f"{first}-{number}", headers=TENANT) for number in range(EACH)]


@pytest.mark.parametrize("limit", ["rate", "cap"])
def test_refused_new_key_is_one_statement_and_every_other_hostile_request_is_none(
    make_stack: Any, counted: Counted, limit: str
) -> None:
    url, statements, rows = counted
    store: Any = open_store(url)
    store.migrate()
    stack: Stack = make_stack(
        "asgi",
        store=store,
        scope=lambda request: request.headers["x-tenant"],
        policy=Policy(limit=f"{CAP}/hour") if limit == "rate" else Policy(),
        max_active_keys=CAP if limit == "cap" else None,
        limits=Limits(lookups="3/hour"),
    )
    if stack.once.limiter.caps is not None:
        stack.once.limiter.caps._clock = lambda: 7.0  # otherwise the keys are counted once a second
    statuses = [answer.status_code for answer in stack.together(new_keys("first"))]
    assert statuses == [201] * CAP + [429] * (EACH - CAP)
    statements()

    assert {answer.status_code for answer in stack.together(new_keys("more"))} == {429}
    assert (statements(), rows()) == (EACH, CAP)
    statements()  # of the count itself

    assert [status_of(stack, f"guess-{number}", TENANT).status_code for number in range(3)] == [404] * 3
    assert statements() == 3
    assert {status_of(stack, f"guess-{number}", TENANT).status_code for number in range(EACH)} == {429}
    large = [request(f"large-{number}", headers=TENANT, content=LARGE) for number in range(EACH)]
    assert {answer.status_code for answer in stack.together(large)} == {413}
    odd = [request(None, headers=TENANT | ODD_HEADERS[number % 4]) for number in range(EACH)]
    assert {answer.status_code for answer in stack.together(odd)} == {400}
    assert (statements(), rows()) == (0, CAP)
