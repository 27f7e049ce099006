"""The hot verbs in an event loop: the same answers as the store's own, in time or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest

from oncekey.core.record import Reservation, StoredResponse, swap
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.errors import SchemaError, StoreUnavailable
from oncekey.stores.base import LostRace
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.postgres.in_loop import InLoop
from oncekey.stores.sqlite import SqliteStore
from oncekey.stores.sqlite.in_loop import SqliteInLoop
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import PostgresServer

RESPONSE = StoredResponse(201, (("location", "/payments/1"),), b'{"id":1}')
_numbers = count(1)


def wanted(key: str, scope: str = "tenant") -> Reservation:
    owner = f"owner-{next(_numbers)}"
    return Reservation(scope, key, "POST /payments", b"f" * 32, 1, Effects.EXTERNAL, owner, 60.0, 3600.0)


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", postgres_server.port) as made:
        yield made


@pytest.fixture
def store(proxy: TcpProxy, postgres_url: str) -> Iterator[PostgresStore]:
    direct = PostgresStore(postgres_url)
    direct.migrate()
    direct.close()
    made = PostgresStore(proxy.rewrite(postgres_url), timeout=1.0)
    yield made
    made.close()


def test_postgres_gives_the_answers_of_the_store(store: PostgresStore) -> None:
    """New, found, moved, not moved: record for record what the blocking verbs say."""

    async def main() -> None:
        fast = InLoop(store)
        mine = [wanted("b"), wanted("a"), wanted("c")]
        found = await fast.reserve(mine)
        assert [answer.record and answer.record.owner for answer in found] == [one.owner for one in mine]
        first, second, third = (answer.record for answer in found)
        assert first
        assert second
        assert third
        done = swap(first, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        lost = swap(second, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        store.swap([swap(second, Event.RELEASE, Actor.OWNER)])
        moved = await fast.swap([done, lost])
        assert moved[0] is not None
        assert moved[0].state is State.COMPLETED
        assert moved[1] is None
        again = await fast.reserve([wanted("b"), wanted("c")])
        read = store.read([("tenant", "b"), ("tenant", "c")])
        for here, there in zip(again, read, strict=True):
            assert here.record is not None
            assert there is not None
            assert (here.record.owner, here.record.state, here.record.response, here.record.expires_at) == (
                there.owner,
                there.state,
                there.response,
                there.expires_at,
            )
        fast.abandon()

    asyncio.run(main())


def test_a_race_that_is_lost_is_said_and_keeps_the_connection(store: PostgresStore, postgres_url: str) -> None:
    """A rival inserts one of the keys between our look and our insert: here, by a transaction that commits late."""

    async def main() -> None:
        fast = InLoop(store)
        await fast.reserve([wanted("warm")])
        connection = fast._connection
        with psycopg.connect(postgres_url) as rival:
            rival.execute(
                "INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, "
                "state, attempt, owner, lease_until, created_at, retention_seconds, expires_at) VALUES "
                "('tenant', 'raced', 'POST /', 'x', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 60, now())"
            )
            asking = asyncio.create_task(fast.reserve([wanted("raced"), wanted("other")]))
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            with psycopg.connect(postgres_url, autocommit=True) as look:
                while look.execute(waiting).fetchone() == (0,):
                    await asyncio.sleep(0.01)
            rival.commit()
        with pytest.raises(LostRace):
            await asking
        assert fast._connection is connection
        assert (await fast.reserve([wanted("after")]))[0].record is not None
        fast.abandon()

    asyncio.run(main())


def test_a_cut_connection_is_thrown_away_and_the_next_verb_opens_another(store: PostgresStore, proxy: TcpProxy) -> None:
    async def main() -> None:
        fast = InLoop(store)
        await fast.reserve([wanted("a")])
        await asyncio.to_thread(proxy.cut)
        with pytest.raises(psycopg.Error):
            await fast.reserve([wanted("b")])
        assert fast._connection is None
        assert (await fast.reserve([wanted("c")]))[0].record is not None
        fast.abandon()

    asyncio.run(main())


def test_a_server_that_says_nothing_is_given_up_in_time(store: PostgresStore, proxy: TcpProxy) -> None:
    """The store's time limit holds here too, and the loop goes on meanwhile."""

    async def main() -> None:
        fast = InLoop(store)
        await fast.reserve([wanted("a")])
        await asyncio.to_thread(proxy.hang)
        began = time.monotonic()
        with pytest.raises(psycopg.Error):
            await asyncio.wait_for(fast.reserve([wanted("b")]), 20)
        assert time.monotonic() - began < 15
        assert fast._connection is None

    asyncio.run(main())


def test_a_cancelled_verb_leaves_no_answer_behind(store: PostgresStore, proxy: TcpProxy) -> None:
    """Its answer may still come: nobody may read it as the answer to the next question (hazard 4)."""

    async def main() -> None:
        fast = InLoop(store)
        await fast.reserve([wanted("a")])
        await asyncio.to_thread(proxy.hang, "to_client")
        asking = asyncio.create_task(fast.reserve([wanted("cancelled")]))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.to_thread(proxy.pass_through)
        assert fast._connection is None
        (found,) = await fast.reserve([wanted("b")])
        assert found.record is not None
        assert found.record.key == "b"
        fast.abandon()

    asyncio.run(main())


# ---------------------------------------------------------------- SQLite


def test_sqlite_answers_what_is_there_and_leaves_the_rest(tmp_path: Path) -> None:
    """A replay needs no thread; a new key is the lane's."""
    store = SqliteStore(tmp_path / "keys.db")
    (found,) = store.reserve([wanted("there")])
    assert found.record is not None
    store.swap([swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])

    async def main() -> None:
        fast = SqliteInLoop(store)
        known, unknown = await fast.reserve([wanted("there"), wanted("absent")])
        assert known is not None
        assert known.record is not None
        assert known.record.response == RESPONSE
        assert unknown is None
        fast.abandon()

    asyncio.run(main())
    assert store.read([("tenant", "absent")]) == [None]
    store.close()


def test_sqlite_reads_while_another_writes(tmp_path: Path) -> None:
    """A writer that holds the file holds up no replay."""
    store = SqliteStore(tmp_path / "keys.db")
    store.reserve([wanted("there")])
    writer = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")

    async def main() -> None:
        fast = SqliteInLoop(store)
        (known,) = await fast.reserve([wanted("there")])
        assert known is not None
        fast.abandon()

    asyncio.run(main())
    writer.execute("ROLLBACK")
    writer.close()
    store.close()


def test_sqlite_does_not_wait_in_the_loop(tmp_path: Path) -> None:
    """Where SQLite would have it wait, it raises at once, and the lane takes over."""
    store = SqliteStore(tmp_path / "keys.db")
    store.reserve([wanted("there")])
    store.close()
    holder = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("UPDATE idempotency_keys SET attempt = attempt")

    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await SqliteInLoop(store).reserve([wanted("there")])
        assert time.monotonic() - began < 2

    asyncio.run(main())
    holder.execute("ROLLBACK")
    holder.close()


def test_sqlite_creates_no_tables_in_the_loop(tmp_path: Path) -> None:
    """Migrations are the lane's."""
    store = SqliteStore(tmp_path / "keys.db")

    async def main() -> None:
        with pytest.raises(SchemaError):
            await SqliteInLoop(store).reserve([wanted("a")])

    asyncio.run(main())
    store.close()
