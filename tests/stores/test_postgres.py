"""PostgreSQL against the public suite, and what is PostgreSQL's own: deadlines, locks, settings, schema, encodings.

The faults are real: a server that is stopped or killed, a network that hangs or is cut, transactions that stay open.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import errors, sql

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.decision import Execute
from oncekey.core.record import Found, Record, Reservation, StoredResponse, swap
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailable
from oncekey.stores import sqlfiles
from oncekey.stores.base import Duty, Store
from oncekey.stores.postgres import PostgresStore, arrays, connection
from oncekey.stores.postgres import store as postgres_store
from oncekey.stores.postgres.connection import DeadlineConnection, explain
from oncekey.testing.company import Child
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST, PostgresServer, ServerUnavailable, free_port
from oncekey.testing.store_suite import StoreSuite
from tests import databases
from tests.engine.doubles import PATIENCE, RESPONSE, eventually, record_of, reservation
from tests.engine.test_lanes_ending import FORK_RESULT, FORK_SCRIPT
from tests.stores import test_stores_agree

_numbers = count(1)

MIGRATIONS = [f"{one.number:04d}_{one.name}" for one in sqlfiles.migrations("oncekey.stores.postgres")]

OLDER = """
UPDATE idempotency_keys SET
    lease_until = lease_until - {seconds} * interval '1 second',
    expires_at = expires_at - {seconds} * interval '1 second',
    reconcile_at = reconcile_at - {seconds} * interval '1 second',
    created_at = created_at - {seconds} * interval '1 second',
    finished_at = finished_at - {seconds} * interval '1 second'
"""


def older(url: str, seconds: float, scope: str | None = None, key: str | None = None) -> None:
    """Let time pass for one row, or for all."""
    statement = sql.SQL(OLDER).format(seconds=sql.Literal(seconds))
    if scope is not None:
        statement += sql.SQL("WHERE scope = {} AND key = {}").format(sql.Literal(scope), sql.Literal(key))
    with databases.beside(url) as own:
        own.execute(statement)


# ---------------------------------------------------------------- what every store does


@pytest.fixture(scope="session")
def _shared_url(postgres_server: PostgresServer) -> Iterator[str]:
    yield postgres_server.database("shared")
    postgres_server.drop_database("shared")


@pytest.fixture
def url(_shared_url: str) -> str:
    """A database without our tables: the same for many tests, since making one takes longer than most of them."""
    empty(_shared_url)
    return _shared_url


def empty(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as own:
        own.execute(
            "DROP TABLE IF EXISTS idempotency_keys, idempotency_steps, idempotency_outbox, idempotency_audit, "
            "oncekey_schema"
        )


class TestPostgresStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _database(self, request: pytest.FixtureRequest) -> None:
        """Our tables are there, but for the tests that make them."""
        self.url = request.getfixturevalue("url" if "migrating" in request.node.name else "ready_url")

    def make_store(self) -> PostgresStore:
        return PostgresStore(self.url)

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        older(self.url, seconds, scope, key)


class PostgresAgrees(test_stores_agree.StoresAgree):
    exact = False
    url: str

    def make_store(self, clock: Callable[[], float]) -> Store:
        databases.empty(self.url)
        return PostgresStore(self.url)

    def tick(self, seconds: float) -> None:
        older(self.url, seconds)


@pytest.mark.timeout(240)  # many small transactions on a real server: slow on a busy machine
def test_it_does_what_the_model_does(ready_url: str) -> None:
    """Random moves against PostgreSQL and the dictionary: every answer and every row is the same."""
    from hypothesis.stateful import run_state_machine_as_test

    PostgresAgrees.url = ready_url
    run_state_machine_as_test(
        PostgresAgrees,
        settings=settings(
            max_examples=8,
            stateful_step_count=20,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ---------------------------------------------------------------- shared by what follows


@pytest.fixture
def store(ready_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(ready_url)
    store.migrate()
    yield store
    store.close()


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy(HOST, postgres_server.port) as proxy:
        yield proxy


@contextmanager
def opened(url: str, **options: Any) -> Iterator[PostgresStore]:
    """Another store over the same database; it is closed at the end."""
    store = PostgresStore(url, **options)
    try:
        yield store
    finally:
        store.close()


def put(store: PostgresStore, *keys: str) -> list[Record]:
    """New rows in progress."""
    records = [found.record for found in store.reserve([reservation(key) for key in keys])]
    assert all(records)
    return records  # type: ignore[return-value]


def complete(record: Record) -> Any:
    return swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)


def row(store: PostgresStore, key: str) -> Record | None:
    return store.read([("tenant-1", key)])[0]


def backend(store: PostgresStore) -> int:
    """The server's process behind this thread's connection."""
    return store._connection().info.backend_pid


def show(store: PostgresStore, name: str) -> str:
    found = store._connection(checked=False).execute(f"SHOW {name}").fetchone()
    assert found is not None
    return str(found[0])


def took(call: Callable[[], Any]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


_KNOWN = record_of(reservation("there"))
STEP = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=True)

VERBS: dict[str, Callable[[PostgresStore], Any]] = {
    "reserve": lambda store: store.reserve([reservation("new")]),
    "swap": lambda store: store.swap([complete(_KNOWN)]),
    "discard": lambda store: store.swap([swap(_KNOWN, Event.DISCARD, Actor.OWNER)]),
    "step": lambda store: store.swap([swap(_KNOWN, Event.ADVANCE, Actor.OWNER, step=STEP)]),
    "read": lambda store: store.read([("tenant-1", "there")]),
    "steps": lambda store: store.steps([StepsOf("tenant-1", "there")]),
    "audit": lambda store: store.audit("tenant-1", "there", 1),
    "find": lambda store: store.find(provider_id="ch_1"),
    "listing": lambda store: store.listing(State.UNKNOWN),
    "counts": lambda store: store.counts(),
    "due": lambda store: store.due(Duty.LEASES, 1),
    "purge": lambda store: store.purge(1),
    "check": lambda store: store.check(),
    "migrate": lambda store: store.migrate(),
}


# ---------------------------------------------------------------- a server that does not answer


@pytest.mark.parametrize("verb", list(VERBS))
def test_a_stopped_server_is_left_in_time(postgres_server: PostgresServer, ready_url: str, verb: str) -> None:
    """Every verb ends within its limit with StoreUnavailable; the next one works, on another connection."""
    with opened(ready_url, timeout=0.4) as store:
        store.migrate()
        put(store, "there")
        before = backend(store)
        postgres_server.pause()
        begun = time.monotonic()
        try:
            with pytest.raises(StoreUnavailable, match="did not answer in time"):
                VERBS[verb](store)
            seconds = time.monotonic() - begun
        finally:
            postgres_server.resume()
        assert seconds < 2.0
        VERBS[verb](store)
        assert backend(store) != before


def test_a_network_that_hangs_is_left_in_time_from_the_first_byte(proxy: TcpProxy, ready_url: str) -> None:
    """Also connecting has a limit: the kernel accepts, and nobody answers."""
    proxy.hang()
    with opened(proxy.rewrite(ready_url), timeout=2.0) as store:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.check()
        assert time.monotonic() - begun < 3.0
        proxy.pass_through()
        store.migrate()


def test_a_verb_has_one_limit_however_many_round_trips_it_needs(
    store: PostgresStore, proxy: TcpProxy, ready_url: str
) -> None:
    """On a slow network connecting, checking and asking share the verb's time limit: they do not add up."""
    proxy.delay(0.2)
    with opened(proxy.rewrite(ready_url), timeout=1.0) as slow:

        def ask() -> None:
            try:
                slow.read([("tenant-1", "x")])
            except StoreUnavailable:
                return

        assert took(ask) < 1.9


def test_a_late_answer_is_never_the_answer_to_the_next_question(
    store: PostgresStore, proxy: TcpProxy, ready_url: str
) -> None:
    """The answer to the first question arrives after its deadline: the second question gets its own."""
    put(store, "first", "second")
    with opened(proxy.rewrite(ready_url), timeout=0.3) as lane:
        lane.check()
        before = backend(lane)
        lane.read([("tenant-1", "warm")])
        proxy.hang("to_client")
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            lane.read([("tenant-1", "first")])
        proxy.pass_through()
        found = row(lane, "second")
        assert found is not None
        assert found.key == "second"
        assert backend(lane) != before


@pytest.mark.parametrize(("when", "happened"), [("before", False), ("after", True)])
def test_a_reservation_that_is_cut_can_be_asked_for_again(
    store: PostgresStore, proxy: TcpProxy, ready_url: str, when: Any, happened: bool
) -> None:
    """The same error whether it happened or not; asked again, the row carries our own token (hazards 8 and 9)."""
    with opened(proxy.rewrite(ready_url)) as lane:
        lane.check()
        wanted = reservation("cut-this-key")
        cut = proxy.cut_on("to_server", b"cut-this-key", when=when)
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            lane.reserve([wanted])
        assert cut.wait(PATIENCE)
        if happened:
            eventually(lambda: row(store, "cut-this-key"))
        else:
            assert row(store, "cut-this-key") is None
        found = lane.reserve([wanted])[0].record
        assert found is not None
        assert found.owner == wanted.owner


@pytest.mark.parametrize(("when", "happened"), [("before", False), ("after", True)])
def test_a_completion_that_is_cut_can_be_read(
    store: PostgresStore, proxy: TcpProxy, ready_url: str, when: Any, happened: bool
) -> None:
    """Cut before: the row is in progress, and the swap works again. Cut after: it is completed, and by us."""
    (record,) = put(store, "cut-this-key")
    with opened(proxy.rewrite(ready_url)) as lane:
        lane.check()
        cut = proxy.cut_on("to_server", b"cut-this-key", when=when)
        with pytest.raises(StoreUnavailable):
            lane.swap([complete(record)])
        assert cut.wait(PATIENCE)
        if happened:
            eventually(lambda: row(store, "cut-this-key").state is State.COMPLETED)  # type: ignore[union-attr]
            assert lane.swap([complete(record)]) == [None]
        else:
            assert lane.swap([complete(record)]) != [None]
        after = row(store, "cut-this-key")
        assert after is not None
        assert (after.owner, after.response) == (record.owner, RESPONSE)


def test_a_connection_that_the_server_ended_is_replaced(store: PostgresStore, ready_url: str) -> None:
    """An operator or a timeout ends the backend: one StoreUnavailable, then a new connection."""
    before = backend(store)
    with psycopg.connect(ready_url, autocommit=True) as own:
        own.execute("SELECT pg_terminate_backend(%s)", [before])
    with pytest.raises(StoreUnavailable):
        eventually(lambda: store.read([("tenant-1", "x")]) is None)
    assert row(store, "x") is None
    assert backend(store) != before


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A durable server that nobody else uses, on which the role ``guarded`` needs a password."""
    rules = Path(tempfile.gettempdir()) / f"oncekey-hba-{os.getpid()}"
    rules.write_text(f"host all guarded {HOST}/32 scram-sha-256\nhost all all {HOST}/32 trust\n")
    rules.chmod(0o644)
    server = PostgresServer(settings={"hba_file": str(rules)})
    try:
        server.start()
    except ServerUnavailable as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        server.stop()
        rules.unlink()


def test_what_was_reserved_survives_a_killed_server(own_server: PostgresServer) -> None:
    """Every process of the server is killed right after reserve and swap returned: the rows are there (I1, I2)."""
    with opened(own_server.database("kept")) as store:
        store.migrate()
        first, second = put(store, "first", "second")
        assert store.swap([complete(second)]) != [None]
        own_server.kill()
        with pytest.raises(StoreUnavailable):
            store.read([("tenant-1", "first")])
        own_server.start()
        found = store.read([("tenant-1", "first"), ("tenant-1", "second")])
        assert [record and record.owner for record in found] == [first.owner, second.owner]
        assert [record and record.state for record in found] == [State.IN_PROGRESS, State.COMPLETED]


# ---------------------------------------------------------------- words for what went wrong


def test_a_server_that_cannot_be_used_is_named_in_one_sentence(own_server: PostgresServer) -> None:
    """Wrong password, no such database, nobody listening, no such host: one sentence, never the password."""
    own_server.execute("CREATE ROLE guarded LOGIN PASSWORD 'open-sesame'")
    at = f"{HOST}:{own_server.port}"
    urls = {
        f"postgresql://guarded:wrong-sesame@{at}/postgres": "PostgreSQL database 'postgres' at 127.0.0.1",
        f"postgresql://guarded:open-sesame@{at}/missing": "PostgreSQL database 'missing' at 127.0.0.1",
        f"postgresql://guarded:open-sesame@{HOST}:{free_port()}/x": "PostgreSQL database 'x' at 127.0.0.1",
        "postgresql://guarded:open-sesame@no-such-host.invalid/x": "database 'x' at no-such-host.invalid",
    }
    for url, name in urls.items():
        with opened(url, timeout=2.0) as store, pytest.raises(StoreUnavailable) as caught:
            store.reserve([reservation()])
        sentence = str(caught.value)
        assert name in sentence
        assert "sesame" not in f"{sentence} {caught.value.__cause__}"
        assert "\n" not in sentence
    with opened(f"postgresql://guarded:open-sesame@{at}/postgres") as store, pytest.raises(SchemaError):
        store.check()


def test_a_url_that_cannot_be_read_is_refused() -> None:
    """When the store is made, not at the first request."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        PostgresStore("postgresql://host:port:port/x?y")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (errors.UndefinedTable(), SchemaError, "has no oncekey tables"),
        (errors.UndefinedColumn(), SchemaError, "has an older oncekey schema"),
        (errors.ReadOnlySqlTransaction(), StoreUnavailable, "read-only"),
        (errors.QueryCanceled(), StoreUnavailable, "did not answer in time"),
        (errors.LockNotAvailable(), StoreUnavailable, "did not answer in time"),
        (errors.AdminShutdown(), StoreUnavailable, "is unavailable (AdminShutdown)"),
        (errors.DiskFull(), StoreUnavailable, "is unavailable (DiskFull): free some room on its disk"),
        (errors.TooManyConnections(), StoreUnavailable, "is unavailable (TooManyConnections): it takes no more"),
        (psycopg.OperationalError("too many clients already: sk_live"), StoreUnavailable, "raise max_connections"),
        (psycopg.OperationalError("is bad: no error details available"), StoreUnavailable, "limit of open files"),
        (psycopg.OperationalError("failed: Connection refused"), StoreUnavailable, "start it, or correct the address"),
        (errors.ConnectionFailure(), StoreUnavailable, "is unavailable (ConnectionFailure)"),
        (psycopg.OperationalError(), StoreUnavailable, "is unavailable (OperationalError)"),
        (psycopg.InterfaceError(), StoreUnavailable, "is unavailable (InterfaceError)"),
        (errors.UniqueViolation("Key (key)=(sk_live_1)"), StoreError, "UniqueViolation, SQLSTATE 23505"),
        (errors.DeadlockDetected(), StoreError, "DeadlockDetected, SQLSTATE 40P01"),
    ],
)
def test_every_kind_of_trouble_has_its_words(error: psycopg.Error, kind: type[Exception], words: str) -> None:
    """Which class it becomes decides what the lane does; no message quotes a value (hazard 28)."""
    explained = explain(error, "the database")
    assert type(explained) is kind
    assert words in str(explained)
    assert "sk_live" not in str(explained)


def test_a_statement_that_is_refused_keeps_its_connection(store: PostgresStore) -> None:
    """A value that PostgreSQL cannot hold is an error of that row: no new connection, no message with the value."""
    before = backend(store)
    with pytest.raises(StoreError, match="SQLSTATE 22021") as caught:
        store.reserve([reservation("secret\x00key")])
    assert not isinstance(caught.value, StoreUnavailable)
    assert "secret" not in str(caught.value)
    assert backend(store) == before


def test_a_read_only_server_is_named(store: PostgresStore) -> None:
    """As on a standby: whatever writes says that it is read-only and what to do."""
    store._connection().execute("SET default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable, match=r"is read-only \(a standby\?\): point oncekey at the primary"):
        store.reserve([reservation()])


def test_a_database_whose_default_is_read_only_works(postgres_server: PostgresServer, postgres_url: str) -> None:
    """A default for other people's sessions is not a standby."""
    _alter(postgres_server, postgres_url, "default_transaction_read_only = on")
    with opened(postgres_url) as store:
        store.migrate()
        put(store, "a")


def test_a_row_that_postgres_cannot_hold_does_not_close_the_door_for_others(ready_url: str) -> None:
    """Anybody can ask for a path with %00 in it: it fails alone, and opens no breaker for all tenants (I6)."""
    with OnceKey(ready_url, scope=SINGLE_TENANT, migrate=True) as once:
        engine = once.engine
        for number in range(6):
            bad = replace(reservation(f"bad-{number}"), operation="POST /payments\x00")
            with pytest.raises(StoreError):
                engine.run_blocking(engine.begin(bad, once.policy), PATIENCE)
        assert isinstance(engine.run_blocking(engine.begin(reservation("good"), once.policy), PATIENCE), Execute)


# ---------------------------------------------------------------- settings


def _alter(server: PostgresServer, url: str, setting: str) -> None:
    server.execute(f'ALTER DATABASE "{url.rpartition("/")[2]}" SET {setting}')


def test_a_lanes_settings_are_in_force(ready_url: str) -> None:
    """Each setting as the session shows it; statement and lock timeouts are the store's own."""
    wanted = {
        "default_transaction_isolation": "read committed",
        "transaction_isolation": "read committed",
        "default_transaction_read_only": "off",
        "statement_timeout": "3s",
        "lock_timeout": "250ms",
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
        "client_connection_check_interval": "1s",
        "synchronous_commit": "on",
        "client_encoding": "UTF8",
    }
    with opened(ready_url, timeout=3.0, lock_timeout=0.25) as store:
        assert {name: show(store, name) for name in wanted} == wanted
        parameters = store._connection(checked=False).info.get_parameters()
        assert {name: parameters[name] for name in ("connect_timeout", "keepalives_idle", "keepalives_count")} == {
            "connect_timeout": "3",
            "keepalives_idle": "5",
            "keepalives_count": "3",
        }


def test_a_commit_is_never_left_unsynchronised(postgres_server: PostgresServer, postgres_url: str) -> None:
    """``synchronous_commit = off`` would lose reservations in a crash; every other choice is the operator's."""
    shown = {}
    for default in ("off", "on", "local", "remote_write", "remote_apply"):
        _alter(postgres_server, postgres_url, f"synchronous_commit = {default}")
        with opened(postgres_url) as store:
            shown[default] = show(store, "synchronous_commit")
    assert shown == {
        "off": "on",
        "on": "on",
        "local": "local",
        "remote_write": "remote_write",
        "remote_apply": "remote_apply",
    }


def test_the_databases_isolation_does_not_matter(postgres_server: PostgresServer, postgres_url: str) -> None:
    """With SERIALIZABLE as the default, four threads that race for the same keys meet no serialization failure."""
    _alter(postgres_server, postgres_url, "default_transaction_isolation = 'serializable'")
    with opened(postgres_url) as store:
        store.migrate()
        assert show(store, "transaction_isolation") == "read committed"
        keys = [f"key-{number}" for number in range(30)]

        def race(number: int) -> list[str]:
            mine = []
            for at in range(0, 30, 5):
                wanted = [reservation(key) for key in keys[at : at + 5]]
                found = store.reserve(wanted)
                mine += [w.key for w, f in zip(wanted, found, strict=True) if f.record and f.record.owner == w.owner]
            store.disconnect()
            return mine

        with ThreadPoolExecutor(4) as pool:
            won = [key for mine in pool.map(race, range(4)) for key in mine]
        assert sorted(won) == sorted(keys)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "UTF8"])
def test_the_databases_encoding_does_not_matter(postgres_server: PostgresServer, encoding: str) -> None:
    """What a database of that encoding can hold is found again, as the same text."""
    name = f"encoded_{next(_numbers)}"
    postgres_server.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")
    try:
        with opened(postgres_server.url_of(name)) as store:
            store.migrate()
            wanted = reservation(scope="café")
            (found,) = store.reserve([wanted])
            assert found.record is not None
            assert (found.record.scope, found.record.owner) == ("café", wanted.owner)
    finally:
        postgres_server.drop_database(name)


def test_the_clients_encoding_does_not_matter(store: PostgresStore, ready_url: str) -> None:
    """A client encoding in the URL or in PGCLIENTENCODING does not change how a tenant's name is stored."""
    with opened(f"{ready_url}?client_encoding=latin1") as other:
        wanted = reservation(scope="café")
        (found,) = other.reserve([wanted])
        assert found.record is not None
        assert found.record.owner == wanted.owner
        (seen,) = store.read([("café", "key-1")])
        assert seen is not None


def test_settings_that_fail_leave_no_connection_behind(
    postgres_server: PostgresServer, ready_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that could not be set up is closed: no backend stays."""
    monkeypatch.setattr(connection, "_SETTINGS", "SELECT 1 / 0")
    with opened(ready_url) as store, pytest.raises(StoreError, match="DivisionByZero"):
        store.check()
    eventually(lambda: databases.connected(postgres_server, ready_url) == 0)


def test_a_server_that_cannot_notice_lost_clients_will_do(ready_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PostgreSQL 14, and on some platforms, there is no such setting: the store works without."""
    real = DeadlineConnection.execute

    def execute(self: DeadlineConnection, query: Any, *arguments: Any, **options: Any) -> Any:
        if query.startswith("SET client_connection_check_interval"):
            query = "SET no_such_setting_at_all = 1"
        return real(self, query, *arguments, **options)

    monkeypatch.setattr(DeadlineConnection, "execute", execute)
    with opened(ready_url) as store:
        store.migrate()
        put(store, "a")
        assert show(store, "client_connection_check_interval") == "0"


def test_a_connection_without_a_deadline_waits_as_psycopg_does(ready_url: str) -> None:
    """Until a verb sets its deadline there is none: connecting has its own limit."""
    with DeadlineConnection.connect(ready_url, autocommit=True) as own:
        assert own.deadline == 0.0
        assert own.execute("SELECT 1").fetchone() == (1,)


# ---------------------------------------------------------------- other people's transactions


@contextmanager
def holding(url: str, statement: str) -> Iterator[psycopg.Connection[Any]]:
    """Somebody's transaction that has run this and stays open."""
    with psycopg.connect(url) as other:
        other.execute(statement)
        yield other
        other.rollback()


HOLDS = {
    "an update": "UPDATE idempotency_keys SET last_error = 'mine' WHERE key = 'held'",
    "an enlisted row": "SELECT 1 FROM idempotency_keys WHERE key = 'held' FOR NO KEY UPDATE",
    "a lock": "SELECT 1 FROM idempotency_keys WHERE key = 'held' FOR UPDATE",
    "a deletion": "DELETE FROM idempotency_keys WHERE key = 'held'",
}


@pytest.fixture
def patient(ready_url: str) -> Iterator[PostgresStore]:
    """A store that would wait half a minute for a lock: whoever ends sooner has not waited."""
    with opened(ready_url, timeout=30.0, lock_timeout=30.0) as store:
        store.migrate()
        yield store


@pytest.mark.parametrize("hold", list(HOLDS))
def test_a_reservation_never_waits_for_a_transaction(patient: PostgresStore, ready_url: str, hold: str) -> None:
    """The held row is read as it was committed, at once, and its neighbours in the batch are inserted."""
    (held,) = put(patient, "held")
    wanted = [reservation(key) for key in ("after", "held", "before")]
    with holding(ready_url, HOLDS[hold]):
        begun = time.monotonic()
        found = patient.reserve(wanted)
        assert time.monotonic() - begun < 4
    owners = [answer.record and answer.record.owner for answer in found]
    assert owners == [wanted[0].owner, held.owner, wanted[2].owner]
    assert found[1].record is not None
    assert found[1].record.last_error is None


@pytest.mark.parametrize("hold", list(HOLDS))
@pytest.mark.parametrize("event", [Event.COMPLETE, Event.ADVANCE, Event.DISCARD, Event.RESERVE])
def test_a_move_never_waits_for_a_transaction(patient: PostgresStore, ready_url: str, hold: str, event: Event) -> None:
    """A held row is skipped, at once: None for it, and its neighbours in the batch move."""
    records = put(patient, "after", "held", "before")
    if event is Event.RESERVE:
        records = [one for one in patient.swap([complete(record) for record in records]) if one is not None]
        older(ready_url, 100_000)
    changes = [
        swap(
            record,
            event,
            Actor.REQUEST if event is Event.RESERVE else Actor.OWNER,
            response=RESPONSE if event is Event.COMPLETE else None,
            reservation=reservation(record.key) if event is Event.RESERVE else None,
            step=STEP if event is Event.ADVANCE else None,
        )
        for record in records
    ]
    with holding(ready_url, HOLDS[hold]):
        begun = time.monotonic()
        moved = patient.swap(changes)
        assert time.monotonic() - begun < 4
    assert [one and one.key for one in moved] == ["after", None, "before"]
    again = patient.swap([changes[1]])
    assert [one and one.key for one in again] == ["held"]


def test_a_discard_does_not_wait_for_who_refers_to_the_key(patient: PostgresStore, ready_url: str) -> None:
    """A business row that refers to a key locks it FOR KEY SHARE until it commits: busy, not waited for."""
    held, free = put(patient, "held", "free")
    changes = [swap(record, Event.DISCARD, Actor.OWNER) for record in (held, free)]

    def discard() -> list[Record | None]:
        try:
            return patient.swap(changes)
        finally:
            patient.disconnect()

    with (
        ThreadPoolExecutor(1) as pool,
        holding(ready_url, "SELECT 1 FROM idempotency_keys WHERE key = 'held' FOR KEY SHARE"),
    ):
        moved = pool.submit(discard)
        waited = not wait([moved], timeout=1.0).done
    assert not waited
    assert [one and one.key for one in moved.result(PATIENCE)] == [None, "free"]


def test_purging_skips_what_somebody_holds(patient: PostgresStore, ready_url: str) -> None:
    """The held row is left for the next purge; the others go, at once."""
    patient.swap([complete(record) for record in put(patient, "held", "a", "b")])
    older(ready_url, 100_000)
    for lock in ("FOR UPDATE", "FOR KEY SHARE"):
        with holding(ready_url, f"SELECT 1 FROM idempotency_keys WHERE key = 'held' {lock}"):
            begun = time.monotonic()
            patient.purge(10)
            assert time.monotonic() - begun < 4
        assert row(patient, "held") is not None
    assert row(patient, "a") is None
    assert patient.purge(10) == 1


def test_a_lock_that_has_to_be_waited_for_ends_with_its_timeout(store: PostgresStore, ready_url: str) -> None:
    """An uncommitted insert of the same key is the one thing that a reservation waits for, and briefly."""
    statement = """
        INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt,
            owner, lease_until, created_at, retention_seconds, expires_at)
        VALUES ('tenant-1', 'held', '', '', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 1, now())
    """
    with opened(ready_url, lock_timeout=0.1) as lane, holding(ready_url, statement):
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            lane.reserve([reservation("held")])
        assert time.monotonic() - begun < 4


# ---------------------------------------------------------------- races


def test_a_race_that_shows_no_row_is_asked_again_and_then_busy(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race was lost, and then neither inserted nor seen: five statements in all, each for what is still missing, then
    busy (hazard 6)."""
    asked: list[list[str]] = []
    real = store._execute

    def execute(statement: Any, parameters: Any) -> Any:
        asked.append(list(parameters["key"].values))
        if len(asked) == 1:
            raise postgres_store._LostRace
        rows = real(statement, parameters).fetchall()
        shown = [row for row in rows if row[1] != "ghost" and (len(asked) > 2 or row[1] != "late")]
        return SimpleNamespace(fetchall=lambda: shown)

    monkeypatch.setattr(store, "_execute", execute)
    found = store.reserve([reservation(key) for key in ("seen", "late", "ghost")])
    assert [answer.busy for answer in found] == [False, False, True]
    assert asked == [["seen", "late", "ghost"], ["seen", "late", "ghost"], ["late", "ghost"], ["ghost"], ["ghost"]]


def _race(url: str, process: int, seconds: float) -> dict[str, int]:
    """Reserve, hold and discard hot keys until the time is over; a key with two holders is a UniqueViolation."""
    store = PostgresStore(url)
    counts = {"held": 0, "lost": 0, "busy": 0, "twice": 0}
    lock = threading.Lock()
    ends = time.monotonic() + seconds

    def run(thread: int) -> None:
        dice = random.Random(process * 100 + thread)
        serial = count()
        with psycopg.connect(url, autocommit=True) as ledger:
            while time.monotonic() < ends:
                keys = dice.sample(range(64), 12)
                wanted = [reservation(f"hot-{key}", owner=f"{process}-{thread}-{next(serial)}") for key in keys]
                _hold(store, ledger, wanted, counts, lock)
        store.disconnect()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, thread) for thread in range(2)]:
            done.result()
    store.close()
    return counts


def _hold(
    store: PostgresStore, ledger: Any, wanted: list[Reservation], counts: dict[str, int], lock: threading.Lock
) -> None:
    found: list[Found] = store.reserve(wanted)
    mine = [f.record for w, f in zip(wanted, found, strict=True) if f.record and f.record.owner == w.owner]
    twice = 0
    for record in mine:
        try:
            ledger.execute("INSERT INTO holders VALUES (%s)", [record.key])
        except errors.UniqueViolation:
            twice += 1
    ledger.execute("DELETE FROM holders WHERE key = ANY(%s)", [[record.key for record in mine]])
    moved = store.swap([swap(record, Event.DISCARD, Actor.OWNER) for record in mine])
    with lock:
        counts["held"] += len(mine)
        counts["lost"] += moved.count(None)
        counts["busy"] += sum(f.busy for f in found)
        counts["twice"] += twice


def test_two_processes_never_own_a_key_at_once(store: PostgresStore, ready_url: str) -> None:
    """64 hot keys, two processes of two threads, reserved and deleted for two seconds: no key has two owners (I1)."""
    with psycopg.connect(ready_url, autocommit=True) as own:
        own.execute("CREATE TABLE holders (key text PRIMARY KEY)")
    store.disconnect()
    children = [Child(lambda number=number: _race(ready_url, number, 2.0)) for number in range(2)]  # type: ignore[misc]
    results = [child.result() for child in children]
    assert sum(result["twice"] for result in results) == 0
    assert sum(result["lost"] for result in results) == 0
    assert all(result["held"] > 20 for result in results)


def test_batches_in_any_order_do_not_deadlock(store: PostgresStore) -> None:
    """Four threads insert, renew and delete the same 40 keys, each in an order of its own, for 25 rounds."""
    begin = threading.Barrier(4)

    def run(thread: int) -> int:
        dice = random.Random(thread)
        moved = 0
        for number in range(25):
            keys = [f"round-{number}-{key}" for key in range(40)]
            begin.wait(PATIENCE)
            dice.shuffle(keys)
            found = store.reserve([reservation(key) for key in keys])
            records = [answer.record for answer in found if answer.record]
            dice.shuffle(records)
            renewed = store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=9) for record in records])
            dice.shuffle(records)
            removed = store.swap([swap(record, Event.DISCARD, Actor.OWNER) for record in records])
            moved += sum(one is not None for one in (*renewed, *removed))
        store.disconnect()
        return moved

    with ThreadPoolExecutor(4) as pool:
        totals = [future.result(PATIENCE * 3) for future in [pool.submit(run, thread) for thread in range(4)]]
    assert sum(totals) >= 25 * 40


def test_a_batch_is_inserted_in_the_order_of_its_keys(store: PostgresStore, ready_url: str) -> None:
    """Two batches that insert the same keys in different orders would wait for each other (hazard 7). This one waits
    for 'b', which somebody is inserting: it has inserted 'a' before, and not 'c'."""
    insert = """
        INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt,
            owner, lease_until, created_at, retention_seconds, expires_at)
        VALUES ('tenant-1', '{}', '', '', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 1, now())
    """

    def is_free(key: str) -> bool:
        with psycopg.connect(ready_url) as own:
            try:
                own.execute(f"SET lock_timeout = '200ms'; {insert.format(key)}".encode())
            except psycopg.errors.LockNotAvailable:
                return False
            finally:
                own.rollback()
        return True

    def is_waiting() -> bool:
        with psycopg.connect(ready_url, autocommit=True) as own:
            ours = "query LIKE '%insert it where%'"
            waiting = f"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND {ours}"
            found = own.execute(waiting.encode()).fetchone()
        return found == (1,)

    def reserve(lane: PostgresStore) -> list[bool]:
        try:
            return [found.busy for found in lane.reserve([reservation(key) for key in ("c", "b", "a")])]
        finally:
            lane.disconnect()

    with opened(ready_url, lock_timeout=20, timeout=20) as lane, ThreadPoolExecutor(1) as pool:
        with holding(ready_url, insert.format("b")):
            reserved = pool.submit(reserve, lane)
            eventually(is_waiting, "the batch waits")
            assert (is_free("a"), is_free("c")) == (False, True)
        assert reserved.result(PATIENCE) == [False, False, False]


# ---------------------------------------------------------------- schema

_CATALOG = """
SELECT 'column', c.relname || '.' || a.attname, a.attnum::text, format_type(a.atttypid, a.atttypmod),
    a.attnotnull::text, coalesce(pg_get_expr(d.adbin, d.adrelid), ''), coalesce(l.collname, '')
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
LEFT JOIN pg_collation l ON l.oid = a.attcollation
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
    AND c.relname <> 'oncekey_schema'
UNION ALL
SELECT 'constraint', conrelid::regclass || '.' || conname, '', pg_get_constraintdef(oid), '', '', ''
FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'oncekey_schema'
UNION ALL
SELECT 'index', indexname, '', indexdef, '', '', '' FROM pg_indexes
WHERE schemaname = 'public' AND tablename <> 'oncekey_schema'
UNION ALL
SELECT 'other', relname, relkind::text, coalesce(array_to_string(reloptions, ','), ''), '', '', '' FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relname NOT LIKE 'oncekey_schema%'
ORDER BY 1, 2, 3
"""


def test_the_schema_is_what_the_migrations_add_up_to(postgres_server: PostgresServer, store: PostgresStore) -> None:
    """schema.sql in one database, the migrations in another: the catalogs are the same."""
    name = f"whole_{next(_numbers)}"
    whole = postgres_server.database(name)
    try:
        text = sqlfiles.statement("oncekey.stores.postgres", "schema")
        with psycopg.connect(whole, autocommit=True) as own:
            own.execute(text)
            one = own.execute(_CATALOG).fetchall()
        two = store._connection().execute(_CATALOG).fetchall()
        assert len(one) > 25
        assert one == two
    finally:
        postgres_server.drop_database(name)


@pytest.fixture
def fresh(url: str) -> Iterator[PostgresStore]:
    """For tests that change its tables."""
    with opened(url) as store:
        store.migrate()
        yield store


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("DROP TABLE oncekey_schema", "has no oncekey tables yet: run `oncekey migrate`"),
        ("DELETE FROM oncekey_schema", "has no oncekey tables yet"),
        ("DELETE FROM oncekey_schema WHERE number > 1", "has oncekey schema 0001 and this version needs 000"),
        ("UPDATE oncekey_schema SET number = 9999 WHERE number = 1", "has oncekey schema 9999, newer than the"),
    ],
)
def test_other_tables_are_refused_with_what_to_run(fresh: PostgresStore, url: str, change: str, sentence: str) -> None:
    """Missing, older, newer: every verb of a fresh connection says so before it touches a row."""
    with psycopg.connect(url, autocommit=True) as own:
        own.execute(change)
    with opened(url) as other:
        for verb in ("reserve", "read", "check"):
            with pytest.raises(SchemaError) as caught:
                VERBS[verb](other)
            assert sentence in str(caught.value)
            assert str(caught.value).startswith("PostgreSQL database 'shared' at 127.0.0.1 has ")


def test_tables_that_change_under_a_connection_are_noticed(fresh: PostgresStore, url: str) -> None:
    """Dropped or altered after the check: a SchemaError with what to run, not a driver's message."""
    put(fresh, "a")
    with psycopg.connect(url, autocommit=True) as own:
        own.execute("ALTER TABLE idempotency_keys DROP COLUMN reconcile_tries")
        with pytest.raises(SchemaError, match="has an older oncekey schema: run `oncekey migrate`"):
            fresh.due(Duty.UNKNOWNS, 1)
        own.execute("DROP TABLE idempotency_keys")
        with pytest.raises(SchemaError, match="has no oncekey tables: run `oncekey migrate`"):
            fresh.due(Duty.LEASES, 1)


def test_a_migration_that_fails_leaves_nothing(url: str) -> None:
    """Somebody has a table of that name: an error in our words, and not a half-made schema."""
    with psycopg.connect(url, autocommit=True) as own:
        own.execute("CREATE TABLE idempotency_keys (id integer)")
        with opened(url) as store:
            with pytest.raises(StoreError, match="DuplicateTable"):
                store.migrate()
            assert own.execute("SELECT to_regclass('oncekey_schema')").fetchone() == (None,)
            own.execute("DROP TABLE idempotency_keys")
            assert store.migrate() == MIGRATIONS


def test_a_migration_waits_for_another_one(url: str) -> None:
    """Another process migrates, for longer than a lane would wait for a row: this one goes on when that one is done."""
    with (
        opened(url) as store,
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(url) as other,
        psycopg.connect(url, autocommit=True) as watcher,
    ):
        other.execute("SELECT pg_advisory_xact_lock(%s)", [0x6F6E63656B6579])

        def migrate() -> list[str]:
            try:
                return store.migrate()
            finally:
                store.disconnect()

        migrating: Future[list[str]] = pool.submit(migrate)
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        eventually(lambda: watcher.execute(waiting).fetchone() == (1,) or migrating.done())
        wait([migrating], timeout=0.8)
        other.commit()
        assert migrating.result(PATIENCE) == MIGRATIONS


# ---------------------------------------------------------------- arrays

_VALUES: dict[type[arrays.Column], tuple[str, list[Any]]] = {
    arrays.Text: ("text", ["", "a", "é 日本 \U0001f511", "'\"\\{},NULL", "NULL", None, " ", "x" * 70_000, "\n\t\x1f"]),
    arrays.Bytea: ("bytea", [b"", b"\x00", bytes(range(256)), None, b"\\x00", b"x" * 70_000]),
    arrays.Float8: ("float8", [0.0, -0.0, 1.5, -1e308, 5e-324, math.inf, -math.inf, None, math.pi, 2.0**53]),
    arrays.Int4: ("int4", [0, 1, -1, 2**31 - 1, -(2**31), None]),
    arrays.Bool: ("bool", [True, False, None]),
}


@pytest.mark.parametrize("kind", list(_VALUES), ids=lambda kind: kind.__name__)
def test_columns_are_what_psycopg_would_send(store: PostgresStore, kind: type[arrays.Column]) -> None:
    """Element by element the server sees the same array, of the type of the column, as from psycopg's own list."""
    name, values = _VALUES[kind]
    own = store._connection()
    query = f"SELECT %s, %s::{name}[], %s = %s::{name}[]"
    for some in (values, values[:1], [None, None], []):
        cursor = own.execute(query, [kind(some), some, kind(some), some], binary=True)
        mine, theirs, same = cursor.fetchall()[0]
        assert same is True
        assert mine == theirs == some
        assert [str(value) for value in mine] == [str(value) for value in theirs]
        assert [column.type_code for column in cursor.description or ()][:2] == [kind.array_oid] * 2


def test_not_a_number_arrives(store: PostgresStore) -> None:
    """NaN is equal to nothing in Python, so it is compared by the server."""
    column = arrays.Float8([math.nan])
    assert store._connection().execute("SELECT %s = ARRAY['NaN'::float8]", [column]).fetchone() == (True,)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_number_that_does_not_fit_is_refused(value: int) -> None:
    """Never truncated."""
    with pytest.raises(Exception, match="format requires"):
        arrays.Int4([value]).encode()


def test_a_statement_is_prepared_once_whatever_it_carries(store: PostgresStore) -> None:
    """Columns full of None or of values, batches of one or many: one prepared statement each."""
    for size in (1, 2, 7):
        records = put(store, *(f"key-{size}-{number}" for number in range(size)))
        store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=9) for record in records])
        store.swap([complete(record) for record in records])
        store.read([(record.scope, record.key) for record in records])
    prepared = store._connection().execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
    assert prepared is not None
    assert prepared[0] <= 5


# ---------------------------------------------------------------- connections


def test_every_thread_has_a_connection_of_its_own(store: PostgresStore) -> None:
    """Two threads are two backends; one that disconnects does not disturb the other."""
    mine = backend(store)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(backend, store).result(PATIENCE)
        assert theirs != mine
        store.disconnect()
        assert pool.submit(backend, store).result(PATIENCE) == theirs
        pool.submit(store.disconnect).result(PATIENCE)
    assert backend(store) != mine


def test_closing_closes_the_connections_of_all_threads(
    postgres_server: PostgresServer, store: PostgresStore, ready_url: str
) -> None:
    """No backend is left, and a verb after the close simply connects again."""
    store.close()
    eventually(lambda: databases.connected(postgres_server, ready_url) == 0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backend, store).result(PATIENCE)
        backend(store)
        assert databases.connected(postgres_server, ready_url) == 2
        store.close()
        eventually(lambda: databases.connected(postgres_server, ready_url) == 0)
        assert pool.submit(row, store, "x").result(PATIENCE) is None
        pool.submit(store.disconnect).result(PATIENCE)


def test_closing_beside_a_verb_that_hangs(store: PostgresStore, proxy: TcpProxy, ready_url: str) -> None:
    """Closing from another thread while a verb waits for a hung server: the verb ends with StoreUnavailable."""
    with ThreadPoolExecutor(1) as pool, opened(proxy.rewrite(ready_url), timeout=1.0) as lane:
        pool.submit(row, lane, "x").result(PATIENCE)
        proxy.hang()
        hung = pool.submit(row, lane, "x")
        eventually(hung.running)
        lane.close()
        with pytest.raises(StoreUnavailable):
            hung.result(PATIENCE)
        proxy.pass_through()
        assert pool.submit(row, lane, "x").result(PATIENCE) is None
        pool.submit(lane.disconnect).result(PATIENCE)


def test_a_forked_child_has_connections_of_its_own(ready_url: str) -> None:
    """Parent and child go on with the same OnceKey, each over its own sockets (hazard 26)."""
    done = subprocess.run(
        [sys.executable, "-c", FORK_SCRIPT, ready_url], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stderr, done.stdout.strip()) == ("", FORK_RESULT)


@pytest.mark.parametrize("first", ["ask", "disconnect"])
def test_a_child_uses_and_closes_nothing_of_its_parents(store: PostgresStore, first: str) -> None:
    """In the thread that forked: whether the child asks or disconnects first, the parent's connection lives on."""
    before = backend(store)

    def work() -> bool:
        if first == "disconnect":
            store.disconnect()
            store.close()
        own = backend(store)
        seen = row(store, "x")
        store.close()
        return seen is None and own != before

    assert Child(work).result() is True
    assert backend(store) == before
    assert row(store, "x") is None


def test_a_tombstone_and_a_body_share_a_batch(store: PostgresStore) -> None:
    """Rows with and without a response, a body, an error: each column of the batch keeps its own."""
    records = put(store, "body", "tombstone", "released")
    changes = [
        complete(records[0]),
        swap(records[1], Event.COMPLETE, Actor.OWNER, response=StoredResponse(204, (), None)),
        swap(records[2], Event.RELEASE, Actor.OWNER, last_error="not executed"),
    ]
    moved = store.swap(changes)
    seen = store.read([(record.scope, record.key) for record in records])
    assert [one and one.response for one in moved] == [one and one.response for one in seen]
    assert [one and one.response and one.response.status for one in seen] == [201, 204, None]
    assert [one and one.last_error for one in seen] == [None, None, "not executed"]


def test_a_rival_that_inserts_first_is_found_and_nobody_else_suffers(store: PostgresStore, ready_url: str) -> None:
    """The plain INSERT breaks on a key that a rival commits meanwhile: the batch is asked again, politely."""
    with (
        psycopg.connect(ready_url) as rival,
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(ready_url, autocommit=True) as watcher,
    ):
        rival.execute(
            "INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, "
            "attempt, owner, lease_until, created_at, retention_seconds, expires_at) "
            "VALUES ('tenant-1', 'hot', '', '', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 1, now())"
        )

        def reserve() -> list[Found]:
            try:
                return store.reserve([reservation("cold"), reservation("hot")])
            finally:
                store.disconnect()

        asking: Future[list[Found]] = pool.submit(reserve)
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        eventually(lambda: watcher.execute(waiting).fetchone() == (1,))
        rival.commit()
        cold, hot = asking.result(PATIENCE)
    assert cold.record is not None
    assert hot.record is not None
    assert hot.record.owner == "rival"
    assert cold.record.owner != "rival"


def test_a_move_made_from_an_older_look_shows_the_row_as_it_is(store: PostgresStore) -> None:
    """The owner advanced meanwhile: what swap returns has the new recovery point, not the one that the mover saw."""
    record = store.reserve([reservation("resumed")])[0].record
    assert record is not None
    assert store.swap([swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="charge_created")]) != [None]
    (moved,) = store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=30.0)])
    assert moved is not None
    assert moved.recovery_point == "charge_created"
