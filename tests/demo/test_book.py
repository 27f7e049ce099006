"""The URLs that the demo's own tables take: the same as the store's, with all hosts and options."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pymysql
import pytest

from oncekey.demo.book import Book, run
from oncekey.testing.servers import MysqlServer


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What PyMySQL was asked. Every connection fails."""
    calls: list[dict[str, Any]] = []

    def connect(**options: Any) -> Any:
        calls.append(options)
        raise pymysql.OperationalError(2003, f"cannot connect to {options['host']}")

    monkeypatch.setattr(pymysql, "connect", connect)
    return calls


def test_every_node_of_a_mysql_url_is_tried_in_order(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(pymysql.OperationalError, match="cannot connect to b"):
        Book("mysql://shop:p%40ss@a:3306,b:3307/db").connect()
    assert [(call["host"], call["port"]) for call in asked] == [("a", 3306), ("b", 3307)]
    assert {(call["user"], call["password"], call["database"]) for call in asked} == {("shop", "p@ss", "db")}
    # A Galera node outside its cluster takes a login and SELECT 1. It refuses this, so that the next node is tried.
    assert {call["init_command"] for call in asked} == {"DO 1"}


def test_options_of_the_mysql_url_reach_the_driver(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(pymysql.OperationalError):
        Book("mysql://a/db?unix_socket=/run/db.sock&ssl_ca=/ca.pem&ssl_verify_cert=true&charset=utf8").connect()
    (call,) = asked
    assert call["unix_socket"] == "/run/db.sock"
    assert call["ssl"] == {"ca": "/ca.pem", "check_hostname": False, "verify_mode": True}
    assert "charset" not in call


@pytest.mark.parametrize("scheme", ["mariadb", "mysql+pymysql", "mariadb+asyncmy"])
def test_every_word_for_the_scheme_is_mysql(asked: list[dict[str, Any]], scheme: str) -> None:
    with pytest.raises(pymysql.OperationalError):
        Book(f"{scheme}://a/db").connect()
    assert len(asked) == 1


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
def test_options_of_the_sqlite_url_are_not_part_of_the_file_name(tmp_path: Path, scheme: str) -> None:
    Book(f"{scheme}:///{tmp_path / 'demo.db'}?writer=process").create_tables()
    assert [file.name for file in tmp_path.iterdir()] == ["demo.db"]


@pytest.mark.stores
def test_payment_is_written_through_the_second_host_if_the_first_is_down_on_mysql(
    mysql_server: MysqlServer, mysql_url: str, dead_port: int
) -> None:
    book = Book(mysql_url.replace(f":{mysql_server.port}", f":{dead_port},127.0.0.1:{mysql_server.port}"))
    book.create_tables()
    with closing(book.connect()) as db:
        made = book.open_payment(db, "t", "c", 100, "EUR")
        db.commit()
    assert book.payments("t") == [made]


@pytest.mark.stores
def test_payment_is_written_through_the_socket_of_the_mysql_url(
    mysql_server: MysqlServer, mysql_url: str, dead_port: int
) -> None:
    ((path,),) = mysql_server.execute("SELECT @@socket")
    url = mysql_url.replace(f"127.0.0.1:{mysql_server.port}", f"localhost:{dead_port}")
    book = Book(f"{url}?unix_socket={quote(path)}")
    book.create_tables()
    with closing(book.connect()) as db:
        assert run(db, "SELECT @@port").fetchall() == ((mysql_server.port,),)
    assert book.payments("t") == []
