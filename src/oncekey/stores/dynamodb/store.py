"""DynamoDB by boto3: one item per key, and one conditional write for each reservation and each swap.

The record, its steps and its audit are in one item, so a move commits with its step and its line, or not at all, in one
round trip. A refused write returns the item as it is; where a server does not (dynalite), one consistent read follows.
``items.py`` has the layout, ``writes.py`` what each write compares.

**Each key of a batch commits by itself.** DynamoDB has no cheap commit for many items, and no caller needs one: the
lane asks again about each key of a batch that failed, and owner tokens tell what happened. The requests of a batch are
under way at the same time, up to ``client.AT_ONCE``.

**Time is the host's.** A lease counts ``margin`` seconds longer for all others than for its owner.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from oncekey.core.audit import AuditLine
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import State
from oncekey.core.swaps import Swap
from oncekey.errors import SchemaError, StoreUnavailable
from oncekey.stores.api import Capabilities, Duty
from oncekey.stores.duties import FAIR, Turns, deleted_at, due_at
from oncekey.stores.dynamodb import items, schema, writes
from oncekey.stores.dynamodb.checks import Checks
from oncekey.stores.dynamodb.client import Client, Conflict, Verb
from oncekey.stores.dynamodb.items import Item
from oncekey.stores.dynamodb.kept import DynamoKept
from oncekey.stores.dynamodb.lookups import Lookups
from oncekey.stores.dynamodb.parts import Gone
from oncekey.stores.dynamodb.settings import Settings
from oncekey.stores.dynamodb.writes import Write

_TRIES = 5
"""How often a write is tried again that met a row other than the one its mover saw, or none."""
_RECORD = (*items.SLIM, *items.RESPONSE)
_PLACES = {
    Duty.LEASES: (State.IN_PROGRESS,),
    Duty.EXPIRED: (State.COMPLETED, State.FAILED, State.FAILED_RETRYABLE),
    Duty.ABANDONED: (State.PENDING,),
    Duty.UNKNOWNS: (State.UNKNOWN,),
    Duty.LAPSED: (items.HALF_DONE,),
    Duty.RESUMABLE: (items.HALF_DONE,),
}


class DynamoStore(Lookups, DynamoKept, Checks):
    capabilities = Capabilities(durable=True, shared=True, server_clock=False, writers=2)

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._table = settings.table
        self._clock = clock
        self._client = Client(settings)
        self._turns = Turns()
        self._numbers = itertools.count(1)
        self._writer, self._pid = secrets.token_hex(8), os.getpid()

    # -- reserve -------------------------------------------------------------------------------------------------

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        ask = self._client.verb()
        return ask.all(lambda wanted: Found(self._read_or_insert(ask, wanted)), batch, if_throttled=_busy)

    def _read_or_insert(self, ask: Verb, wanted: Reservation) -> Record | None:
        """The row. None: others deleted it and made it again each time that this looked."""
        at = items.address(wanted.scope, wanted.key)
        for _ in range(_TRIES):
            write = self._write()
            try:
                ask(
                    "update_item",
                    Key=at,
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                    **writes.reserve(wanted, write),
                )
            except Conflict as refused:
                item = refused.item or self._get(ask, at)
                if item is not None and items.is_key(item):
                    try:
                        return self._read_record(ask, item, write.now)
                    except Gone:
                        continue
            else:
                return wanted.record(write.now)
        return None

    # -- swap ----------------------------------------------------------------------------------------------------

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        ask = self._client.verb()
        return ask.all(lambda change: self._compare_and_set(ask, change), batch, if_throttled=_held)

    def _compare_and_set(self, ask: Verb, change: Swap) -> Record | None:
        if change.to_state is None:
            return self._remove(ask, change)
        at = items.address(change.scope, change.key)
        pk = at["pk"]["S"]
        seen = change.seen
        if seen is None:  # the mover has not read the row
            item = self._get(ask, at)
            if item is None or not items.is_key(item):
                return None
            seen = items.record(item, self._clock())
        self._put_pointers(ask, pk, change.step)
        body, result = self._put_large(ask, pk, change, seen)
        for _ in range(_TRIES):
            write = replace(self._write(change), body_parts=body, result_parts=result)
            try:
                old = ask(
                    "update_item",
                    Key=at,
                    ReturnValues="ALL_OLD",
                    ReturnValuesOnConditionCheckFailure="ALL_OLD",
                    **writes.move(change, seen, write),
                )["Attributes"]
            except Conflict as refused:
                item = refused.item or self._get(ask, at)
                if item is not None and write.made(item):
                    return items.record(item, write.now, change.response)
                if item is None or not items.is_key(item):
                    break
                seen = items.record(item, write.now)
                if not _fits(change, seen, write):
                    break
            else:
                self._clean_up(
                    ask, old, steps=change.forgets_steps, step=None if change.step is None else change.step.name
                )
                restarted = change.restart.record(write.now) if change.restart is not None else None
                return restarted or change.moved(items.record(old, write.now), write.now)
        self._drop_parts(ask, pk, body, result)
        return None

    def _put_large(self, ask: Verb, pk: str, change: Swap, seen: Record) -> tuple[str | None, str | None]:
        """Write the response's body and the step's result in parts, each if it is too large for the item."""
        response, step = change.response, change.step
        body = response.body if response is not None and change.restart is None else None
        result = step.result if step is not None else None
        if body is None and result is None:
            return None, None
        row = change.moved(seen, self._clock())
        until = items.time_to_live(row) or row.expires_at + row.retention_seconds
        return self._put_parts(ask, pk, "body", body, until), self._put_parts(ask, pk, "result", result)

    def _remove(self, ask: Verb, change: Swap) -> Record | None:
        """Delete the key, and return it as it was. If it has an audit, or gets one now, the audit stays."""
        at = items.address(change.scope, change.key)
        strips = change.audit is not None
        for _ in range(_TRIES):
            write = self._write(change)
            request = writes.strip(change, write) if strips else writes.remove(change, write)
            request |= {"ReturnValues": "ALL_OLD", "ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
            try:
                old = ask("update_item" if strips else "delete_item", Key=at, **request)["Attributes"]
            except Conflict as refused:
                item = refused.item or self._get(ask, at, (*_RECORD, "audit", "writer", "number"))
                if item is not None and write.made(item) and change.seen is not None:
                    return replace(change.seen, now=write.now)
                if item is None or not items.is_key(item):
                    return None
                if not _fits(change, items.record(item, write.now), write):
                    return None
                strips = "audit" in item
            else:
                try:
                    return self._read_record(ask, old, write.now)
                finally:
                    self._clean_up(ask, old, steps=True)
        return None

    def _write(self, change: Swap | None = None) -> Write:
        now = self._clock()
        return self._numbered(change.audit_line(now) if change is not None else None, now)

    def _numbered(self, line: AuditLine | None, now: float) -> Write:
        if self._pid != os.getpid():  # a forked child is another writer
            self._writer, self._pid = secrets.token_hex(8), os.getpid()
        audit = None if line is None else items.audit_text(line, time.time_ns())
        return Write(self._writer, next(self._numbers), now, self._settings.margin, audit=audit)

    # -- reads ---------------------------------------------------------------------------------------------------

    def _get(self, ask: Verb, at: Item, names: tuple[str, ...] = (*_RECORD, "writer", "number")) -> Item | None:
        """A key's item as committed."""
        placeholders = {f"#n{nth}": name for nth, name in enumerate(names)}
        how = {"ProjectionExpression": ", ".join(placeholders), "ExpressionAttributeNames": placeholders}
        found: Item | None = ask("get_item", Key=at, ConsistentRead=True, **how).get("Item")
        return found

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        if not keys:
            return []
        ask = self._client.verb()
        for _ in range(_TRIES):
            found = self._get_items(ask, [items.address(*at) for at in keys], ("pk", *_RECORD))
            now = self._clock()
            try:
                rows = {pk: self._read_record(ask, item, now) for pk, item in found.items() if items.is_key(item)}
            except Gone:
                continue
            return [rows.get(items.hash_of(*at)) for at in keys]
        raise StoreUnavailable(f"{self._settings.where} changed while it was read")

    def due(self, duty: Duty, limit: int) -> list[Record]:
        ask = self._client.verb(long=True)
        now = self._clock()
        late = now - self._settings.margin if duty is Duty.LEASES else now
        half_done = items.HALF_DONE in _PLACES[duty]  # with two duties, it is not in the order of either
        entries = self._entries(ask, _PLACES[duty], until=late, most=None if half_done else limit)
        rows = [items.record(entry, now) for entry in entries]
        found = [(when, row) for row in rows if (when := due_at(row, duty)) is not None and when <= late]
        found.sort(key=lambda pair: (pair[0], pair[1].scope, pair[1].key))
        oldest = [row for _, row in found][:limit]
        if duty in FAIR and len(oldest) == limit:
            waiting = self._entries(ask, _PLACES[duty])
            return self._turns.hand_out_of((items.record(entry, now) for entry in waiting), duty, limit, now)
        return self._turns.hand_out(duty, limit, oldest, lambda after, most: [], lambda scopes, most: [])

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        ask = self._client.verb(long=True)
        now = self._clock()
        expired = [] if expired_state_only else self._purgeable(ask, _PLACES[Duty.EXPIRED], limit, now)
        over = self._purgeable(ask, (State.EXPIRED,), limit - len(expired), now)
        return sum(ask.all(lambda row: self._purge_one(ask, row), [*expired, *over]))

    def _purgeable(self, ask: Verb, places: Sequence[str], limit: int, now: float) -> list[Record]:
        """The rows in these places that are due to be deleted, oldest first."""
        if limit <= 0:
            return []
        rows = [items.record(entry, now) for entry in self._entries(ask, places, until=now, most=limit)]
        ends = [(due_at(row, Duty.EXPIRED) or deleted_at(row) or now, row) for row in rows]
        ends.sort(key=lambda pair: (pair[0], pair[1].scope, pair[1].key))
        return [row for _, row in ends][:limit]

    def _purge_one(self, ask: Verb, row: Record) -> bool:
        """Delete a row, if it still is as the index says."""
        at = items.address(row.scope, row.key)
        strips = False
        for _ in range(2):
            write = self._write()
            request = writes.purge(row, write, strips=strips)
            try:
                old = ask("update_item" if strips else "delete_item", Key=at, ReturnValues="ALL_OLD", **request)
            except Conflict:
                if strips:
                    return False
                strips = True
            else:
                self._clean_up(ask, old.get("Attributes", {}), steps=True)
                return True
        return False

    # -- the table -----------------------------------------------------------------------------------------------

    def migrate(self) -> list[str]:
        return schema.migrate(self._client, self._settings)

    def check(self) -> None:
        if sentence := schema.outdated(self._client.verb(), self._settings):
            raise SchemaError(sentence)

    def disconnect(self) -> None:
        """The threads of a process share their connections: there is none of this thread alone."""

    def close(self) -> None:
        self._client.close()


def _busy() -> Found:
    return Found(None)


def _held() -> None:
    return None


def _fits(change: Swap, row: Record, write: Write) -> bool:
    """Whether the row still is as the swap compares it, with the margin of leases."""
    if change.lease_over_by is not None and row.lease_until > write.now - max(change.lease_over_by, write.margin):
        return False
    return change.fits(row, write.now)
