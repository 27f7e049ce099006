"""The demo on Redis: keys in Redis, payments in a SQLite file beside the ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from oncekey.errors import ConfigurationError
from oncekey.testing.servers import RedisServer
from tests.demo.process import Demo

pytestmark = pytest.mark.stores


@pytest.fixture
def demo(redis_server: RedisServer, tmp_path: Path) -> Iterator[Demo]:
    """An empty Redis: the demo sets it up by itself."""
    redis_server.flush()
    with Demo(redis_server.url, tmp_path) as made:
        yield made


def test_payment_killed_after_its_charge_resumes_and_is_charged_once(demo: Demo) -> None:
    first, second = demo.pay("twice-0001"), demo.pay("twice-0001")
    assert (first.status_code, second.status_code, first.content == second.content) == (201, 201, True)
    assert second.headers["idempotency-replayed"] == "true"
    answer = demo.retry_until(201, "succeeded", "crash-0001", 777, "crash")
    assert demo.pay("crash-0001", 777, simulate="crash").content == answer.content
    assert len(demo.charges(777)) == 1
    assert len(demo.charges()) == 2
    with closing(sqlite3.connect(demo.ledger.with_suffix(".payments.db"))) as book:
        assert sorted(book.execute("SELECT status FROM demo_payments")) == [("succeeded",), ("succeeded",)]


def test_refund_is_made_once(demo: Demo) -> None:
    payment = demo.pay("pay-0001").json()
    headers = {"Authorization": "Bearer tenant-a", "Idempotency-Key": "refund-0001"}
    answers = [demo.http.post("/refunds", headers=headers, json={"paymentId": payment["id"]}) for _ in range(2)]
    assert [each.status_code for each in answers] == [201, 201]
    with closing(sqlite3.connect(demo.ledger.with_suffix(".payments.db"))) as book:
        assert book.execute("SELECT count(*) FROM demo_refunds").fetchone() == (1,)


@pytest.mark.parametrize(("store", "options"), [("memory://", {}), ("redis://localhost:1/0", {"background": True})])
def test_demo_that_cannot_run_names_the_stores_that_can(store: str, options: dict[str, bool]) -> None:
    from oncekey.cli.demo import demo as command

    with pytest.raises(ConfigurationError, match="postgresql://"):
        command(port=0, store=store, **({"background": False} | options), honours=True, ledger=None)
