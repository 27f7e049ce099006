"""Races for one key on DynamoDB: one owner, on both ways to learn of the winner.

dynalite does not return the item with a refusal, so the store reads it; moto returns it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.dynamodb import DynamoStore
from oncekey.testing.servers import DynamoServer
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.dynamo_rows import opened

pytestmark = pytest.mark.stores

SERVERS = ["dynalite_server", pytest.param("moto_server", marks=pytest.mark.stores)]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> DynamoServer:
    found: DynamoServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def url(server: DynamoServer) -> str:
    return server.new_url()


@pytest.fixture
def store(url: str) -> Iterator[DynamoStore]:
    with opened(url, timeout=60.0) as store:
        store.migrate()
        yield store


def _race(store: DynamoStore, key: str, threads: int, pool: ThreadPoolExecutor, barrier: Barrier) -> None:
    """All reserve the key at once: all see one owner, which is one of theirs; then all complete it, and one can."""
    wanted = [reservation(key) for _ in range(threads)]

    def reserve(nth: int) -> Record:
        barrier.wait()
        record = store.reserve([wanted[nth]])[0].record
        assert record is not None
        return record

    rows = list(pool.map(reserve, range(threads)))
    assert len({row.owner for row in rows}) == 1
    assert {row.state for row in rows} == {State.IN_PROGRESS}
    (mine,) = [nth for nth, row in enumerate(rows) if row.owner == wanted[nth].owner]

    def complete(nth: int) -> Record | None:
        barrier.wait()
        answer = StoredResponse(201, (), f"{nth}".encode())
        return store.swap([swap(rows[mine], Event.COMPLETE, Actor.OWNER, response=answer)])[0]

    moved = [row for row in pool.map(complete, range(threads)) if row is not None]
    assert len(moved) == 1
    stored = store.read([("tenant-1", key)])[0]
    assert stored is not None
    assert stored.response == moved[0].response


def test_of_many_requests_for_one_key_one_wins(store: DynamoStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        barrier = Barrier(8)
        for number in range(10):
            _race(store, f"key-{number}", 8, pool, barrier)


@pytest.mark.stores
@pytest.mark.timeout(900)
def test_thousand_races_have_one_winner_each(store: DynamoStore, server: DynamoServer) -> None:
    """On moto, which serves one request at a time, a tenth of them."""
    with ThreadPoolExecutor(12) as pool:
        barrier = Barrier(12)
        for number in range(1000 if server.kind == "dynalite" else 100):
            _race(store, f"key-{number}", 12, pool, barrier)


def test_of_many_that_start_an_expired_key_over_one_does(store: DynamoStore) -> None:
    """The expiry is in the condition: a second one finds a key that is not expired, and another owner."""
    first = store.reserve([reservation("key")])[0].record
    assert first is not None
    done = store.swap([swap(first, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])[0]
    assert done is not None
    later = [done.expires_at + 1.0]
    store._clock = lambda: later[0]
    changes = [swap(done, Event.RESERVE, Actor.REQUEST, reservation=reservation("key")) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        moved = list(pool.map(lambda change: store.swap([change])[0], changes))
    assert [row is not None for row in moved].count(True) == 1
