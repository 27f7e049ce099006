"""What operators, webhooks and health checks read: steps, audit, lists and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oncekey.core.audit import AuditLine
from oncekey.core.health import COUNTED, NO_RESOLVER, OPERATIONS, WAITING_SECONDS, HalfDoneOf, StoreHealth, UnknownsOf
from oncekey.core.rates import Tally
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.stores.api import FOUND
from oncekey.stores.mysql import rows
from oncekey.stores.mysql.packets import NOW, Text, micros, slim, statement
from oncekey.stores.sql import key_rows

_OWN_DUTY = frozenset({State.IN_PROGRESS, State.PENDING, State.UNKNOWN, State.EXPIRED})
"""The states that are a duty of their own. Keys in other states are found by reading in the order of the keys."""

_STEPS, _AUDIT, _FIND, _COUNTS, _WAITING, _UNKNOWNS, _HALF_DONE = (
    statement(name) for name in ("steps", "audit", "find", "counts", "waiting", "unknowns", "half_done")
)
_LISTING, _IDENTITY, _TALLY = statement("listing", slim(NOW)), statement("identity"), statement("tally")


class Lookups:
    """A part of :class:`oncekey.stores.mysql.store.MysqlStore`, which has the connection."""

    if TYPE_CHECKING:

        def _start_clock(self) -> None: ...
        def _send(self, text: str, **values: Any) -> list[Any]: ...

    def identity(self) -> str:
        self._start_clock()
        (((first_migration, database, made_at),),) = self._send(_IDENTITY)
        return f"{first_migration} {database} {made_at}"

    def steps(self, keys: Sequence[StepsOf]) -> list[list[Step]]:
        self._start_clock()
        found: list[list[Step]] = [[] for _ in keys]
        if not keys:
            return found
        (there,) = self._send(_STEPS, placed=rows.at([(asked.scope, asked.key) for asked in keys]))
        for place, name, kind, state, repeatable, result, downstream_key, provider_id in there:
            carried = (rows.text(downstream_key), rows.text(provider_id))
            found[place - 1].append(key_rows.step((name.decode(), kind, state, repeatable, result, *carried)))
        return found

    def audit(self, scope: str, key: str, limit: int) -> list[AuditLine]:
        self._start_clock()
        (lines,) = self._send(_AUDIT, scope=scope, key=key, limit=limit)
        return [
            AuditLine(at / 1e6, who, event, of.decode(), to.decode(), rows.text(job), before, after, why)
            for at, who, event, of, to, job, before, after, why in lines
        ]

    def find(self, *, downstream_key: str | None = None, provider_id: str | None = None) -> list[tuple[str, str]]:
        self._start_clock()
        (found,) = self._send(_FIND, downstream_key=downstream_key, provider_id=provider_id, limit=FOUND)
        return [(scope.decode(), key.decode()) for scope, key in found]

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
        (found,) = self._send(
            _LISTING,
            index=Text("idempotency_keys_due" if state in _OWN_DUTY else "PRIMARY"),
            state=_in_state(state),
            scope=scope,
            operation=operation,
            older_than=micros(older_than),
            after_scope=after_scope,
            after_key=after_key,
            limit=limit,
        )
        return [rows.record(row) for row in found]

    def tally(self, asked: Tally) -> int:
        self._start_clock()
        (((number,),),) = self._send(
            _TALLY, tenant=asked.tenant, end=asked.end, newer_than=micros(asked.newer_than), limit=asked.limit
        )
        return int(number)

    def counts(self) -> StoreHealth:
        self._start_clock()
        counts = dict.fromkeys(State, 0)
        (counted,) = self._send(_COUNTS, limit=COUNTED)
        for name, number in counted:
            counts[State(name)] = number
        (((lease_over, unknown, dead),),) = self._send(_WAITING, limit=COUNTED)
        prefix = {"no_resolver": NO_RESOLVER, "length": len(NO_RESOLVER)}
        (unknowns,) = self._send(_UNKNOWNS, limit=COUNTED, operations=OPERATIONS, **prefix)
        (half_done,) = self._send(_HALF_DONE, limit=COUNTED, operations=OPERATIONS, waiting=micros(WAITING_SECONDS))
        return StoreHealth(
            counts=counts,
            dead=dead,
            oldest_unknown_seconds=(unknown or 0) / 1e6,
            lease_over_seconds=max(0.0, (lease_over or 0) / 1e6),
            unknowns=tuple(UnknownsOf(*row) for row in unknowns),
            half_done=tuple(HalfDoneOf(name, number, oldest / 1e6) for name, number, oldest in half_done),
        )


def _in_state(state: State | None) -> Text:
    if state is None:
        return Text("true")
    return Text(f"k.{'duty' if state in _OWN_DUTY else 'state'} = '{state.value}'")
