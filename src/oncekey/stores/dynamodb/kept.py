"""The values that encryption covers, in DynamoDB: one scan over the table, in the order of hashes.

A key's item has its response, its steps and its audit, so one walk finds them all. A new value is one conditional write
of that item. It carries no number (``writes.py``): a late copy of it finds another old value, and is refused. Nor does
it change the number of the app's last write, by which the app recognises its own success.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core.audit import Audit, AuditLine
from oncekey.errors import StoreError
from oncekey.stores.dynamodb import items, writes
from oncekey.stores.dynamodb.client import Conflict, Verb
from oncekey.stores.dynamodb.expressions import Expressions
from oncekey.stores.dynamodb.items import Item, data, number, text
from oncekey.stores.dynamodb.parts import Gone, Parts
from oncekey.stores.dynamodb.writes import Write
from oncekey.stores.kept_api import BEFORE, OPERATORS_LINE, Kept, KeptKey, KeptLine, KeptPage, KeptStep, Rewrite

_READ = ("pk", "sk", *items.SLIM, *items.RESPONSE, *items.STEPS, "audit")
_TRIES = 5


class DynamoKept(Parts):
    """A part of :class:`oncekey.stores.dynamodb.store.DynamoStore`."""

    _clock: Callable[[], float]

    if TYPE_CHECKING:

        def _numbered(self, line: AuditLine | None, now: float) -> Write: ...

    def kept(self, after: str, limit: int) -> KeptPage:
        ask = self._client.verb(long=True)
        names = {f"#n{nth}": name for nth, name in enumerate(_READ)}
        request: dict[str, Any] = {
            "ConsistentRead": True,
            "Limit": limit,
            "FilterExpression": "#n1 = :key",  # parts and pointers are not read here
            "ProjectionExpression": ", ".join(names),
            "ExpressionAttributeNames": names,
            "ExpressionAttributeValues": {":key": text(items.KEY)},
        }
        if after:
            pk, sk = orjson.loads(after)
            request["ExclusiveStartKey"] = {"pk": text(pk), "sk": text(sk)}
        answer = ask("scan", **request)
        found = [kept for item in answer["Items"] for kept in self._kept_of(ask, item)]
        reached = answer.get("LastEvaluatedKey")
        following = orjson.dumps([reached["pk"]["S"], reached["sk"]["S"]]).decode() if reached else ""
        return KeptPage(found, following)

    def _kept_of(self, ask: Verb, item: Item | None) -> list[Kept]:
        """All values of one item. If a part of one was replaced meanwhile, the item is read again."""
        for _ in range(_TRIES):
            if item is None or "scope" not in item:
                return []
            scope, key = item["scope"]["S"], item["key"]["S"]
            try:
                keys: list[Kept] = [self._kept_key(ask, item)] if items.is_key(item) else []
                steps = self._read_steps(ask, item) if items.is_key(item) else []
            except Gone:
                item = self._get_items(ask, [items.address(scope, key)], _READ).get(items.hash_of(scope, key))
                continue
            results = [KeptStep(scope, key, step.name, step.result) for step in steps if step.result is not None]
            return [*keys, *results, *(_line(line, scope, key) for line in items.audit_of(item))]
        raise StoreError("a key changed each time that it was read")

    def _kept_key(self, ask: Verb, item: Item) -> KeptKey:
        row = items.record(item, self._clock())
        known = (row.last_error, row.state, row.fingerprint_version, row.expires_at)
        if "response_status" not in item:
            return KeptKey(row.scope, row.key, None, None, None, None, *known)
        body = bytes(item["body"]["B"]) if "body" in item else None
        if "body_parts" in item:
            body = self._get_parts(ask, items.hash_of(row.scope, row.key), item["body_parts"]["S"])
            if body is None:
                raise Gone
        status, version = int(item["response_status"]["N"]), int(item["response_version"]["N"])
        return KeptKey(row.scope, row.key, status, item["response_headers"]["S"], body, version, *known)

    # -- writing -------------------------------------------------------------------------------------------------

    def rewrite(self, batch: Sequence[Rewrite]) -> list[bool]:
        ask = self._client.verb(long=True)
        return ask.all(lambda work: self._rewrite(ask, work), batch)

    def _rewrite(self, ask: Verb, work: Rewrite) -> bool:
        _, scope, key, *_ = work.old.place
        at = items.address(scope, key)
        pk = at["pk"]["S"]
        item = self._get_items(ask, [at], _READ).get(pk)
        if item is None or work.old not in self._comparable(ask, item, work.old):
            return False
        if work.new == work.old:  # a write must set something
            return True
        change = Expressions()
        match work.old, work.new:
            case KeptKey(), KeptKey() as new:
                old_parts, new_parts = self._replace_response(ask, pk, item, new, change)
            case KeptStep() as old, KeptStep() as new_step:
                old_parts, new_parts = self._replace_result(ask, pk, item, old, new_step, change)
            case KeptLine() as old_line, KeptLine() as new_line:
                old_parts = new_parts = None
                _replace_line(item, old_line, new_line, change)
            case _:
                raise StoreError("a value can be replaced by one of its own kind only")
        try:
            ask("update_item", Key=at, **change.update())
        except Conflict:
            self._drop_parts(ask, pk, new_parts)
            return False
        self._drop_parts(ask, pk, old_parts)
        return True

    def _comparable(self, ask: Verb, item: Item, old: Kept) -> list[Kept]:
        """What the item has of the old value's kind, with the fields in it that are not compared."""
        try:
            if isinstance(old, KeptKey) and items.is_key(item):
                kept = self._kept_key(ask, item)
                return [_values_of(kept, old)]
            return [kept for kept in self._kept_of(ask, item) if not isinstance(kept, KeptKey)]
        except Gone:
            return []

    def _replace_response(
        self, ask: Verb, pk: str, item: Item, new: KeptKey, change: Expressions
    ) -> tuple[str | None, str | None]:
        """Returns where the old body is in parts, and where the new one."""
        for name in (*items.RESPONSE, "last_error"):
            _where_as_in(item, name, change)
        if new.last_error is not None:
            change.set("last_error", text(new.last_error))
        row = items.record(item, self._clock())
        until = items.time_to_live(row) or row.expires_at + row.retention_seconds
        parts = self._put_parts(ask, pk, "body", new.body, until)
        if new.headers is not None and new.schema_version is not None:
            change.set("response_headers", text(new.headers))
            change.set("response_version", number(new.schema_version))
            _set_either(change, ("body",), ("body_parts",), new.body, parts)
        return item.get("body_parts", {}).get("S"), parts

    def _replace_result(
        self, ask: Verb, pk: str, item: Item, old: KeptStep, new: KeptStep, change: Expressions
    ) -> tuple[str | None, str | None]:
        said = item["steps"]["M"][old.name]["M"]
        was = "parts" if "parts" in said else "result"
        change.where(("steps", old.name, was), "=", said[was])
        parts = self._put_parts(ask, pk, "result", new.result)
        path = ("steps", old.name)
        _set_either(change, (*path, "result"), (*path, "parts"), new.result, parts)
        return said.get("parts", {}).get("S"), parts

    def note_walk(self, event: str, after: str, audit: Audit) -> None:
        scope, key = OPERATORS_LINE
        now = self._clock()
        write = self._numbered(AuditLine(now, audit.who, event, scope, key, None, BEFORE, after, audit.why), now)
        self._client.verb()("update_item", Key=items.address(scope, key), **writes.note(scope, key, write))


def _line(stored: str, scope: str, key: str) -> KeptLine:
    line = items.audit_line(stored, scope, key)
    return KeptLine(scope, key, _order(stored), line.event, line.why)


def _order(stored: str) -> str:
    return str(orjson.loads(stored)[0])


def _values_of(kept: KeptKey, old: KeptKey) -> KeptKey:
    """``kept`` with the state, fingerprint and expiry of ``old``: those are not compared."""
    values = (kept.status, kept.headers, kept.body, kept.schema_version, kept.last_error)
    return KeptKey(kept.scope, kept.key, *values, old.state, old.fingerprint_version, old.expires_at)


def _where_as_in(item: Item, name: str, change: Expressions) -> None:
    if name in item:
        change.where(name, "=", item[name])
    else:
        change.where_there(name, there=False)


def _set_either(
    change: Expressions, inline: tuple[str, ...], outside: tuple[str, ...], value: bytes | None, parts: str | None
) -> None:
    """The value in the item, or the name of its parts."""
    if parts is not None:
        change.set(outside, text(parts))
        change.remove([inline])
        return
    if value is None:
        change.remove([inline])
    else:
        change.set(inline, data(value))
    change.remove([outside])


def _replace_line(item: Item, old: KeptLine, new: KeptLine, change: Expressions) -> None:
    lines = items.audit_of(item)
    nth = next(nth for nth, line in enumerate(lines) if _order(line) == old.number)
    change.where(("audit", nth), "=", text(lines[nth]))  # a purge of older lines would have moved it
    words = [*orjson.loads(lines[nth])[:6], new.why]
    change.set(("audit", nth), text(orjson.dumps(words).decode()))
