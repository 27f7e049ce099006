"""PostgreSQL's hot verbs in an event loop: the same answers as the store's own, in time or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import floats

from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import StoreError, StoreUnavailable
from oncekey.stores.api import LostRace
from oncekey.stores.postgres import PostgresStore, packing, rows
from oncekey.stores.postgres.in_loop import _END, _RESERVE, InLoop
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import PostgresServer
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.begun_keys import completion, reserved
from tests.stores.wholes import check_recipes, moved_by, moves_of, reserved_by, rows_of

RIVAL = """
INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner,
                              lease_until, created_at, retention_seconds, expires_at)
VALUES ('tenant-1', 'raced', 'POST /', 'x', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 60, now())
"""


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
async def fast(store: PostgresStore) -> AsyncIterator[InLoop]:
    made = InLoop(store)
    yield made
    made.abandon()


@pytest.fixture
def shared(postgres_url: str) -> Iterator[PostgresStore]:
    made = PostgresStore(postgres_url)
    made.migrate()
    yield made
    made.close()


async def test_gives_the_answers_of_the_store(store: PostgresStore, fast: InLoop) -> None:
    """New, found, moved, not moved: record for record what the blocking verbs say."""
    mine = [reservation("b"), reservation("a"), reservation("c")]
    found = await reserved_by(fast, mine)
    assert [row and row.owner for row in found] == [one.owner for one in mine]
    first, second, third = found
    assert first
    assert second
    assert third
    done = completion(first)
    lost = completion(second)
    store.swap([swap(second, Event.RELEASE, Actor.OWNER)])
    moved = await moved_by(fast, [done, lost])
    assert moved[0] is not None
    assert moved[0].state is State.COMPLETED
    assert moved[1] is None
    again = await reserved_by(fast, [reservation("b"), reservation("c")])
    read = store.read([("tenant-1", "b"), ("tenant-1", "c")])
    for here, there in zip(again, read, strict=True):
        assert here is not None
        assert there is not None
        assert (here.owner, here.state, here.response, here.expires_at) == (
            there.owner,
            there.state,
            there.response,
            there.expires_at,
        )


async def test_no_row_counts_as_moved_if_the_owner_lost_them_all(store: PostgresStore, fast: InLoop) -> None:
    """Fencing (I3): a batch of which nothing is moved, in the loop and in a thread."""
    lost = [reserved(store, key) for key in ("a", "b")]
    store.swap([swap(record, Event.RELEASE, Actor.OWNER) for record in lost])
    for ends in ([completion(record) for record in lost], [completion(lost[0])]):
        assert await fast.swap(ends) == [None] * len(ends)
        assert store.swap(ends) == [None] * len(ends)


async def test_lost_race_is_raised_and_keeps_the_connection(
    store: PostgresStore, fast: InLoop, postgres_url: str
) -> None:
    """A rival inserts one of the keys between our look and our insert: here, by a transaction that commits late."""
    await fast.reserve([reservation("warm")])
    connection = fast._connection
    with psycopg.connect(postgres_url) as rival:
        rival.execute(RIVAL)
        asking = asyncio.create_task(fast.reserve([reservation("raced"), reservation("other")]))
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with psycopg.connect(postgres_url, autocommit=True) as look:
            while look.execute(waiting).fetchone() == (0,):
                await asyncio.sleep(0.01)
        rival.commit()
    with pytest.raises(LostRace):
        await asking
    assert fast._connection is connection
    assert (await fast.reserve([reservation("after")]))[0] is not None


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_connection_cut_while_idle_is_replaced_without_an_error(
    store: PostgresStore, proxy: TcpProxy, loops: str
) -> None:
    """The loop hears of it before the next verb, which opens another connection."""

    async def ask() -> None:
        fast = InLoop(store)
        raised: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        await fast.reserve([reservation("a")])
        await asyncio.to_thread(proxy.cut)
        async with asyncio.timeout(5):
            while fast._connection is not None:
                await asyncio.sleep(0.01)
        assert (await fast.reserve([reservation("b")]))[0] is not None
        fast.abandon()
        assert raised == []

    with asyncio.Runner(loop_factory=pytest.importorskip(loops).new_event_loop) as runner:
        runner.run(ask())


async def test_connection_cut_during_a_verb_is_dropped_and_the_next_verb_opens_another(
    store: PostgresStore, fast: InLoop, proxy: TcpProxy
) -> None:
    await fast.reserve([reservation("a")])
    await asyncio.to_thread(proxy.hang, "to_client")
    asking = asyncio.create_task(fast.reserve([reservation("b")]))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(proxy.cut)
    with pytest.raises((psycopg.Error, StoreUnavailable)):
        await asking
    assert fast._connection is None
    await asyncio.to_thread(proxy.pass_through)
    assert (await fast.reserve([reservation("c")]))[0] is not None


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_loop_watches_no_socket_after_abandon_in_any_thread(shared: PostgresStore, loops: str) -> None:
    """A socket that is closed while its loop watches it may be another connection's next, under the same number."""

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        for leave in (lambda fast: fast.abandon(), lambda fast: asyncio.to_thread(fast.abandon)):
            fast = InLoop(shared)
            await fast.reserve([reservation("a")])
            assert fast._connection is not None
            pgconn, socket = fast._connection.pgconn, fast._connection.pgconn.socket
            left = leave(fast)
            if left is not None:
                await left
            await asyncio.sleep(0)
            assert fast._connection is None
            assert pgconn.status == psycopg.pq.ConnStatus.BAD
            assert not loop.remove_reader(socket)

    with asyncio.Runner(loop_factory=pytest.importorskip(loops).new_event_loop) as runner:
        runner.run(ask())


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_connection_of_a_loop_that_is_closed_is_closed_too(shared: PostgresStore, loops: str) -> None:
    fast = InLoop(shared)
    with asyncio.Runner(loop_factory=pytest.importorskip(loops).new_event_loop) as runner:
        runner.run(fast.reserve([reservation("a")]))
    assert fast._connection is not None
    pgconn = fast._connection.pgconn
    fast.abandon()
    assert pgconn.status == psycopg.pq.ConnStatus.BAD


async def test_a_server_that_says_nothing_is_given_up_in_time(
    store: PostgresStore, fast: InLoop, proxy: TcpProxy
) -> None:
    """The store's time limit holds here too, and the loop goes on meanwhile."""
    await fast.reserve([reservation("a")])
    await asyncio.to_thread(proxy.hang)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(fast.reserve([reservation("b")]), 20)
    assert time.monotonic() - began < 15
    assert fast._connection is None


async def test_a_cancelled_verb_leaves_no_answer_behind(store: PostgresStore, fast: InLoop, proxy: TcpProxy) -> None:
    """Its answer may still come: it must not be read as the answer to the next question (hazard 4)."""
    await fast.reserve([reservation("a")])
    await asyncio.to_thread(proxy.hang, "to_client")
    asking = asyncio.create_task(fast.reserve([reservation("cancelled")]))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.to_thread(proxy.pass_through)
    assert fast._connection is None
    (found,) = await reserved_by(fast, [reservation("b")])
    assert found is not None
    assert found.key == "b"


async def test_nothing_of_an_answer_is_kept_and_nothing_of_a_connection(store: PostgresStore, fast: InLoop) -> None:
    """How to read a column is remembered for a connection; neither megabytes of bodies nor another one's types are."""
    end = completion(reserved(store, "a"))
    await fast.both([reservation("b")], [end])
    assert [reader.pgresult for reader in fast._readers.values()] == [None, None]
    fast.abandon()
    assert fast._readers == {}


async def test_completions_and_reservations_are_one_transaction(store: PostgresStore, fast: InLoop) -> None:
    """One commit for both. A reservation of a key that is completed in the same batch gets its response."""
    ends = [completion(reserved(store, key)) for key in ("a", "b")]
    begins = [reservation("new"), reservation("a")]
    found, moved = await fast.both(begins, ends)
    assert [record and record.state for record in moves_of(ends, moved)] == [State.COMPLETED, State.COMPLETED]
    new, again = rows_of(begins, found)
    assert new
    assert again
    assert (new.state, again.response) == (State.IN_PROGRESS, RESPONSE)
    numbers = store._execute("SELECT xmin FROM idempotency_keys WHERE key IN ('a', 'b', 'new')", None).fetchall()
    assert len(numbers) == 3
    assert len(set(numbers)) == 1


async def test_a_commit_that_fails_is_not_taken_for_done(store: PostgresStore, fast: InLoop, postgres_url: str) -> None:
    """Every statement has answered, and then the commit fails: here by a check that the database makes at its end."""
    end = completion(reserved(store, "a"))
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not today'; END $$"
        )
        admin.execute(
            "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON idempotency_keys "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        with pytest.raises(StoreError, match="P0001"):
            await fast.both([reservation("b")], [end])
        with pytest.raises(StoreError, match="P0001"):
            await fast.reserve([reservation("b")])
        admin.execute("DROP TRIGGER refuse ON idempotency_keys")
    there, absent = store.read([("tenant-1", "a"), ("tenant-1", "b")])
    assert there is not None
    assert there.state is State.IN_PROGRESS
    assert absent is None


async def test_a_race_that_is_lost_undoes_the_ends_of_the_batch_too(store: PostgresStore, fast: InLoop) -> None:
    """All or nothing: the lanes are asked about both."""
    end = completion(reserved(store, "a"))
    twins = [reservation("twin"), reservation("twin")]
    with pytest.raises(LostRace):  # the same key twice stands for a rival's
        await fast._ask((_END, packing.ends([end])), (_RESERVE, packing.reservations(twins)))
    (record,) = store.read([("tenant-1", "a")])
    assert record is not None
    assert record.state is State.IN_PROGRESS
    assert (await fast.swap([end]))[0] is not None, "the connection is as good as before"


async def test_key_in_an_open_transaction_does_not_delay_the_batch(shared: PostgresStore, postgres_url: str) -> None:
    """Ends wait with the begins of their batch, so it gives up soon, as if a race was lost: the lanes have patience."""
    shared.timeout = shared.lock_timeout = 30.0
    fast = InLoop(shared)
    end = completion(reserved(shared, "a"))
    await fast.reserve([reservation("warm")])
    connection = fast._connection
    with psycopg.connect(postgres_url) as rival:
        rival.execute(RIVAL)
        began = time.monotonic()
        with pytest.raises(LostRace):
            await fast.both([reservation("raced")], [end])
        assert time.monotonic() - began < 10, "a lane would wait for 30 s"
    assert fast._connection is connection
    assert (await fast.swap([end]))[0] is not None
    fast.abandon()


async def test_a_server_that_ends_the_connection_is_noticed_at_once(
    store: PostgresStore, fast: InLoop, postgres_url: str
) -> None:
    """An administrator, a restart: its last words are no answer, and no reason to wait for one."""
    await fast.reserve([reservation("a")])
    assert fast._connection is not None
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(30); RETURN NEW; END $$"
        )
        admin.execute("CREATE TRIGGER dawdle BEFORE INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION dawdle()")
        asking = asyncio.create_task(fast.reserve([reservation("b")]))
        await asyncio.sleep(0.1)
        admin.execute("SELECT pg_terminate_backend(%s)", [fast._connection.pgconn.backend_pid])
        with pytest.raises((psycopg.Error, StoreError)) as ended:
            await asyncio.wait_for(asking, 0.8)  # the store's own limit is a second
    assert "in time" not in str(ended.value)
    assert fast._connection is None


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_connection_ended_while_idle_is_noticed_at_once(shared: PostgresStore, postgres_url: str, loops: str) -> None:
    """``idle_session_timeout``, a failover. uvloop says only once that there is something to read: the last words, and
    not the end of the stream behind them."""

    async def ask() -> float:
        fast = InLoop(shared)
        await fast.reserve([reservation(f"{loops}-1")])
        assert fast._connection is not None
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [fast._connection.pgconn.backend_pid])
        began = time.monotonic()
        with pytest.raises((psycopg.Error, StoreError)):
            await fast.reserve([reservation(f"{loops}-2")])
        fast.abandon()
        return time.monotonic() - began

    with asyncio.Runner(loop_factory=pytest.importorskip(loops).new_event_loop) as runner:
        assert runner.run(ask()) < shared.timeout / 2


async def test_more_than_the_socket_takes_at_once(shared: PostgresStore, proxy: TcpProxy) -> None:
    """Large responses: sent in pieces, while the loop goes on."""
    shared.timeout = 30.0
    shared.url = proxy.rewrite(shared.url)
    fast = InLoop(shared)
    found = await reserved_by(fast, [reservation(f"large-{number}") for number in range(8)])
    response = StoredResponse(200, (), b"x" * 1_000_000)
    ends = [swap(row, Event.COMPLETE, Actor.OWNER, response=response) for row in found if row]
    await asyncio.to_thread(proxy.hang)
    moving = asyncio.create_task(fast.swap(ends))
    for _ in range(10):  # turns of the loop, until the server may answer
        await asyncio.sleep(0.001)
    assert not moving.done()
    await asyncio.to_thread(proxy.pass_through)
    assert all(await moving)
    (there,) = shared.read([("tenant-1", "large-7")])
    assert there is not None
    assert there.response == response
    fast.abandon()


@given(
    now=floats(1.6e9, 2.5e9),
    lease=floats(0.001, 86_400.0),
    retention=floats(0.001, 40_000_000.0),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


async def test_recipes_go_by_the_fast_way_too(store: PostgresStore, fast: InLoop) -> None:
    await check_recipes(store, fast)
