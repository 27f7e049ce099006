"""The SQL beside this file as statements: parts that several of them share are put in by name."""

from __future__ import annotations

from typing import LiteralString

from oncekey.stores import sqlfiles

PACKAGE = "oncekey.stores.postgres"

_PARTS = {"{held}": "held", "{set}": "set", "{forgotten}": "forgotten", "{noted}": "noted"}


def part(name: str) -> LiteralString:
    """The text of ``name.sql``: ours, and so as good as a literal."""
    return sqlfiles.statement(PACKAGE, name)


COLUMNS = part("columns")
SLIM = COLUMNS.replace(
    "k.response_status, k.response_headers, k.response_body, k.response_schema_version", "NULL, NULL, NULL, NULL"
)
"""The columns of a record without its response: upkeep never needs it, and who writes one knows it."""


def statement(name: str, columns: LiteralString = "", lock: LiteralString = "NO KEY UPDATE") -> LiteralString:
    """``name.sql`` with its parts; ``columns`` is what it returns, ``lock`` how strongly it holds rows."""
    text = part(name)
    for mark, shared in _PARTS.items():
        if mark in text:
            text = text.replace(mark, part(shared))
    return text.replace("{columns}", columns).replace("{lock}", lock)


RESERVE = statement("reserve", COLUMNS).replace("{on_conflict}", "").replace("{fresh}", part("fresh_now"))
"""All rows that are absent are inserted, or it fails."""
RESERVE_POLITELY = (
    statement("reserve", COLUMNS)
    .replace("{on_conflict}", "ON CONFLICT (scope, key) DO NOTHING RETURNING k.scope, k.key")
    .replace("{fresh}", part("fresh_each"))
)
"""After a lost race: what a rival has inserted meanwhile is left out of the answer."""
END = statement("end")
SWAP = statement("swap", SLIM)
