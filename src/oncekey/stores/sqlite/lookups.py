"""Reads for operators, webhooks and resumed requests: steps, audit lines, lists, and keys found by a provider's id.

It only reads, so it takes neither the gate nor the write lock. Each answer comes from one snapshot.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from oncekey.core.audit import AuditLine
from oncekey.core.health import COUNTED, NO_RESOLVER, OPERATIONS, WAITING_SECONDS, HalfDoneOf, StoreHealth, UnknownsOf
from oncekey.core.rates import Tally
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.stores.api import FOUND
from oncekey.stores.sql import key_rows, queries
from oncekey.stores.sqlite import rows, schema
from oncekey.stores.sqlite.connections import Connections

_STEPS, _AUDIT, _FIND, _LISTING, _COUNTS, _WAITING = (
    queries.statement(schema.PACKAGE, name) for name in ("steps", "audit", "find", "listing", "counts", "waiting")
)
_HALF_DONE, _TALLY = queries.statement(schema.PACKAGE, "half_done"), queries.statement(schema.PACKAGE, "tally")
_UNKNOWNS, _COUNTED_UNKNOWNS = queries.statement(schema.PACKAGE, "unknowns"), (COUNTED, NO_RESOLVER, OPERATIONS)

_INDEXES = {
    State.IN_PROGRESS: "leases",
    State.PENDING: "abandoned",
    State.UNKNOWN: "unknowns",
    State.EXPIRED: "tombstones",
}
"""The states that have an index of their own. Keys in other states are found by reading in the order of the keys."""


class Lookups:
    """A part of :class:`oncekey.stores.sqlite.store.SqliteStore`, which has the connections."""

    connections: Connections
    clock: Callable[[], float]

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        with self._reading() as connection:
            return [
                [key_rows.step(row) for row in connection.execute(_STEPS, (asked.scope, asked.key))] for asked in keys
            ]

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        with self._reading() as connection:
            return [AuditLine(*row) for row in connection.execute(_AUDIT, (scope, key, limit))]

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[tuple[str, str]]:
        with self._reading() as connection:
            return connection.execute(_FIND, (downstream_key, provider_id, FOUND)).fetchall()

    def listing(
        self,
        state: State | None = None,
        scope: str | None = None,
        operation: str | None = None,
        older_than: float | None = None,
        limit: int = 100,
        after: tuple[str, str] | None = None,
    ) -> list[Record]:
        with self._reading() as connection:
            now = self.clock()
            created_by = None if older_than is None else now - older_than
            parameters = (*(after or ("", "")), scope, operation, created_by, limit)
            found = connection.execute(listing_statement(state, scope), parameters)
            return [rows.record(row, None, now) for row in found]

    def tally(self, asked: Tally) -> int:
        with self._reading() as connection:
            since = None if asked.newer_than is None else self.clock() - asked.newer_than
            (number,) = connection.execute(_TALLY, (asked.tenant, asked.end, since, asked.limit)).fetchone()
            return int(number)

    def counts(self) -> StoreHealth:
        with self._reading() as connection:
            now = self.clock()
            counts = dict.fromkeys(State, 0)
            for name, number in connection.execute(_COUNTS, (COUNTED,)):
                counts[State(name)] += number
            lease, unknown, dead = connection.execute(_WAITING, (COUNTED,)).fetchone()
            return StoreHealth(
                counts=counts,
                dead=dead,
                oldest_unknown_seconds=0.0 if unknown is None else now - unknown,
                lease_over_seconds=0.0 if lease is None else max(0.0, now - lease),
                unknowns=tuple(UnknownsOf(*row) for row in connection.execute(_UNKNOWNS, _COUNTED_UNKNOWNS)),
                half_done=tuple(
                    HalfDoneOf(*row)
                    for row in connection.execute(_HALF_DONE, (COUNTED, now, WAITING_SECONDS, OPERATIONS))
                ),
            )

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One snapshot for all reads of the block; it never writes."""
        with self.connections.use() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")


def listing_statement(state: State | None, scope: str | None) -> str:
    index = f"INDEXED BY idempotency_keys_{_INDEXES[state]}" if state in _INDEXES else ""
    wanted_state = "1" if state is None else f"state = '{state.value}'"
    wanted_scope = "1" if scope is None else "scope = ?3"
    return _LISTING.format(index=index, state=wanted_state, scope=wanted_scope)
