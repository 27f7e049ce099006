"""The values that encryption covers, in MySQL: a page is one statement, and a batch of new values is one packet."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from oncekey.core.audit import Audit
from oncekey.stores.kept_api import BEFORE, OPERATORS_LINE
from oncekey.stores.mysql.packets import statement, table
from oncekey.stores.sql.kept import PLACES, KeptTables, Row

_KEPT = {name: statement(f"kept_{name}") for name in PLACES}
_REWRITE = {name: statement(f"rewrite_{name}") for name in PLACES}
_NOTE = statement("note_walk")
_COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "keys": (
        ("scope", "key"),
        ("old_status", "old_headers", "old_body", "old_version", "old_error"),
        ("headers", "body", "version", "error"),
    ),
    "steps": (("scope", "key", "name"), ("old_result",), ("result",)),
    "audit": (("id",), ("old_why",), ("why",)),
    "jobs": (("id",), ("old_payload", "old_error", "old_history"), ("payload", "error", "history")),
}
"""What names a row, its old values, and the new ones: the order of a change."""


class MysqlKept(KeptTables):
    """A part of :class:`oncekey.stores.mysql.store.MysqlStore`, which has the connection."""

    if TYPE_CHECKING:

        def _start_clock(self) -> None: ...
        def _send(self, text: str, **values: Any) -> list[Any]: ...

    def _kept_rows(self, table: str, after: Row, limit: int) -> Sequence[Row]:
        self._start_clock()
        asked = {f"after_{letter}": part for letter, part in zip("abc", after, strict=False)}
        rows: Sequence[Row] = self._send(_KEPT[table], limit=limit, **asked)[-1]
        return rows

    def _rewrite_rows(self, name: str, changes: Sequence[Row]) -> Sequence[bool]:
        self._start_clock()
        places, olds, news = _COLUMNS[name]
        columns = dict(zip((*places, *olds, *news), map(list, zip(*changes, strict=True)), strict=True))
        for old in olds:
            columns[old] = [_digest(each) for each in columns[old]]
        answer = self._send(
            _REWRITE[name],
            size=len(changes),
            compared=table({column: columns[column] for column in (*places, *olds)}),
            wanted=table(columns),
        )
        ((numbers, _),) = next(each for each in answer if isinstance(each, Sequence))
        held = {int(number) for number in numbers.split(",") if number}
        return [number in held for number in range(1, len(changes) + 1)]

    def note_walk(self, event: str, after: str, audit: Audit) -> None:
        self._start_clock()
        scope, key = OPERATORS_LINE
        words = {"who": audit.who, "event": event, "before": BEFORE, "after": after, "why": audit.why}
        self._send(_NOTE, scope=scope, key=key, **words)


def _digest(value: Any) -> Any:
    """Text and bytes as their SHA-256; numbers and None as they are."""
    if isinstance(value, str):
        value = value.encode()
    return sha256(value).hexdigest() if isinstance(value, bytes) else value
