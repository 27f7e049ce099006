"""The demo's own data: payments and refunds, in the same database as the keys: SQLite, PostgreSQL or MySQL. A
store that is no database has a SQLite file beside it.

Plain SQL on purpose: this is the app's part, not oncekey's. A method that writes takes the caller's connection, and
the caller commits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol
from uuid import uuid4

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
        self._url = url
        self._mark = "?" if url.startswith("sqlite:") else "%s"

    def create_tables(self) -> None:
        with closing(self.connect()) as db:
            for statement in _TABLES.split(";"):
                run(db, statement)
            db.commit()

    def connect(self) -> Connection:
        """A new connection, one for each request."""
        if self._url.startswith("sqlite:"):
            # The server's thread ends an enlisted transaction, not the handler's thread.
            path = self._url.removeprefix("sqlite:///")
            return sqlite3.connect(path, timeout=10, check_same_thread=False)
        if self._url.startswith("mysql:"):
            opened: Connection = _mysql(self._url)
            return opened
        import psycopg

        return psycopg.connect(self._url, connect_timeout=5)

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


def _mysql(url: str) -> Any:
    from urllib.parse import unquote, urlsplit

    import pymysql

    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=parts.path[1:],
        connect_timeout=5,
    )
