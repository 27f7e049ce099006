"""Upkeep with a million final keys; 20,000 with every ``make test``."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from oncekey.stores.registry import open_store
from oncekey.testing.servers import PostgresServer
from tests.upkeep.many_keys import fill, keep_up
from tests.upkeep.test_plans import WANTED


@pytest.fixture
def url() -> Iterator[str]:
    with PostgresServer(fsync=False) as server:
        yield server.database("million")


@pytest.mark.faults
def test_every_statement_of_upkeep_with_a_million_keys(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each uses its index, and none takes long."""
    caplog.set_level(logging.CRITICAL, logger="oncekey")
    store = open_store(url)
    store.migrate()
    store.disconnect()
    fill(url, 1_000_000)
    looked = keep_up(url, reaped=20_000)
    assert [(each.words, each.scans) for each in looked if each.scans] == []
    used = {name.removeprefix("idempotency_") for each in looked for name in each.indexes}
    assert used >= WANTED - {"keys_tombstones"}, WANTED - used
    slowest = max(looked, key=lambda each: each.seconds)
    print(f"{len(looked)} statements; the slowest took {slowest.seconds:.3f} s: {slowest.words}")
    assert slowest.seconds < 2.0
