"""Words for what went wrong on PostgreSQL, and which class of error it is: the class decides what the lane does."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest
from psycopg import errors

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.decision import Execute
from oncekey.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailable
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.postgres.connection import explain
from tests.engine.doubles import PATIENCE, reservation
from tests.stores.postgres import backend


def test_a_url_that_cannot_be_read_is_refused() -> None:
    """When the store is made, not at the first request."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        PostgresStore("postgresql://host:port:port/x?y")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (errors.UndefinedTable(), SchemaError, "has not all tables of oncekey"),
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
        (psycopg.OperationalError('FATAL:  database "x" does not exist'), StoreUnavailable, "create that database"),
        (psycopg.OperationalError('FATAL:  role "x" does not exist'), StoreUnavailable, "create that role"),
        (psycopg.OperationalError("password authentication failed"), StoreUnavailable, "correct the user's name or"),
        (psycopg.OperationalError("FATAL: no pg_hba.conf entry"), StoreUnavailable, "does not let this user in"),
        (psycopg.OperationalError("failed to resolve host 'x'"), StoreUnavailable, "correct the name of the host"),
        (psycopg.OperationalError('value for connection option "port"'), StoreUnavailable, "correct the port"),
        (psycopg.OperationalError('root certificate file "/x" does not exist'), StoreUnavailable, "file is not there"),
        (psycopg.OperationalError("SSL error: certificate verify failed"), StoreUnavailable, "is not trusted: sslroot"),
        (psycopg.OperationalError('"a" does not match host name "b"'), StoreUnavailable, "is for another host"),
        (psycopg.OperationalError("server does not support SSL, but"), StoreUnavailable, "it speaks no TLS"),
        (psycopg.OperationalError('private key file "/x" has group'), StoreUnavailable, "sslkey= takes a key"),
        (psycopg.OperationalError('could not read certificate file "/x"'), StoreUnavailable, "sslcert= takes"),
        (errors.InsufficientPrivilege(), StoreError, "docs/stores.md says what it needs to be granted"),
        (errors.DuplicateTable(), StoreError, "give oncekey a schema of its own"),
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


def test_a_row_that_postgres_cannot_hold_does_not_close_the_door_for_others(ready_url: str) -> None:
    """Any client can ask for a path with %00 in it: it fails alone, and opens no breaker for all tenants (I6)."""
    with OnceKey(ready_url, scope=SINGLE_TENANT, migrate=True) as once:
        engine = once.engine
        for number in range(6):
            bad = replace(reservation(f"bad-{number}"), operation="POST /payments\x00")
            with pytest.raises(StoreError):
                engine.run_blocking(engine.begin(bad, once.default_policy), PATIENCE)
        assert isinstance(
            engine.run_blocking(engine.begin(reservation("good"), once.default_policy), PATIENCE), Execute
        )
