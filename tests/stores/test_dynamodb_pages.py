"""DynamoDB answers in parts: pages of a query, and batches of which it left some keys for later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import Duty
from oncekey.stores.dynamodb import DynamoStore
from oncekey.stores.dynamodb.client import Verb
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.dynamo_rows import age, opened

pytestmark = pytest.mark.stores

KEYS = [f"key-{number:02}" for number in range(30)]
"""In the eight buckets of the index, so most of them have several."""


@pytest.fixture
def store(ready_dynamodb_url: str) -> Iterator[DynamoStore]:
    with opened(ready_dynamodb_url, timeout=60.0) as store:
        yield store


@pytest.fixture
def rows(store: DynamoStore) -> list[Record]:
    return [found.record for found in store.reserve([reservation(key) for key in KEYS]) if found.record is not None]


class Parted:
    """Answers as from a server whose pages have one entry, and that reads three keys of a batch at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages = self.batches = 0
        real = Verb.__call__

        def ask(verb: Verb, operation: str, **request: Any) -> Any:
            if operation == "query":
                self.pages += 1
                request["Limit"] = 1
            if operation != "batch_get_item":
                return real(verb, operation, **request)
            self.batches += 1
            ((table, asked),) = request["RequestItems"].items()
            now, later = asked["Keys"][:3], asked["Keys"][3:]
            answer = real(verb, operation, RequestItems={table: {**asked, "Keys": now}})
            return {**answer, "UnprocessedKeys": {table: {**asked, "Keys": later}} if later else {}}

        monkeypatch.setattr(Verb, "__call__", ask)


def test_upkeep_and_operators_read_all_pages_of_the_index(
    store: DynamoStore, rows: list[Record], ready_dynamodb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted = Parted(monkeypatch)
    assert [row.key for row in store.listing(limit=100)] == KEYS
    assert [row.key for row in store.listing(scope="tenant-1", limit=100)] == KEYS
    assert store.counts().counts[State.IN_PROGRESS] == len(KEYS)
    age(ready_dynamodb_url, [(row.scope, row.key) for row in rows], 3600.0)
    assert {row.key for row in store.due(Duty.LEASES, 100)} == set(KEYS)
    assert parted.pages > len(KEYS)


def test_expired_keys_of_all_pages_are_purged_and_counted(
    store: DynamoStore, rows: list[Record], ready_dynamodb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.swap([swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for row in rows])
    Parted(monkeypatch)
    assert store.counts().counts[State.COMPLETED] == len(KEYS)
    age(ready_dynamodb_url, [(row.scope, row.key) for row in rows], 1_000_000.0)
    assert store.purge(100) == len(KEYS)
    assert store.listing(limit=100) == []


def test_keys_that_a_batch_left_for_later_are_read_too(
    store: DynamoStore, rows: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A throttled table answers so. A key that is not read would look as if it was not there."""
    parted = Parted(monkeypatch)
    found = store.read([(row.scope, row.key) for row in rows])
    assert [row and row.owner for row in found] == [row.owner for row in rows]
    assert parted.batches == len(KEYS) / 3
