"""A jar in the app's own database, and in the app's own transaction."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import sqlalchemy

from oncekey.client import IntentChanged, JarError, KeyJar
from oncekey.client.jar.table import TABLE
from tests.client.jars import client_of
from tests.client.server import Server
from tests.stores import mysql


def _engine(url: str) -> sqlalchemy.Engine:
    drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
    scheme, _, rest = url.partition("://")
    return sqlalchemy.create_engine(f"{drivers.get(scheme, scheme)}://{rest}")


def _connected(url: str, file: Path) -> Any:
    if url.startswith("sqlite"):
        return sqlite3.connect(file)
    return psycopg.connect(url) if url.startswith("postgres") else mysql.connect(url)


def test_intent_exists_if_and_only_if_the_transaction_of_the_app_commits(server: Server, jar: KeyJar, url: str) -> None:
    from sqlalchemy.orm import Session

    engine = _engine(url)
    with Session(engine) as session:
        jar.prepare("kept", "POST", f"{server.url}/pay", json={"amount": 5}, on=session)
        session.commit()
        jar.prepare("gone", "POST", f"{server.url}/pay", json={"amount": 6}, on=session)
        session.rollback()
    with engine.begin() as connection:
        jar.prepare("by-connection", "POST", f"{server.url}/pay", on=connection)
    engine.dispose()
    with client_of(server, jar) as client:
        assert sorted(each.name for each in client.resume()) == ["by-connection", "kept"]
    assert len(server.asked) == 2


def test_intent_is_written_on_a_plain_connection(server: Server, jar: KeyJar, url: str, file: Path) -> None:
    with closing(_connected(url, file)) as connection:
        jar.prepare("gone", "POST", f"{server.url}/pay", on=connection)
        connection.rollback()
        jar.prepare("kept", "POST", f"{server.url}/pay", on=connection)
        connection.commit()
    assert [row.name for row in jar.open_intents()] == ["kept"]


def test_intent_of_an_open_transaction_is_not_sent(server: Server, url: str) -> None:
    from sqlalchemy.orm import Session

    jar = KeyJar(url, timeout=0.3)
    engine = _engine(url)
    with client_of(server, jar) as client, Session(engine) as session:
        jar.prepare("order-1", "POST", f"{server.url}/pay", json={}, on=session)
        with pytest.raises(JarError), client.intent("order-1") as intent:
            intent.post("/pay", json={})
        session.commit()
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
    engine.dispose()
    jar.close()
    assert len(server.asked) == 1


def test_prepared_twice_is_one_intent_and_changed_is_refused(server: Server, jar: KeyJar) -> None:
    first, second = (jar.prepare("order-1", "POST", f"{server.url}/pay", json={"a": 1}) for _ in range(2))
    assert first == second
    with pytest.raises(IntentChanged):
        jar.prepare("order-1", "POST", f"{server.url}/pay", json={"a": 2})


def test_jar_waits_for_the_disk(url: str, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the database says that commits need not. A MySQL that does not is warned about."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(file)) as other:
            other.execute("PRAGMA journal_mode = WAL")
        jar = KeyJar(url)
        assert jar.run(lambda execute: execute("PRAGMA synchronous", ()).fetchone(), writes=False) == (2,)
    elif url.startswith("mysql"):  # only its server can be told to
        jar = KeyJar(url)
        assert "does not wait for its disk (innodb_flush_log_at_trx_commit = 2)" in caplog.text
    else:
        with psycopg.connect(url, autocommit=True) as other:
            name = other.info.dbname
            other.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
        jar = KeyJar(url)
        assert jar.run(lambda execute: execute("SHOW synchronous_commit", ()).fetchone(), writes=False) == ("on",)
    jar.close()


def test_role_that_may_not_create_tables_can_use_the_jar(postgres_url: str) -> None:
    KeyJar(postgres_url).close()
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        role = f"clerk_{os.getpid()}"
        owner.execute(f"CREATE ROLE {role} LOGIN".encode())
        owner.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {TABLE} TO {role}".encode())
        parts = urlsplit(postgres_url)
        netloc = f"{role}@{parts.netloc.rpartition('@')[2]}"
        jar = KeyJar(urlunsplit(parts._replace(netloc=netloc)))
        jar.prepare("order-1", "POST", "https://api.example.com/pay")
        assert len(jar.open_intents()) == 1
        jar.close()
        owner.execute(f"DROP OWNED BY {role}".encode())
        owner.execute(f"DROP ROLE {role}".encode())


def test_intent_that_another_transaction_committed_meanwhile_is_found(server: Server, jar: KeyJar, url: str) -> None:
    """In MySQL a transaction that began earlier does not see it, unless it asks for the row as it is now."""
    if url.startswith("sqlite"):
        pytest.skip("it has one writer at a time")
    engine = _engine(url)
    with engine.connect() as mine:
        mine.exec_driver_sql(f"SELECT COUNT(*) FROM {TABLE}")
        key = jar.prepare("order-1", "POST", f"{server.url}/pay", json={})
        assert jar.prepare("order-1", "POST", f"{server.url}/pay", json={}, on=mine) == key
        mine.commit()
    engine.dispose()


def test_intent_is_written_in_a_transaction_of_django(url: str) -> None:
    """In a process of its own, with settings of its own."""
    if url.startswith("mysql"):
        pytest.importorskip("MySQLdb")
    parts = urlsplit(url)
    engine = {"sqlite": "sqlite3", "postgresql": "postgresql"}.get(parts.scheme, parts.scheme)
    place: dict[str, Any] = {"ENGINE": f"django.db.backends.{engine}", "NAME": parts.path[1:]}
    if parts.hostname:
        place |= {"HOST": parts.hostname, "PORT": parts.port, "USER": parts.username}
    program = textwrap.dedent(f"""
        import django
        from django.conf import settings
        settings.configure(DATABASES={{"default": {place!r}}})
        django.setup()
        from django.db import connection, transaction
        from oncekey.client import KeyJar
        jar = KeyJar({url!r})
        with transaction.atomic():
            jar.prepare("kept", "POST", "https://api.example.com/pay", on=connection)
        try:
            with transaction.atomic():
                jar.prepare("gone", "POST", "https://api.example.com/pay", on=connection)
                raise ZeroDivisionError
        except ZeroDivisionError:
            print([row.name for row in jar.open_intents()])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == "['kept']\n", done.stderr


# -- MySQL and MariaDB -------------------------------------------------------------------------------------------------


@pytest.mark.stores
def test_names_compare_byte_by_byte_in_mysql(mysql_url: str) -> None:
    """Whatever the database's collation is: case, accents and blanks at the end count."""
    jar = KeyJar(mysql_url)
    names = ["order-1", "Order-1", "order-1 ", "\u00f6rder-1", "order-\U0001f600"]
    keys = [jar.prepare(name, "POST", "https://api.example.com/\u00fc") for name in names]
    assert len(set(keys)) == 5
    assert sorted(row.name for row in jar.open_intents()) == sorted(names)
    jar.close()


@pytest.mark.stores
@pytest.mark.parametrize("charset", ["latin1", "utf8mb4"])
def test_text_does_not_depend_on_the_character_set_of_the_apps_connection(mysql_url: str, charset: str) -> None:
    jar = KeyJar(mysql_url)
    with closing(mysql.connect(mysql_url, charset=charset)) as connection:
        key = jar.prepare("\u00f6rder-1", "POST", "https://api.example.com/pay", json={"name": "\u00e9"}, on=connection)
        connection.commit()
    row = jar.read("\u00f6rder-1")
    assert row is not None
    assert (row.key, row.request.body) == (key, '{"name":"\u00e9"}'.encode())
    jar.close()


@pytest.mark.stores
def test_jar_whose_connection_mysql_closed_opens_another(mysql_url: str) -> None:
    jar = KeyJar(mysql_url)
    ((mine,),) = jar.run(lambda execute: execute("SELECT CONNECTION_ID()", ()).fetchall(), writes=False)
    mysql.run(mysql_url, f"KILL {mine}")
    jar.prepare("order-1", "POST", "https://api.example.com/pay")
    assert len(jar.open_intents()) == 1
    jar.close()


@pytest.mark.stores
def test_table_of_that_name_in_mysql_that_is_no_jar_is_refused(mysql_url: str) -> None:
    mysql.run(mysql_url, f"CREATE TABLE {TABLE} (name TEXT)")
    with pytest.raises(JarError, match="is not that of a key jar"):
        KeyJar(mysql_url).read("order-1")


@pytest.mark.stores
def test_intent_is_written_on_a_connection_of_mysqlclient(mysql_url: str) -> None:
    database = pytest.importorskip("MySQLdb")
    parts = urlsplit(mysql_url)
    jar = KeyJar(mysql_url)
    place = {"host": parts.hostname, "port": parts.port, "user": parts.username, "database": parts.path[1:]}
    with closing(database.connect(**place)) as connection:
        jar.prepare("gone", "POST", "https://api.example.com/pay", on=connection)
        connection.rollback()
        jar.prepare("kept", "POST", "https://api.example.com/pay", on=connection)
        connection.commit()
    assert [row.name for row in jar.open_intents()] == ["kept"]
    jar.close()
