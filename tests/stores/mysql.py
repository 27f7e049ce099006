"""What the tests of MySQL share: a database with our tables, a row that ages, a transaction that stays open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pymysql

from oncekey.core.record import Record
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.stores.mysql import MysqlStore
from tests.engine.doubles import RESPONSE, reservation

TABLES = ("idempotency_keys", "idempotency_steps", "idempotency_outbox", "idempotency_audit")
_TIMES = ("lease_until", "expires_at", "reconcile_at", "created_at", "finished_at")


def connect(url: str, **options: Any) -> pymysql.Connection:
    """A connection from outside of what is tested, as an app has it: not in autocommit mode. (Without TLS: PyMySQL
    takes 35 ms to prepare for it.)"""
    parts = urlsplit(url)
    place: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    return pymysql.connect(**place, database=parts.path[1:], ssl_disabled=True, **options)


async def connect_async(url: str, **options: Any) -> Any:
    """As ``connect``, for an event loop."""
    import asyncmy

    parts = urlsplit(url)
    place: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    return await asyncmy.connect(**place, db=parts.path[1:], **options)


def run(url: str, *statements: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """Run these, each in a transaction of its own; the rows of the last one."""
    own = connect(url, autocommit=True)
    try:
        with own.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement, parameters or None)
            return list(cursor.fetchall())
    finally:
        own.close()


def older(url: str, seconds: float, scope: str | None = None, key: str | None = None) -> None:
    """Let time pass for one row, or for all."""
    times = ", ".join(f"{name} = {name} - INTERVAL {round(seconds * 1e6)} MICROSECOND" for name in _TIMES)
    which = "" if scope is None else " WHERE scope = %(scope)s AND `key` = %(key)s"
    run(url, f"UPDATE idempotency_keys SET {times}{which}", **({} if scope is None else {"scope": scope, "key": key}))


def empty(url: str) -> None:
    """Our tables without a row."""
    run(url, *(f"DELETE FROM {name}" for name in TABLES))


@contextmanager
def opened(url: str, **options: Any) -> Iterator[MysqlStore]:
    store = MysqlStore(url, **options)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def holding(url: str, statement: str) -> Iterator[pymysql.Connection]:
    """A transaction that has run this and stays open."""
    other = connect(url)
    try:
        other.cursor().execute(statement)
        yield other
        other.rollback()
    finally:
        other.close()


def put(store: MysqlStore, *keys: str) -> list[Record]:
    """New rows in progress."""
    records = [found.record for found in store.reserve([reservation(key) for key in keys])]
    assert all(records)
    return records  # type: ignore[return-value]


def complete(record: Record) -> Any:
    return swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
