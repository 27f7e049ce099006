"""Reads for operators, webhooks and resumed requests: steps, audit lines, lists, and keys found by a provider's id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, LiteralString

from oncekey.core.audit import AuditLine
from oncekey.core.health import COUNTED, NO_RESOLVER, OPERATIONS, WAITING_SECONDS, HalfDoneOf, StoreHealth, UnknownsOf
from oncekey.core.rates import Tally
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.stores.api import FOUND
from oncekey.stores.postgres import rows
from oncekey.stores.postgres.arrays import Text
from oncekey.stores.postgres.statements import SLIM, statement
from oncekey.stores.sql import key_rows

if TYPE_CHECKING:
    import psycopg

_OWN_INDEX = frozenset({State.IN_PROGRESS, State.PENDING, State.UNKNOWN, State.EXPIRED})
"""The states that have an index of their own. Keys in other states are found by reading in the order of the keys."""

_STEPS, _AUDIT, _FIND, _COUNTS, _WAITING, _UNKNOWNS = (
    statement(name) for name in ("steps", "audit", "find", "counts", "waiting", "unknowns")
)
_HALF_DONE, _IDENTITY, _TALLY = statement("half_done"), statement("identity"), statement("tally")
_LISTING = statement("listing", SLIM)


class Lookups:
    """A part of :class:`oncekey.stores.postgres.store.PostgresStore`, which has the connection."""

    if TYPE_CHECKING:

        def _start_clock(self) -> None: ...
        def _execute(self, statement: LiteralString, parameters: Any) -> psycopg.Cursor[tuple[Any, ...]]: ...

    def identity(self) -> str:
        self._start_clock()
        ((first_migration, database, its_id, table_id),) = self._execute(_IDENTITY, None)
        return f"{first_migration} {database} {its_id} {table_id}"

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        self._start_clock()
        found: list[list[Step]] = [[] for _ in keys]
        columns = {"scope": Text([asked.scope for asked in keys]), "key": Text([asked.key for asked in keys])}
        for row in self._execute(_STEPS, columns):
            found[row[0] - 1].append(key_rows.step(row[1:]))
        return found

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        self._start_clock()
        return [AuditLine(*row) for row in self._execute(_AUDIT, {"scope": scope, "key": key, "limit": limit})]

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[tuple[str, str]]:
        self._start_clock()
        asked = {"downstream_key": downstream_key, "provider_id": provider_id, "limit": FOUND}
        return [(scope, key) for scope, key in self._execute(_FIND, asked)]

    def listing(
        self,
        state: State | None = None,
        scope: str | None = None,
        operation: str | None = None,
        older_than: float | None = None,
        limit: int = 100,
        after: tuple[str, str] | None = None,
    ) -> list[Record]:
        self._start_clock()
        after_scope, after_key = after or ("", "")
        asked = {
            "scope": scope,
            "operation": operation,
            "older_than": older_than,
            "limit": limit,
            "after_scope": after_scope,
            "after_key": after_key,
        }
        return [rows.record(row) for row in self._execute(listing_statement(state, scope), asked)]

    def tally(self, asked: Tally) -> int:
        self._start_clock()
        values = {"tenant": asked.tenant, "end": asked.end, "newer_than": asked.newer_than, "limit": asked.limit}
        ((number,),) = self._execute(_TALLY, values)
        return int(number)

    def counts(self) -> StoreHealth:
        self._start_clock()
        counts = dict.fromkeys(State, 0)
        for name, number in self._execute(_COUNTS, {"limit": COUNTED}):
            counts[State(name)] += number
        ((lease_over, unknown, dead),) = self._execute(_WAITING, {"limit": COUNTED})
        asked = {"limit": COUNTED, "no_resolver": NO_RESOLVER, "operations": OPERATIONS}
        waits = {"limit": COUNTED, "waiting": WAITING_SECONDS, "operations": OPERATIONS}
        return StoreHealth(
            counts=counts,
            dead=dead,
            oldest_unknown_seconds=unknown or 0.0,
            lease_over_seconds=max(0.0, lease_over or 0.0),
            unknowns=tuple(UnknownsOf(*row) for row in self._execute(_UNKNOWNS, asked)),
            half_done=tuple(HalfDoneOf(*row) for row in self._execute(_HALF_DONE, waits)),
        )


def listing_statement(state: State | None, scope: str | None) -> LiteralString:
    wanted_state: LiteralString = "true"
    for known in State:
        if known is state:
            wanted_state = f"k.state = '{known.value}'"
    parts: tuple[tuple[LiteralString, LiteralString], ...] = (
        ("{materialized}", "MATERIALIZED" if state in _OWN_INDEX else "NOT MATERIALIZED"),
        ("{state}", wanted_state),
        ("{scope}", "true" if scope is None else "k.scope = %(scope)s"),
    )
    text = _LISTING
    for mark, part in parts:
        text = text.replace(mark, part)
    return text
