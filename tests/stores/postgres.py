"""What the tests of PostgreSQL share: a row that ages, rows to begin with, and every verb by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import swap
from oncekey.stores.api import Duty
from oncekey.stores.postgres import PostgresStore
from tests import databases
from tests.engine.doubles import RESPONSE, record_of, reservation

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


@contextmanager
def opened(url: str, **options: Any) -> Iterator[PostgresStore]:
    """Another store over the same database; it is closed at the end."""
    store = PostgresStore(url, **options)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def holding(url: str, statement: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that has run this and stays open."""
    with psycopg.connect(url) as other:
        other.execute(statement)
        yield other
        other.rollback()


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
