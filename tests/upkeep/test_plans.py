"""Upkeep on PostgreSQL with many keys: every statement finds what is due by its index. A million: ``tests/faults``."""

from __future__ import annotations

import logging

import pytest

from oncekey.stores.registry import open_store
from tests.upkeep.many_keys import fill, keep_up

WANTED = {
    *("keys_leases", "keys_expired", "keys_abandoned", "keys_lapsed", "keys_tombstones", "keys_pkey"),
    "keys_turns",  # or keys_resumable, which serves the same question: the planner chooses by its statistics
    *("outbox_over", "outbox_ready", "outbox_dead", "outbox_key", "steps_pkey"),
}


def test_every_statement_of_upkeep_uses_its_index(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not one reads a table or the whole primary key, however many keys are only waiting for their end."""
    caplog.set_level(logging.CRITICAL, logger="oncekey")
    store = open_store(postgres_url)
    store.migrate()
    store.disconnect()
    fill(postgres_url, 20_000)
    looked = keep_up(postgres_url, reaped=1_000)
    assert [(each.words, each.scans) for each in looked if each.scans] == []
    used = {name.removeprefix("idempotency_") for each in looked for name in each.indexes}
    assert used >= WANTED, WANTED - used
