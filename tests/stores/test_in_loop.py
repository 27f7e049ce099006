"""The hot verbs in an event loop: the same answers as the store's own, in time or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import floats

from oncekey.core.record import Reservation, StoredResponse, Swap, swap
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.errors import SchemaError, StoreError, StoreUnavailable
from oncekey.stores.base import LostRace
from oncekey.stores.postgres import PostgresStore, rows
from oncekey.stores.postgres.in_loop import _END, _RESERVE, InLoop
from oncekey.stores.sqlite import SqliteStore, batch
from oncekey.stores.sqlite.in_loop import LOCK_SECONDS, SqliteInLoop
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


@pytest.fixture
def shared(postgres_url: str) -> Iterator[PostgresStore]:
    made = PostgresStore(postgres_url)
    made.migrate()
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
        with pytest.raises(StoreUnavailable):
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


async def completion(fast: InLoop, key: str) -> Swap:
    (found,) = await fast.reserve([wanted(key)])
    assert found.record is not None
    return swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)


def test_what_ends_and_what_begins_are_one_transaction(store: PostgresStore) -> None:
    """One commit for both; and who asks again for a key that ends in the same batch finds its response."""

    async def main() -> None:
        fast = InLoop(store)
        ends = [await completion(fast, key) for key in ("a", "b")]
        found, moved = await fast.both([wanted("new"), wanted("a")], ends)
        assert [record and record.state for record in moved] == [State.COMPLETED, State.COMPLETED]
        new, again = (answer.record for answer in found)
        assert new
        assert again
        assert (new.state, again.response) == (State.IN_PROGRESS, RESPONSE)
        numbers = store._execute("SELECT xmin FROM idempotency_keys WHERE key IN ('a', 'b', 'new')", None).fetchall()
        assert len(numbers) == 3
        assert len(set(numbers)) == 1
        fast.abandon()

    asyncio.run(main())


def test_a_commit_that_fails_is_not_taken_for_done(store: PostgresStore, postgres_url: str) -> None:
    """Every statement has answered, and then the commit fails: here by a check that the database makes at its end."""

    async def main() -> None:
        fast = InLoop(store)
        end = await completion(fast, "a")
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'not today'; END $$"
            )
            admin.execute(
                "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON idempotency_keys "
                "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
            with pytest.raises(StoreError, match="P0001"):
                await fast.both([wanted("b")], [end])
            with pytest.raises(StoreError, match="P0001"):
                await fast.reserve([wanted("b")])
            admin.execute("DROP TRIGGER refuse ON idempotency_keys")
        there, absent = store.read([("tenant", "a"), ("tenant", "b")])
        assert there is not None
        assert there.state is State.IN_PROGRESS
        assert absent is None

    asyncio.run(main())


def test_a_race_that_is_lost_undoes_the_ends_of_the_batch_too(store: PostgresStore) -> None:
    """All or nothing: the lanes are asked about both."""

    async def main() -> None:
        fast = InLoop(store)
        end = await completion(fast, "a")
        twins = [wanted("twin"), wanted("twin")]
        with pytest.raises(LostRace):  # the same key twice stands for a rival's
            await fast._ask((_END, rows.end_columns([end])), (_RESERVE, rows.reservation_columns(twins)))
        (record,) = store.read([("tenant", "a")])
        assert record is not None
        assert record.state is State.IN_PROGRESS
        assert (await fast.swap([end]))[0] is not None, "the connection is as good as before"
        fast.abandon()

    asyncio.run(main())


def test_a_key_that_somebody_is_about_to_commit_holds_nobody_up(store: PostgresStore, postgres_url: str) -> None:
    """Ends wait with the begins of their batch, so it gives up soon, as if a race was lost: the lanes have patience."""

    async def main() -> None:
        fast = InLoop(store)
        end = await completion(fast, "a")
        connection = fast._connection
        with psycopg.connect(postgres_url) as rival:
            rival.execute(
                "INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, "
                "state, attempt, owner, lease_until, created_at, retention_seconds, expires_at) VALUES "
                "('tenant', 'raced', 'POST /', 'x', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 60, now())"
            )
            began = time.monotonic()
            with pytest.raises(LostRace):
                await fast.both([wanted("raced")], [end])
            assert time.monotonic() - began < store.lock_timeout * 0.9
        assert fast._connection is connection
        assert (await fast.swap([end]))[0] is not None
        fast.abandon()

    asyncio.run(main())


def test_a_server_that_ends_the_connection_is_noticed_at_once(store: PostgresStore, postgres_url: str) -> None:
    """An administrator, a restart: its last words are no answer, and no reason to wait for one."""

    async def main() -> None:
        fast = InLoop(store)
        await fast.reserve([wanted("a")])
        assert fast._connection is not None
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute(
                "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN PERFORM pg_sleep(30); RETURN NEW; END $$"
            )
            admin.execute(
                "CREATE TRIGGER dawdle BEFORE INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION dawdle()"
            )
            asking = asyncio.create_task(fast.reserve([wanted("b")]))
            await asyncio.sleep(0.1)
            admin.execute("SELECT pg_terminate_backend(%s)", [fast._connection.pgconn.backend_pid])
            with pytest.raises((psycopg.Error, StoreError)) as ended:
                await asyncio.wait_for(asking, 0.8)  # the store's own limit is a second
        assert "in time" not in str(ended.value)
        assert fast._connection is None

    asyncio.run(main())


def test_more_than_the_socket_takes_at_once(shared: PostgresStore) -> None:
    """Large responses: sent in pieces, while the loop goes on."""

    async def main() -> None:
        fast = InLoop(shared)
        found = await fast.reserve([wanted(f"large-{number}") for number in range(8)])
        response = StoredResponse(200, (), b"x" * 1_000_000)
        ends = [
            swap(answer.record, Event.COMPLETE, Actor.OWNER, response=response) for answer in found if answer.record
        ]
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.0005)
                turns += 1

        counting = asyncio.create_task(count_turns())
        moved = await fast.swap(ends)
        counting.cancel()
        assert all(moved)
        assert turns > 3
        (there,) = shared.read([("tenant", "large-7")])
        assert there is not None
        assert there.response == response
        fast.abandon()

    asyncio.run(main())


@given(
    now=floats(1.6e9, 2.5e9),
    lease=floats(0.001, 86_400.0),
    retention=floats(0.001, 40_000_000.0),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_times_are_those_of_the_database_to_the_microsecond(
    now: float, lease: float, retention: float, shared: PostgresStore
) -> None:
    """They are computed here, and not sent back: a replay must say the same date as the first response."""
    asked = "SELECT date_part('epoch', t + %s * interval '1 second') FROM (SELECT to_timestamp(%s) AS t) AS x"
    for seconds in (lease, retention):
        moment = store_moment(shared, now)
        ((there,),) = shared._execute(asked, [seconds, now]).fetchall()
        assert rows.later(moment, seconds) == there


def store_moment(store: PostgresStore, now: float) -> float:
    ((moment,),) = store._execute("SELECT date_part('epoch', to_timestamp(%s))", [now]).fetchall()
    return float(moment)


# ---------------------------------------------------------------- SQLite


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
    with closing(sqlite3.connect(tmp_path / "keys.db")) as own:
        own.execute("CREATE TABLE business (id INTEGER)")
    store = SqliteStore(tmp_path / "keys.db")

    async def main() -> None:
        with pytest.raises(SchemaError):
            await SqliteInLoop(store).reserve([wanted("a")])

    asyncio.run(main())
    store.close()


class Still:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.125

    def __call__(self) -> float:
        return self.now


ENDINGS = [
    (Event.COMPLETE, RESPONSE, None),
    (Event.COMPLETE, StoredResponse(204, (), b""), None),
    (Event.COMPLETE, StoredResponse(200, (("x", 'quo"te'), ("y", "\u00e9 \U0001f600")), None), "too large to be kept"),
    (Event.COMPLETE, StoredResponse(200, (), bytes(range(256)) * 300), None),
    (Event.FAIL, StoredResponse(402, (("content-type", "text/plain"),), b"no"), None),
]


def everything(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM idempotency_keys ORDER BY scope, key").fetchall()


def test_sqlite_leaves_the_rows_that_the_store_leaves(tmp_path: Path) -> None:
    """Column for column, by way of JSON and a trigger: beginnings, and endings of all kinds."""
    clock = Still()
    fast_store, slow = (SqliteStore(tmp_path / name, clock=clock) for name in ("fast.db", "slow.db"))
    slow.check()
    fast_store.check()
    begins = [wanted(f"k-{number}", scope="t\u00e9nant") for number in range(len(ENDINGS))]

    async def main() -> None:
        fast = SqliteInLoop(fast_store)
        found = await fast.reserve(begins)
        expected = slow.reserve(begins)
        assert [each and each.record for each in found] == [each.record for each in expected]
        assert everything(fast_store.path) == everything(slow.path)
        clock.now += 7
        changes = [
            swap(there.record, event, Actor.OWNER, response=response, last_error=why)
            for there, (event, response, why) in zip(expected, ENDINGS, strict=True)
            if there.record is not None
        ]
        assert all(change.ends for change in changes)
        more = [wanted("next")]
        assert await fast.both(more, changes) == slow.both(more, changes)
        assert everything(fast_store.path) == everything(slow.path)
        fast.abandon()

    asyncio.run(main())
    fast_store.close()
    slow.close()


@pytest.mark.parametrize(("event", "response", "why"), ENDINGS)
def test_sqlite_leaves_the_row_that_the_store_leaves_alone_in_its_batch(
    tmp_path: Path, event: Event, response: StoredResponse, why: str | None
) -> None:
    """Nothing but an empty body, or no body: an empty one is not a tombstone."""
    clock = Still()
    fast_store, slow = (SqliteStore(tmp_path / name, clock=clock) for name in ("fast.db", "slow.db"))
    begin = wanted("k")
    (found,), _ = fast_store.reserve([begin]), slow.reserve([begin])
    assert found.record is not None
    change = swap(found.record, event, Actor.OWNER, response=response, last_error=why)

    async def main() -> None:
        fast = SqliteInLoop(fast_store)
        assert await fast.swap([change]) == slow.swap([change])
        fast.abandon()

    asyncio.run(main())
    assert everything(fast_store.path) == everything(slow.path)
    assert fast_store.read([("tenant", "k")]) == slow.read([("tenant", "k")])
    fast_store.close()
    slow.close()


def test_sqlite_where_not_all_rows_change_the_rows_tell(tmp_path: Path) -> None:
    """A lost lease, a key of somebody else, and beside them what went well: each gets its own answer."""
    store = SqliteStore(tmp_path / "keys.db")

    async def main() -> None:
        fast = SqliteInLoop(store)
        good, bad = (each.record for each in store.reserve([wanted("good"), wanted("bad")]))
        (theirs,) = (each.record for each in store.reserve([wanted("theirs")]))
        assert good
        assert bad
        assert theirs
        ends = [swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for record in (good, bad)]
        store.swap([swap(bad, Event.RELEASE, Actor.OWNER)])
        mine = wanted("mine")
        found, moved = await fast.both([wanted("theirs"), mine], ends)
        assert [each.record and each.record.owner for each in found] == [theirs.owner, mine.owner]
        assert moved[0] is not None
        assert (moved[0].state, moved[0].response) == (State.COMPLETED, RESPONSE)
        assert moved[1] is None
        (again,) = await fast.swap([ends[0]])
        assert again is None, "it was moved before, and not by this"
        fast.abandon()

    asyncio.run(main())
    store.close()


@pytest.mark.parametrize("column", ["owner", "state"])
def test_sqlite_ends_only_what_is_still_its_owners(tmp_path: Path, column: str) -> None:
    """Fencing (I3): taken over by another owner, or no longer in progress, nothing is written."""
    store = SqliteStore(tmp_path / "keys.db")
    (found,) = store.reserve([wanted("k")])
    assert found.record is not None
    other = {"owner": "somebody", "state": "unknown"}[column]
    with closing(sqlite3.connect(store.path)) as own, own:
        own.execute(f"UPDATE idempotency_keys SET {column} = ?", (other,))
    before = everything(store.path)
    done = swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)

    async def main() -> None:
        fast = SqliteInLoop(store)
        assert await fast.swap([done]) == [None]
        fast.abandon()

    asyncio.run(main())
    assert everything(store.path) == before
    store.close()


def test_sqlite_does_all_of_a_batch_or_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "keys.db")
    (found,) = store.reserve([wanted("old")])
    assert found.record is not None
    done = swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
    with closing(sqlite3.connect(tmp_path / "keys.db")) as other, other:
        other.execute(
            "CREATE TRIGGER refuses BEFORE INSERT ON idempotency_keys WHEN NEW.key = 'bad' "
            "BEGIN SELECT RAISE(ABORT, 'no'); END"
        )

    async def main() -> None:
        fast = SqliteInLoop(store)
        with pytest.raises(StoreUnavailable):
            await fast.both([wanted("good"), wanted("bad")], [done])
        assert [row.state if row else None for row in store.read([("tenant", "old"), ("tenant", "good")])] == [
            State.IN_PROGRESS,
            None,
        ]
        _, moved = await fast.both([wanted("good")], [done])
        assert moved[0] is not None, "the next batch is as good as any"
        fast.abandon()

    asyncio.run(main())
    store.close()


def test_sqlite_leaves_new_keys_to_the_lanes_while_the_app_has_the_file(tmp_path: Path) -> None:
    """An enlisted transaction may take as long as its handler; replays do not wait for it."""
    store = SqliteStore(tmp_path / "keys.db")
    (there,) = store.reserve([wanted("there")])
    assert there.record is not None
    done = swap(there.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)

    async def main() -> None:
        fast = SqliteInLoop(store)
        assert store.gate.acquire(0, lane=False)
        known, new = await fast.reserve([wanted("there"), wanted("new")])
        assert known is not None
        assert new is None
        with pytest.raises(LostRace):
            await fast.both([wanted("new")], [done])
        store.gate.release()
        assert all(await fast.reserve([wanted("there"), wanted("new")]))
        fast.abandon()

    asyncio.run(main())
    store.close()


@pytest.mark.parametrize("by", ["gate", "file"])
def test_sqlite_waits_for_another_writer_but_not_for_long(tmp_path: Path, by: str) -> None:
    """Behind another batch it waits its turn; who holds on is left to the lanes, soon."""
    store = SqliteStore(tmp_path / "keys.db")
    store.check()
    holder = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)

    def hold() -> None:
        if by == "gate":
            assert store.gate.acquire(0, lane=True)
        else:
            holder.execute("BEGIN IMMEDIATE")

    def let_go() -> None:
        if by == "gate":
            store.gate.release()
        else:
            holder.execute("ROLLBACK")

    async def main() -> None:
        fast = SqliteInLoop(store)
        await fast.reserve([wanted("warm")])
        hold()
        asyncio.get_running_loop().call_later(LOCK_SECONDS / 10, let_go)
        assert all(await fast.reserve([wanted("patient")]))
        hold()
        began = time.monotonic()
        with pytest.raises(LostRace if by == "gate" else StoreUnavailable):
            await fast.reserve([wanted("new")])
        assert time.monotonic() - began < store.timeout / 2
        let_go()
        fast.abandon()

    asyncio.run(main())
    assert store.read([("tenant", "new")]) == [None]
    holder.close()
    store.close()


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
def test_sqlite_sends_by_the_lanes_what_json_cannot_carry(tmp_path: Path, text: str) -> None:
    """SQLite would cut the text at the NUL, and store it."""
    store = SqliteStore(tmp_path / "keys.db")
    store.check()

    async def main() -> None:
        fast = SqliteInLoop(store)
        with pytest.raises(StoreError) as raised:
            await fast.both([wanted("good"), wanted("bad", scope=text)], [])
        assert not isinstance(raised.value, StoreUnavailable), "that would be the store's fault"
        fast.abandon()

    asyncio.run(main())
    assert everything(store.path) == []
    store.close()


def test_sqlite_believes_no_commit_into_a_file_that_is_gone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "keys.db")
    store.check()

    async def main() -> None:
        fast = SqliteInLoop(store)
        await fast.both([wanted("before")], [])
        (tmp_path / "keys.db").rename(tmp_path / "elsewhere.db")
        with pytest.raises(StoreUnavailable, match="removed or replaced"):
            await fast.both([wanted("lost")], [])
        fast.abandon()

    asyncio.run(main())
    store.close()


@pytest.mark.parametrize("instead", [False, True])
def test_sqlite_opens_no_other_file_than_the_stores(tmp_path: Path, instead: bool) -> None:
    """Moved away before the loop's first look: an empty one in its place would make every key a first request, and
    delete the log of the one that comes back."""
    store = SqliteStore(tmp_path / "keys.db")
    (found,) = store.reserve([wanted("there")])
    other = SqliteStore(tmp_path / "other.db")
    other.check()
    other.close()
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    if instead:
        (tmp_path / "other.db").rename(tmp_path / "keys.db")

    async def main() -> None:
        fast = SqliteInLoop(store)
        for ask in (fast.reserve([wanted("there")]), fast.both([wanted("new")], [])):
            with pytest.raises(StoreUnavailable):
                await ask
        assert (tmp_path / "keys.db").exists() is instead
        (tmp_path / "away.db").rename(tmp_path / "keys.db")
        (again,) = await fast.reserve([wanted("there")])
        assert again is not None
        assert again.record is not None
        assert found.record is not None
        assert again.record.owner == found.record.owner
        fast.abandon()

    asyncio.run(main())
    store.close()


def test_sqlite_a_disk_that_hangs_is_given_up_in_time_and_what_waited_is_not_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was given up went to the lanes, and may have been undone there: a late reservation would be nobody's."""
    store = SqliteStore(tmp_path / "keys.db", timeout=0.3)
    store.check()
    over = threading.Event()
    apply = batch.apply

    def hangs(*args: Any) -> bool:
        over.wait(10.0)
        return apply(*args)

    async def main() -> None:
        fast = SqliteInLoop(store)
        await fast.reserve([wanted("warm")])
        monkeypatch.setattr(batch, "apply", hangs)
        for key in ("stuck", "behind"):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="took over"):
                await fast.both([wanted(key)], [])
            assert time.monotonic() - began < 5
        monkeypatch.setattr(batch, "apply", apply)
        over.set()
        assert all(await fast.reserve([wanted("after")]))
        stuck, behind = store.read([("tenant", "stuck"), ("tenant", "behind")])
        assert stuck is not None, "it was under way, and the gate made the lanes wait for it"
        assert behind is None
        fast.abandon()

    asyncio.run(main())
    store.close()


def test_sqlite_a_cancelled_verb_harms_no_other(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "keys.db")
    store.check()

    async def main() -> None:
        fast = SqliteInLoop(store)
        for number in range(20):
            asking = asyncio.create_task(fast.both([wanted(f"left-{number}")], []))
            await asyncio.sleep(0.0002 * number)
            asking.cancel()
            mine = wanted(f"stays-{number}")
            (found,) = await fast.reserve([mine])
            assert found is not None
            assert found.record is not None
            assert found.record.owner == mine.owner
            assert asking.cancelled() or asking.done()
        fast.abandon()

    asyncio.run(main())
    store.close()
