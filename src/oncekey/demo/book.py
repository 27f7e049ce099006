"""The demo's own data: payments and refunds, in the same database as the keys: SQLite, PostgreSQL or MySQL. A
store that is no database has a SQLite file beside it.

Plain SQL on purpose: this is the app's part, not oncekey's. A method that writes takes the caller's connection, and
the caller commits. Only the URL is read as the stores read it, so that all of its hosts and options count.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, Protocol
from uuid import uuid4

from oncekey.stores.registry import plain_url

_TABLES = """
CREATE TABLE IF NOT EXISTS demo_payments (
    id varchar(64) PRIMARY KEY, tenant text NOT NULL, customer_id text NOT NULL, amount_cents bigint NOT NULL,
    currency text NOT NULL, status text NOT NULL
);
CREATE TABLE IF NOT EXISTS demo_refunds (
    id varchar(64) PRIMARY KEY, tenant text NOT NULL, payment_id text NOT NULL, amount_cents bigint NOT NULL
)
"""
_COLUMNS = ("id", "status", "customerId", "amountCents", "currency")

Payment = dict[str, Any]


class Connection(Protocol):
    def execute(self, query: str, parameters: Sequence[Any] = ..., /) -> Any: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...


class Book:
    """Payments and refunds by tenant."""

    def __init__(self, url: str) -> None:
        url = plain_url(url)
        scheme = url.partition(":")[0]
        self._mark = "?" if scheme == "sqlite" else "%s"
        self._connect = {"sqlite": _sqlite, "mysql": _mysql}.get(scheme, _postgres)(url)

    def create_tables(self) -> None:
        with closing(self.connect()) as db:
            for statement in _TABLES.split(";"):
                run(db, statement)
            db.commit()

    def connect(self) -> Connection:
        """A new connection, one for each request."""
        return self._connect()

    def open_payment(
        self, db: Connection, tenant: str, customer_id: str, amount_cents: int, currency: str, name: str | None = None
    ) -> Payment:
        """A payment that is not made yet. With the same ``name`` again, it is the same payment."""
        payment = (f"pay_{name or uuid4().hex[:16]}", "pending", customer_id, amount_cents, currency)
        if name is not None and (found := self.payment(tenant, payment[0])) is not None:
            return found | {"status": "pending"}
        self._run(
            db,
            "INSERT INTO demo_payments (id, status, customer_id, amount_cents, currency, tenant) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            *payment,
            tenant,
        )
        return dict(zip(_COLUMNS, payment, strict=True))

    def settle(self, db: Connection, payment: Payment, status: str) -> Payment:
        """Store how the payment ended. A second call changes nothing."""
        self._run(db, "UPDATE demo_payments SET status = ? WHERE id = ?", status, payment["id"])
        return {name: payment[name] for name in _COLUMNS} | {"status": status}

    def payments(self, tenant: str) -> list[Payment]:
        return self._select("WHERE tenant = ? ORDER BY id", tenant)

    def payment(self, tenant: str, payment_id: str) -> Payment | None:
        found = self._select("WHERE tenant = ? AND id = ?", tenant, payment_id)
        return found[0] if found else None

    def refund(self, db: Connection, tenant: str, payment: Payment, name: str | None = None) -> dict[str, Any]:
        """A refund. With the same ``name`` again, it is the same refund; the file beside a store has only such ones."""
        refund_id = f"ref_{name or uuid4().hex[:16]}"
        self._run(
            db,
            f"INSERT {'OR IGNORE' if name else ''} INTO demo_refunds (id, tenant, payment_id, amount_cents) "
            "VALUES (?, ?, ?, ?)",
            *(refund_id, tenant, payment["id"], payment["amountCents"]),
        )
        return {"id": refund_id, "paymentId": payment["id"], "amountCents": payment["amountCents"]}

    def _select(self, where: str, *values: object) -> list[Payment]:
        with closing(self.connect()) as db:
            query = f"SELECT id, status, customer_id, amount_cents, currency FROM demo_payments {where}"
            return [dict(zip(_COLUMNS, row, strict=True)) for row in self._run(db, query, *values)]

    def _run(self, db: Connection, query: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = run(db, query.replace("?", self._mark), values)
        return list(cursor.fetchall()) if cursor.description else []


def run(db: Any, query: str, values: Sequence[Any] = ()) -> Any:
    """Run one statement. PyMySQL's connections have no ``execute`` of their own."""
    if hasattr(db, "execute"):
        return db.execute(query, values)
    cursor = db.cursor()
    cursor.execute(query, values)
    return cursor


def _sqlite(url: str) -> Callable[[], Connection]:
    from oncekey.stores.sqlite import from_url

    path = from_url(url).path
    # The server's thread ends an enlisted transaction, not the handler's thread.
    return lambda: sqlite3.connect(path, timeout=10, check_same_thread=False)


def _postgres(url: str) -> Callable[[], Connection]:
    import psycopg

    return lambda: psycopg.connect(url, connect_timeout=5)


def _mysql(url: str) -> Callable[[], Connection]:
    import pymysql

    from oncekey.stores.mysql import address

    found = address.parse(url)
    *others, last = found.hosts

    def connect_to(host: str, port: int) -> Any:
        return pymysql.connect(
            host=host,
            port=port,
            user=found.user,
            password=found.password,
            database=found.database,
            connect_timeout=5,
            init_command="DO 1",  # a Galera node outside its cluster takes a login, and refuses this
            **found.driver_options(),
        )

    def connect() -> Any:
        for host, port in others:
            with suppress(pymysql.Error):
                return connect_to(host, port)
        return connect_to(*last)

    return connect
