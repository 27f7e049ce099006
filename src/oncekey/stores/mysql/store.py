"""The store on MySQL and MariaDB: every verb is one packet of statements, one round trip and one commit per batch.

Owns what the verbs say to the server. ``sessions.py`` has the connections, and the .sql files what the statements do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from oncekey.core.record import Found, Record, Reservation, StoredResponse
from oncekey.core.states import State
from oncekey.core.swaps import Swap
from oncekey.errors import SchemaError
from oncekey.stores.api import Capabilities, Duty
from oncekey.stores.duties import FAIR, JobTurns, Turns
from oncekey.stores.mysql import migrate as migrations
from oncekey.stores.mysql import request_rows, rows
from oncekey.stores.mysql.checks import Probes
from oncekey.stores.mysql.connection import Connection, Written, explained
from oncekey.stores.mysql.kept import MysqlKept
from oncekey.stores.mysql.lookups import Lookups
from oncekey.stores.mysql.outbox import MysqlOutbox
from oncekey.stores.mysql.packets import NOW, PACKAGE, Text, columns, filled, micros, part, slim, statement
from oncekey.stores.mysql.sessions import LostRace, Sessions
from oncekey.stores.mysql.transactions import MysqlTransactions
from oncekey.stores.sql import queries

_TRIES = 5  # as on PostgreSQL: a lost race needed at most five to see the winner's row
_ROOM = 4096
"""For what a packet has beside a body: names, times, the text of the statements."""

_THEN = part("now")
_RESERVE = statement("reserve", columns(NOW))
_READ = statement("read", columns(NOW))
_END = statement("end")
_BOTH = statement("both", columns(NOW))
_UPDATED = 3
"""Which result of the packets ``end`` and ``both`` is that of the UPDATE."""
_SWAP = statement("swap", slim(_THEN))
_RESTART = statement("restart", slim(_THEN))
_REMOVE = statement("remove", columns(_THEN))
_BESIDE = (("forgetting", "forget", rows.forgetting), ("steps", "step", rows.steps), ("audits", "note", rows.audits))
_DUE = statement("due", slim(NOW))
_DUE_RESUMABLE = statement("due_resumable", slim(NOW))
_FAIR_SCOPES, _FAIR_KEYS = statement("fair_scopes"), statement("fair_keys", slim(NOW))
_DOOMED, _PURGE, _PURGE_AUDIT = statement("doomed"), statement("purge"), statement("audit_purge")
_DUTIES = {
    Duty.LEASES: "in_progress",
    Duty.EXPIRED: "over",
    Duty.ABANDONED: "pending",
    Duty.UNKNOWNS: "unknown",
    Duty.LAPSED: "half_done",
}
"""The ``duty`` of the rows of each duty but one: resumable keys are found by another index."""

Moved = dict[tuple[str, str], Record]
_Work = TypeVar("_Work", Reservation, Swap)


class MysqlStore(Lookups, MysqlKept, MysqlOutbox, MysqlTransactions, Probes, Sessions):
    capabilities = Capabilities(durable=True, shared=True, server_clock=True, writers=2)

    def __init__(self, url: str, *, timeout: float = 5.0, lock_timeout: float = 1.0) -> None:
        super().__init__(url, timeout=timeout, lock_timeout=lock_timeout)
        self._turns = Turns()
        self._job_turns = JobTurns()

    # -- verbs ---------------------------------------------------------------------------------------------------

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        self._start_clock()
        found: Moved = {}
        missing = in_order(batch)
        for _ in range(_TRIES if batch else 0):
            try:
                reads = self._connection().galera
                inserted, *_, there = self._send(_RESERVE, **_reserving(missing, reads))
            except LostRace:
                continue
            found |= by_key(map(rows.record, there)) if reads or there else _inserted(missing, inserted)
            missing = [wanted for wanted in missing if (wanted.scope, wanted.key) not in found]
            if not missing:
                break
        return [Found(found.get((wanted.scope, wanted.key))) for wanted in batch]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        self._start_clock()
        moved: Moved = {}
        batch = self._with_bodies_that_fit(batch)
        others = in_order(batch)
        ends = [change for change in others if change.ends]
        if ends and request_rows.can_end_together(ends):
            answer = self._send(_END, **_ending(ends))
            moved = _ended(ends, answer[_UPDATED])
            if moved or len(ends) == 1:  # a batch of one has no other rows that could be moved
                others = [change for change in others if not change.ends]
        for text, kind in (
            (_SWAP, [change for change in others if change.to_state is not None and change.restart is None]),
            (_RESTART, [change for change in others if change.restart is not None]),
            (_REMOVE, [change for change in others if change.to_state is None]),
        ):
            if kind:
                moved |= self._move(text, kind)
        return [moved.get((change.scope, change.key)) for change in batch]

    def _move(self, text: str, batch: list[Swap]) -> Moved:
        """Swaps that are not on a request's hot path: each kind is one packet and one commit."""
        made = {mark: build(batch) for mark, _, build in _BESIDE}
        beside = "\n".join(statement(name) for mark, name, _ in _BESIDE if made[mark] is not None)
        answer = self._send(
            text.replace("{beside}", beside),
            size=len(batch),
            compared=rows.compared(batch),
            wanted=rows.restarting(batch) if text is _RESTART else rows.moving(batch),
            placed=rows.placed(batch),
            **{mark: part for mark, part in made.items() if part is not None},
        )
        found = next(each for each in answer if isinstance(each, Sequence))  # the other statements return numbers
        written = text is _SWAP  # the others return the row as it was, or without a response
        return by_key(rows.record(row[1:], batch[row[0] - 1].response if written else None) for row in found)

    def _with_bodies_that_fit(self, batch: Sequence[Swap]) -> Sequence[Swap]:
        """A response that does not fit into one packet becomes a tombstone: the key is used, whatever its answer."""
        if sum(_size(change.response) for change in batch) * 2 < _ROOM:  # most responses are small
            return batch
        most = self._connection().max_packet - _ROOM
        return [_without_body(change) if _size(change.response) > most else change for change in batch]

    def both(self, begins: Sequence[Reservation], ends: Sequence[Swap]) -> tuple[list[Found], list[Record | None]]:
        """One packet and one commit, if all swaps end an attempt and no rival is in the way; otherwise as each verb.

        If no swap was made, the packet may have inserted its reservations. ``reserve`` finds them by their owner.
        """
        self._start_clock()
        changes = in_order(self._with_bodies_that_fit(ends))
        if begins and changes and all(change.ends for change in changes) and request_rows.can_end_together(changes):
            asked = in_order(begins)
            try:
                reads = self._connection().galera
                answer = self._send(_BOTH, **_ending(changes), **_reserving(asked, reads))
            except LostRace:
                pass
            else:
                *_, there, _whole, _committed = answer
                if moved := _ended(changes, answer[_UPDATED]):
                    read = reads or there
                    found = by_key(map(rows.record, there)) if read else _inserted(asked, answer[_UPDATED + 1])
                    return (
                        [Found(found[wanted.scope, wanted.key]) for wanted in begins]
                        if len(found) == len(begins)
                        else self.reserve(begins),
                        [moved[change.scope, change.key] for change in ends],
                    )
        swapped = self.swap(ends) if ends else []
        return self.reserve(begins) if begins else [], swapped

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        self._start_clock()
        found = by_key(self._records(_READ, among=request_rows.among(keys))) if keys else {}
        return [found.get(at) for at in keys]

    def due(self, duty: Duty, limit: int) -> list[Record]:
        self._start_clock()
        if duty is Duty.RESUMABLE:
            oldest = self._records(_DUE_RESUMABLE, limit=limit)
        else:
            oldest = self._records(_DUE, duty=Text(f"'{_DUTIES[duty]}'"), limit=limit)

        def visit(after: str, most: int) -> list[tuple[str, bool]]:
            (visited,) = self._send(_FAIR_SCOPES, state=_word(FAIR[duty]), after=after, limit=most)
            return [(scope.decode(), bool(is_due)) for scope, is_due in visited]

        def take(scopes: Sequence[str], most: int) -> list[Record]:
            each = [filled(_FAIR_KEYS, {"state": _word(FAIR[duty]), "scope": at, "limit": most}) for at in scopes]
            return [rows.record(row) for row in self._packet(" UNION ALL ".join(each))[-1]] if each else []

        return self._turns.hand_out(duty, limit, oldest, visit, take)

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        self._start_clock()
        doomed: list[tuple[Any, Any]] = []
        for duty in ("'expired'",) if expired_state_only else ("'over'", "'expired'"):
            if len(doomed) < limit:
                (due,) = self._send(_DOOMED, duty=Text(duty), limit=limit - len(doomed))
                doomed += due
        if not doomed:
            return 0
        *_, ((deleted,),), _whole, _committed = self._send(_PURGE, size=len(doomed), placed=rows.at(sorted(doomed)))
        return int(deleted)

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        self._start_clock()
        *_, deleted, _committed = self._send(_PURGE_AUDIT, limit=limit, keep_seconds=micros(keep_seconds))
        return int(deleted)

    # -- schema --------------------------------------------------------------------------------------------------

    def migrate(self) -> list[str]:
        self._start_clock()
        connection = self._connection(checked=False)
        try:
            with explained(self._where):
                ran = migrations.run(connection)
        finally:
            self.disconnect()  # its time limits were those of a migration
        self.check()
        return ran

    def check(self) -> None:
        self._start_clock()
        self._check(self._connection(checked=False))

    def _check(self, connection: Connection) -> None:
        wanted = [*queries.tables(PACKAGE), "oncekey_schema"]
        try:
            with explained(self._where):
                there = migrations.tables(connection, wanted)
                applied = queries.Applied(frozenset())
                if "oncekey_schema" in there:
                    applied = migrations.applied(connection)
        except BaseException:
            self.disconnect()
            raise
        if sentence := queries.outdated(PACKAGE, applied, self._where, set(wanted) - there):
            raise SchemaError(sentence)
        self._local.checked = True

    # -- sending -------------------------------------------------------------------------------------------------

    def _records(self, text: str, **values: Any) -> list[Record]:
        return [rows.record(row) for row in self._send(text, **values)[-1]]


def in_order(batch: Sequence[_Work]) -> list[_Work]:
    """A batch in the order of (scope, key) as bytes. All lanes lock and insert in this order."""
    return sorted(batch, key=lambda work: (work.scope.encode("utf-8", "replace"), work.key.encode("utf-8", "replace")))


def by_key(records: Iterable[Record]) -> Moved:
    return {(record.scope, record.key): record for record in records}


def _reserving(batch: Sequence[Reservation], reads: bool) -> dict[str, Any]:
    """``reads``: the rows are read in any case. In a Galera cluster only a read tells whose rows they are: a write of
    another node can undo a statement of the packet."""
    keys = [(wanted.scope, wanted.key) for wanted in batch]
    enough = len(batch) + 1 if reads else len(batch)
    return {"enough": enough, "among": request_rows.among(keys), **request_rows.reservations(batch)}


def _inserted(batch: Sequence[Reservation], inserted: Written) -> Moved:
    """The rows, if all were inserted. If not, those that were there have been deleted, and the caller asks again."""
    return by_key(request_rows.reserved(each, inserted.time) for each in batch) if inserted == len(batch) else {}


def _ending(batch: Sequence[Swap]) -> dict[str, Any]:
    return {"size": len(batch), "owned": request_rows.owned(batch), **request_rows.ending(batch)}


def _ended(batch: Sequence[Swap], updated: Written) -> Moved:
    """The rows that ``end`` moved: all of the batch, or none."""
    return by_key(rows.ended(change, updated.time) for change in batch) if updated == len(batch) else {}


def _size(response: StoredResponse | None) -> int:
    """How long the body is in a packet: at most twice its bytes, because of escapes."""
    return 0 if response is None or response.body is None else 2 * len(response.body)


def _without_body(change: Swap) -> Swap:
    assert change.response is not None  # noqa: S101 - it has a size
    return replace(change, response=replace(change.response, body=None))


def _word(state: State) -> Text:
    return Text(f"'{state.value}'")
