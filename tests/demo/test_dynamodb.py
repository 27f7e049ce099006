"""The demo on DynamoDB: keys in a table that it makes by itself, payments in a SQLite file beside the ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from oncekey.testing.servers import DynaliteServer
from tests.demo.process import Demo

pytestmark = pytest.mark.stores


@pytest.fixture
def demo(dynalite_server: DynaliteServer, tmp_path: Path) -> Iterator[Demo]:
    with Demo(dynalite_server.new_url(), tmp_path) as made:
        yield made


def test_payment_killed_after_its_charge_resumes_and_is_charged_once(demo: Demo) -> None:
    first, second = demo.pay("twice-0001"), demo.pay("twice-0001")
    assert (first.status_code, second.status_code, first.content == second.content) == (201, 201, True)
    assert second.headers["idempotency-replayed"] == "true"
    answer = demo.retry_until(201, "succeeded", "crash-0001", 777, "crash")
    assert demo.pay("crash-0001", 777, simulate="crash").content == answer.content
    assert len(demo.charges(777)) == 1
    with closing(sqlite3.connect(demo.ledger.with_suffix(".payments.db"))) as book:
        assert sorted(book.execute("SELECT status FROM demo_payments")) == [("succeeded",), ("succeeded",)]
