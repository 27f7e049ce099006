"""The demo's own data: payments and refunds, in the same database as the keys, SQLite or PostgreSQL.

Plain SQL on purpose: this is the app's side of the story, not oncekey's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol
from uuid import uuid4

_TABLES = """
CREATE TABLE IF NOT EXISTS demo_payments (
    id text PRIMARY KEY, tenant text NOT NULL, customer_id text NOT NULL, amount_cents bigint NOT NULL,
    currency text NOT NULL, status text NOT NULL
);
CREATE TABLE IF NOT EXISTS demo_refunds (
    id text PRIMARY KEY, tenant text NOT NULL, payment_id text NOT NULL, amount_cents bigint NOT NULL
)
"""
_COLUMNS = ("id", "status", "customerId", "amountCents", "currency")


class Connection(Protocol):
    def execute(self, query: str, parameters: Sequence[Any] = ..., /) -> Any: ...
    def commit(self) -> None: ...


class Book:
    """Payments and refunds by tenant. Each call is a transaction of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._mark = "?" if url.startswith("sqlite:") else "%s"
        with self._transaction() as db:
            for statement in _TABLES.split(";"):
                db.execute(statement)

    def charge(self, tenant: str, customer_id: str, amount_cents: int, currency: str) -> dict[str, Any]:
        values = (f"pay_{uuid4().hex[:16]}", tenant, customer_id, amount_cents, currency, "succeeded")
        with self._transaction() as db:
            self._run(
                db,
                "INSERT INTO demo_payments (id, tenant, customer_id, amount_cents, currency, status) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                *values,
            )
        return dict(zip(_COLUMNS, (values[0], "succeeded", customer_id, amount_cents, currency), strict=True))

    def payments(self, tenant: str) -> list[dict[str, Any]]:
        return self._select("WHERE tenant = ? ORDER BY id", tenant)

    def payment(self, tenant: str, payment_id: str) -> dict[str, Any] | None:
        found = self._select("WHERE tenant = ? AND id = ?", tenant, payment_id)
        return found[0] if found else None

    def refund(self, tenant: str, payment: dict[str, Any]) -> dict[str, Any]:
        refund_id = f"ref_{uuid4().hex[:16]}"
        with self._transaction() as db:
            self._run(
                db,
                "INSERT INTO demo_refunds (id, tenant, payment_id, amount_cents) VALUES (?, ?, ?, ?)",
                *(refund_id, tenant, payment["id"], payment["amountCents"]),
            )
        return {"id": refund_id, "paymentId": payment["id"], "amountCents": payment["amountCents"]}

    def _select(self, where: str, *values: object) -> list[dict[str, Any]]:
        with self._transaction() as db:
            query = f"SELECT id, status, customer_id, amount_cents, currency FROM demo_payments {where}"
            return [dict(zip(_COLUMNS, row, strict=True)) for row in self._run(db, query, *values)]

    def _run(self, db: Connection, query: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = db.execute(query.replace("?", self._mark), values)
        return list(cursor.fetchall()) if cursor.description else []

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with closing(self._connect()) as db:
            yield db
            db.commit()

    def _connect(self) -> Any:
        if self._url.startswith("sqlite:"):
            return sqlite3.connect(self._url.removeprefix("sqlite:///"), timeout=10)
        import psycopg

        return psycopg.connect(self._url, connect_timeout=5)
