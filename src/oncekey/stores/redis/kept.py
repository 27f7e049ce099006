"""The values that encryption covers, in Redis: bucket after bucket, first rows with their steps, then the audit.

A page is one script in one bucket. New values go to all buckets of a batch in one round trip per server; each script
compares the old values with what is there. Part of ``RedisStore``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core.audit import Audit
from oncekey.errors import StoreError
from oncekey.stores.kept_api import BEFORE, OPERATORS_LINE, Kept, KeptKey, KeptLine, KeptPage, KeptStep, Rewrite
from oncekey.stores.redis import rows, scripts
from oncekey.stores.redis.buckets import BUCKETS, at_of, bucket_of, name_of
from oncekey.stores.sql.key_rows import STATES

if TYPE_CHECKING:
    from oncekey.stores.redis.calls import Calls
    from oncekey.stores.redis.scripts import Script

_START = ("rows", 0, "")
_LINES = 10_000
"""How many lines of one key are read to find one of them: far more than operators leave."""


class RedisKept:
    """A part of :class:`oncekey.stores.redis.store.RedisStore`, which runs the scripts."""

    if TYPE_CHECKING:

        def _each(
            self, script: Script, names: Sequence[bytes], values: Sequence[Sequence[bytes]] | None, *, confirmed: bool
        ) -> list[tuple[int, Any, float]]: ...

        calls: Calls
        _epoch: bytes | None

        def _deadline(self) -> float: ...
        def _marks(self, deadline: float) -> list[bytes | None]: ...
        def _refuse_other_layouts(self, marks: Sequence[bytes | None]) -> None: ...
        def _in_buckets(self, script: Script, values: dict[int, Sequence[bytes]]) -> list[Any]: ...

    # -- reading -------------------------------------------------------------------------------------------------

    def kept(self, after: str, limit: int) -> KeptPage:
        kind, bucket, *place = orjson.loads(after) if after else _START
        if kind == "rows":
            found, place = self._page_of_rows(bucket, place[0], limit)
        else:
            found, place = self._page_of_lines(bucket, place, limit)
        if place:
            return KeptPage(found, orjson.dumps([kind, bucket, *place]).decode())
        if bucket + 1 < len(BUCKETS):
            following = [kind, bucket + 1, *_first(kind)]
        else:
            following = ["audit", 0, *_first("audit")] if kind == "rows" else []
        return KeptPage(found, orjson.dumps(following).decode() if following else "")

    def _page_of_rows(self, bucket: int, after: str, limit: int) -> tuple[list[Kept], list[str]]:
        first = b"(" + after.encode() if after else b"-"
        ((reached, *answers),) = self._in_buckets(scripts.KEPT_ROWS, {bucket: (first, b"%d" % limit)})
        found: list[Kept] = []
        for name, fields, steps in answers:
            at = at_of(name)
            if fields is not None:
                found.append(_kept_key(*at, fields))
            found += [KeptStep(*at, step[0].decode(), step[4]) for step in steps if step[4] is not None]
        return found, [reached.decode()] if reached else []

    def _page_of_lines(self, bucket: int, after: Sequence[str], limit: int) -> tuple[list[Kept], list[str]]:
        asked = (*(part.encode() for part in after), b"%d" % limit)
        (lines,) = self._in_buckets(scripts.KEPT_LINES, {bucket: asked})
        found: list[Kept] = []
        for line, _ in lines:
            scope, key = at_of(line.partition(b"\n")[2])
            said = rows.audit_line(line, scope, key)
            found.append(KeptLine(scope, key, _number(line), said.event, said.why))
        return found, [lines[-1][1].decode(), _number(lines[-1][0])] if len(lines) == limit else []

    def left_after_loss(self, limit: int) -> list[Kept]:
        found: list[Kept] = []
        marks = self._marks(self._deadline())
        self._refuse_other_layouts(marks)
        epoch, together = self._epoch, self.calls.together
        try:
            self.calls.together = False  # each bucket has its own epoch now, or none
            for bucket, mark in zip(BUCKETS, marks, strict=True):
                if mark is not None:
                    self._epoch = mark
                    found += self._page_of_rows(bucket, "", limit)[0]
                    found += self._page_of_lines(bucket, _first("audit"), limit)[0]
        finally:
            self._epoch, self.calls.together = epoch, together
        return found

    # -- writing -------------------------------------------------------------------------------------------------

    def rewrite(self, batch: Sequence[Rewrite]) -> list[bool]:
        done: dict[int, bool] = {}
        for kind, script in _SCRIPTS.items():
            chosen = [position for position, work in enumerate(batch) if type(work.old) is kind]
            wanted = [(position, self._values(batch[position])) for position in chosen]
            there = [(position, values) for position, values in wanted if values is not None]
            names = [name_of(*_at(batch[position])) for position, _ in there]
            # A value that is lost with a failover is under its old key again, so the replicas must have this one.
            for nth, answer, _ in self._each(script, names, [values for _, values in there], confirmed=True):
                done[there[nth][0]] = answer == 1
        return [done.get(position, False) for position in range(len(batch))]

    def _values(self, work: Rewrite) -> tuple[bytes, ...] | None:
        match work.old, work.new:
            case KeptKey() as old, KeptKey() as new:
                return (*_stored(old), *_stored(new))
            case KeptStep() as old, KeptStep() as new:
                return (rows.text(old.name), old.result, new.result)
            case KeptLine() as old, KeptLine() as new:
                return self._line(old, new)
        raise StoreError("a value can be replaced by one of its own kind only")

    def _line(self, old: KeptLine, new: KeptLine) -> tuple[bytes, bytes] | None:
        """The whole line as it is and as it becomes; None: there is no such line any more."""
        name = name_of(old.scope, old.key)
        (lines,) = self._in_buckets(scripts.AUDIT, {bucket_of(name): (name, b"%d" % _LINES)})
        for line in lines:
            if _number(line) == old.number and rows.audit_line(line, old.scope, old.key).why == old.why:
                return line, rows.with_reason(line, new.why)
        return None

    def note_walk(self, event: str, after: str, audit: Audit) -> None:
        name = name_of(*OPERATORS_LINE)
        words = (audit.who, event, BEFORE, after, audit.why)
        self._in_buckets(scripts.NOTE, {bucket_of(name): (name, orjson.dumps(words))})


_SCRIPTS: dict[type[Kept], Script] = {
    KeptKey: scripts.REWRITE_ROWS,
    KeptStep: scripts.REWRITE_STEPS,
    KeptLine: scripts.REWRITE_LINES,
}


def _first(kind: str) -> tuple[str, ...]:
    return ("",) if kind == "rows" else ("0", "")


def _number(line: bytes) -> str:
    return line[:16].decode()


def _at(work: Rewrite) -> tuple[str, str]:
    _, scope, key, *_ = work.old.place
    return scope, key


def _kept_key(scope: str, key: str, answer: Any) -> KeptKey:
    text, body = answer
    try:
        _, _, version, _, _, state, *_, error, _, _, _, expires, head = rows.values(text)
        known = (error, STATES[state], version, expires / 1e6)
        if head is None:
            return KeptKey(scope, key, None, None, None, None, *known)
        status, headers, schema_version, has_body = head
    except (ValueError, TypeError, KeyError, IndexError) as damage:
        raise StoreError("the fields of a row are damaged") from damage
    named = orjson.dumps(headers).decode()
    return KeptKey(scope, key, status, named, body if has_body else None, schema_version, *known)


def _stored(kept: KeptKey) -> tuple[bytes, bytes, bytes]:
    """Head, body and error, as the scripts take them."""
    error = rows.NONE if kept.last_error is None else b"=" + rows.text(kept.last_error)
    if kept.headers is None:
        return rows.NONE, rows.NONE, error
    head = (kept.status, orjson.loads(kept.headers), kept.schema_version, kept.body is not None)
    return orjson.dumps(head), kept.body or rows.NONE, error
