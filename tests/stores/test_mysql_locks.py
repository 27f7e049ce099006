"""No verb on MySQL waits for an app's open transaction, hangs with the server, or takes a lost answer for a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pymysql
import pytest

from oncekey.core.audit import Audit
from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import SchemaError, StoreError, StoreUnavailable
from oncekey.stores.api import Duty
from oncekey.stores.mysql import MysqlStore, address, migrate
from oncekey.stores.mysql.connection import Connection
from oncekey.stores.mysql.packets import PACKAGE
from oncekey.stores.sql import queries
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST, MysqlServer
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.mysql import complete, holding, older, opened, put, run

pytestmark = pytest.mark.stores

KEY_1 = "WHERE scope = 'tenant-1' AND `key` = 'key-1'"


@pytest.fixture
def store(ready_mysql: str) -> Iterator[MysqlStore]:
    with opened(ready_mysql, timeout=3.0) as store:
        yield store


@pytest.fixture
def patient(ready_mysql: str) -> Iterator[MysqlStore]:
    """A store that would wait half a minute for a lock: a call that ends sooner has not waited."""
    with opened(ready_mysql, timeout=30.0, lock_timeout=30.0) as store:
        yield store


# -- locks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        f"SELECT 1 FROM idempotency_keys {KEY_1} FOR UPDATE",
        f"UPDATE idempotency_keys SET last_error = 'changed' {KEY_1}",
    ],
)
def test_reserve_and_swap_do_not_wait_for_a_row_of_an_open_transaction(patient: MysqlStore, statement: str) -> None:
    """An enlisted transaction holds its key's row: the others of the batch are served, and it counts as busy."""
    held, free = put(patient, "key-1", "key-2")
    with holding(patient.url, statement):
        began = time.monotonic()
        found = patient.reserve([reservation("key-1"), reservation("key-2"), reservation("key-3")])
        moved = patient.swap([complete(held), complete(free)])
        took = time.monotonic() - began
    assert [each.record and each.record.key for each in found] == ["key-1", "key-2", "key-3"]
    assert found[0].record is not None
    assert found[0].record.last_error is None
    assert [each and each.state for each in moved] == [None, State.COMPLETED]
    assert took < 10, "the store would wait for 30 s"


def test_upkeep_does_not_wait_for_a_row_of_an_open_transaction(patient: MysqlStore) -> None:
    held, free = put(patient, "key-1", "key-2")
    patient.swap([complete(held), complete(free)])
    older(patient.url, 100_000.0)
    with holding(patient.url, f"SELECT 1 FROM idempotency_keys {KEY_1} FOR UPDATE"):
        began = time.monotonic()
        assert {row.key for row in patient.due(Duty.EXPIRED, 10)} == {"key-1", "key-2"}
        assert patient.purge(10) == 1
        assert time.monotonic() - began < 10, "the store would wait for 30 s"
    assert patient.purge(10) == 1


def test_reserve_tells_busy_while_a_rival_inserts_the_key(store: MysqlStore) -> None:
    """A transaction that has inserted the row and is not over: neither mine nor seen, within the time limit."""
    (record,) = put(store, "key-1")
    copied = "scope, `key`, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until"
    rest = "created_at, retention_seconds, expires_at"
    other = copied.replace("`key`", "'key-2'")
    text = f"INSERT INTO idempotency_keys ({copied}, {rest}) SELECT {other}, {rest} FROM idempotency_keys {KEY_1}"
    with holding(store.url, text) as rival:
        try:
            (found,) = store.reserve([reservation("key-2")])
            assert found.busy
        except StoreUnavailable:
            pass
        rival.commit()
    (found,) = store.reserve([reservation("key-2")])
    assert found.record is not None
    assert found.record.owner == record.owner


def test_deadlock_is_sent_again(store: MysqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends one of two transactions that wait for each other. (Which one is not ours to say.)"""
    real = Connection.run
    raised: list[str] = []

    def deadlock_first(self: Connection, text: str) -> list[object]:
        if "SKIP LOCKED" in text and not raised:
            raised.append(text)
            raise pymysql.OperationalError(1213, "Deadlock found when trying to get lock; try restarting transaction")
        return real(self, text)

    (record,) = put(store, "key-1")
    monkeypatch.setattr(Connection, "run", deadlock_first)
    (moved,) = store.swap([complete(record)])
    assert moved is not None
    assert len(raised) == 1


def test_lanes_of_many_threads_that_move_the_same_rows_lose_no_move(ready_mysql: str) -> None:
    """Eight threads move the same 30 rows, in batches: each row is moved by exactly one."""
    with opened(ready_mysql) as store:
        records = put(store, *(f"key-{number:02d}" for number in range(30)))
        moved: list[list[str]] = [[] for _ in range(8)]

        def move(number: int) -> None:
            for at in range(0, 30, 5):
                changes = [complete(record) for record in records[at : at + 5]]
                moved[number] += [row.key for row in store.swap(changes) if row is not None]
            store.disconnect()

        threads = [threading.Thread(target=move, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(key for each in moved for key in each) == [record.key for record in records]


# -- a server that hangs, refuses, cuts -------------------------------------------------------------------------------


VERBS = {
    "reserve": lambda store: store.reserve([reservation("key-9")]),
    "swap": lambda store: store.swap([complete(reservation("key-1").record(0.0))]),
    "read": lambda store: store.read([("tenant-1", "key-1")]),
    "due": lambda store: store.due(Duty.LEASES, 10),
    "purge": lambda store: store.purge(10),
    "claim": lambda store: store.claim("worker", ["task"], 10, 60.0),
    "counts": lambda store: store.counts(),
}


@pytest.fixture
def proxy(mysql_server: MysqlServer) -> Iterator[TcpProxy]:
    with TcpProxy(HOST, mysql_server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.stores
def test_verb_ends_in_time_if_the_server_hangs(mysql_server: MysqlServer, ready_mysql: str, verb: str) -> None:
    with opened(ready_mysql, timeout=1.0) as store:
        put(store, "key-1")
        mysql_server.pause()
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                VERBS[verb](store)
            took = time.monotonic() - began
        finally:
            mysql_server.resume()
        assert took < 10, "a server that hangs never answers"
        assert store.read([("tenant-1", "key-1")])[0] is not None, "and the next verb works"


def test_server_that_refuses_is_unavailable_and_its_password_is_not_told() -> None:
    with opened("mysql://root:secret@127.0.0.1:1/db", timeout=1.0) as store:
        with pytest.raises(StoreUnavailable, match="start it, or correct the address") as caught:
            store.reserve([reservation("key-1")])
        assert "secret" not in str(caught.value)


def test_wrong_database_and_wrong_user_say_what_to_correct(mysql_server: MysqlServer) -> None:
    with opened(mysql_server.url_of("no_such_database")) as store, pytest.raises(StoreUnavailable, match="create that"):
        store.check()
    stranger = f"mysql://stranger:secret@{HOST}:{mysql_server.port}/mysql"
    with opened(stranger) as store, pytest.raises(StoreUnavailable, match="name or password"):
        store.check()


def test_database_without_tables_says_what_to_run(mysql_url: str) -> None:
    with opened(mysql_url) as store, pytest.raises(SchemaError, match="oncekey migrate"):
        store.reserve([reservation("key-1")])


def test_migration_that_was_cut_off_goes_on(mysql_url: str) -> None:
    """DDL commits by itself: half of the tables exist, and nothing says so."""
    script = list(migrate.statements(queries.migrations(PACKAGE)[0].sql))
    for cut in range(1, len(script), 5):
        run(
            mysql_url,
            *(f"DROP TABLE IF EXISTS {name}" for name in (*queries.tables(PACKAGE), "oncekey_schema")),
        )
        run(mysql_url, *script[:cut])
        with opened(mysql_url) as store:
            assert store.migrate() == ["0001_tables"]
            assert put(store, "key-1")
            assert all(each.level.value != "fail" for each in store.diagnose() if each.check in ("schema", "indexes"))


def test_commit_whose_answer_is_lost_is_found_by_its_owner(ready_mysql: str, proxy: TcpProxy) -> None:
    """The packet reaches the server, its answer does not reach the client: the row has the owner's token."""
    with opened(proxy.rewrite(ready_mysql), timeout=1.0) as store:
        (record,) = put(store, "key-1")
        proxy.hang("to_client")
        with pytest.raises(StoreUnavailable):
            store.swap([complete(record)])
        proxy.pass_through()
        (row,) = store.read([("tenant-1", "key-1")])
        assert row is not None
        assert (row.state, row.owner, row.response) == (State.COMPLETED, record.owner, RESPONSE)


def test_packet_that_does_not_arrive_changes_nothing(ready_mysql: str, proxy: TcpProxy) -> None:
    with opened(proxy.rewrite(ready_mysql), timeout=3.0) as store:
        (record,) = put(store, "key-1")
        proxy.cut_on("to_server", b"SKIP LOCKED")
        with pytest.raises(StoreUnavailable):
            store.swap([complete(record)])
        (row,) = store.read([("tenant-1", "key-1")])
        assert row is not None
        assert row.state is State.IN_PROGRESS


# -- what is stored -----------------------------------------------------------------------------------------------


def test_response_that_exceeds_the_packet_becomes_a_tombstone(
    ready_mysql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(ready_mysql) as store:
        big, small = put(store, "big", "small")
        monkeypatch.setattr(store._connection(), "max_packet", 200_000)
        answer = StoredResponse(201, (("content-type", "text/plain"),), b"\0" * 150_000)
        moved = store.swap([swap(big, Event.COMPLETE, Actor.OWNER, response=answer), complete(small)])
        assert [row and row.state for row in moved] == [State.COMPLETED, State.COMPLETED]
        rows = store.read([("tenant-1", "big"), ("tenant-1", "small")])
        assert rows[0] is not None
        assert rows[0].response == replace(answer, body=None)
        assert moved[0] is not None
        assert moved[0].response == rows[0].response
        assert rows[1] is not None
        assert rows[1].response == RESPONSE


def test_batch_that_exceeds_the_packet_is_refused_before_it_is_sent(
    ready_mysql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane then sends its rows one by one."""
    with opened(ready_mysql) as store:
        records = put(store, *(f"key-{number}" for number in range(4)))
        monkeypatch.setattr(store._connection(), "max_packet", 200_000)
        answers = [StoredResponse(201, (), b"%d" % number * 80_000) for number in range(4)]  # equal ones are sent once
        changes = [
            swap(record, Event.COMPLETE, Actor.OWNER, response=answer)
            for record, answer in zip(records, answers, strict=True)
        ]
        with pytest.raises(StoreError, match="max_allowed_packet"):
            store.swap(changes)
        assert {row and row.state for row in store.read([("tenant-1", f"key-{n}") for n in range(4)])} == {
            State.IN_PROGRESS
        }


@pytest.mark.parametrize(
    "text", ["it's", 'say "hi"', "back\\slash", "%s %(x)s :name {now}", "nul\0", "é🔑", "-- /* */ ;"]
)
def test_text_of_any_kind_is_stored_as_it_is(ready_mysql: str, text: str) -> None:
    with opened(ready_mysql) as store:
        wanted = replace(reservation(f"key {text}"), operation=f"POST /{text}", scope=f"scope {text}")
        record = store.reserve([wanted])[0].record
        assert record is not None
        audit = Audit("ana", text)
        assert store.swap([swap(record, Event.RELEASE, Actor.OWNER, last_error=text, audit=audit)]) != [None]
        (row,) = store.read([(wanted.scope, wanted.key)])
        assert row is not None
        assert (row.operation, row.last_error) == (wanted.operation, text)
        assert [line.why for line in store.audit(wanted.scope, wanted.key, 1)] == [text]


def test_text_that_is_not_unicode_is_refused(ready_mysql: str) -> None:
    with opened(ready_mysql) as store, pytest.raises(StoreError, match="not valid Unicode"):
        store.reserve([reservation("\udc80")])


# -- sessions and addresses ---------------------------------------------------------------------------------------


def test_sessions_do_not_depend_on_the_servers_defaults(mysql_url: str) -> None:
    """sql_mode, time zone and isolation are set by the server for everyone else; oncekey's are its own."""
    before = run(mysql_url, "SELECT @@global.sql_mode, @@global.time_zone")[0]
    run(mysql_url, "SET GLOBAL sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'", "SET GLOBAL time_zone = '+05:00'")
    try:
        with opened(mysql_url) as store:
            store.migrate()
            (record,) = put(store, "it's")
            assert abs(record.now - time.time()) < 60
            assert store.swap([complete(record)]) != [None]
    finally:
        run(mysql_url, f"SET GLOBAL sql_mode = '{before[0]}'", f"SET GLOBAL time_zone = '{before[1]}'")


def test_url_with_several_hosts_uses_the_one_that_answers(mysql_server: MysqlServer, ready_mysql: str) -> None:
    name = ready_mysql.rpartition("/")[2]
    with opened(f"mysql://root@127.0.0.1:1,127.0.0.1:{mysql_server.port}/{name}") as store:
        assert put(store, "key-1")


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("mysql://u:p%40@db/app", (("db", 3306),)),
        ("mysql://u@one:1,two,[::1]:3/app", (("one", 1), ("two", 3306), ("::1", 3))),
        ("mysql://u@/app?unix_socket=/run/s.sock&charset=utf8mb4", (("localhost", 3306),)),
    ],
)
def test_url_is_read(url: str, hosts: tuple[tuple[str, int], ...]) -> None:
    read = address.parse(url)
    assert read.hosts == hosts
    assert read.database == "app"
    assert "p@" not in read.where


@pytest.mark.parametrize("url", ["mysql://host", "mysql:///app", "mysql://u@host:x/app", "mysql://u@h/app?sslmode=on"])
def test_url_that_cannot_be_read_says_how_to_write_it(url: str) -> None:
    from oncekey.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="MySQL URL"):
        MysqlStore(url)
