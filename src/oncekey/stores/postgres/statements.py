"""Builds statements from the SQL files beside this one: parts that several of them share are inserted by name."""

from __future__ import annotations

from typing import LiteralString

from oncekey.stores.sql import queries

PACKAGE = "oncekey.stores.postgres"

_PARTS = {"{held}": "held", "{set}": "set", "{forgotten}": "forgotten", "{noted}": "noted"}


def part(name: str) -> LiteralString:
    """The text of ``name.sql``. It is part of this package, so it is as safe as a literal."""
    return queries.statement(PACKAGE, name)


COLUMNS = part("columns")
SLIM = COLUMNS.replace(
    "k.response_status, k.response_headers, k.response_body, k.response_schema_version", "NULL, NULL, NULL, NULL"
)
"""The columns of a record without its response: upkeep does not need it, and the writer of a response has it."""


def statement(name: str, columns: LiteralString = "", lock: LiteralString = "NO KEY UPDATE") -> LiteralString:
    """``name.sql`` with its parts; ``columns`` is what it returns, ``lock`` the strength of its row locks."""
    text = part(name)
    for mark, shared in _PARTS.items():
        if mark in text:
            text = text.replace(mark, part(shared))
    return text.replace("{columns}", columns).replace("{lock}", lock)


RESERVE = statement("reserve", COLUMNS).replace("{on_conflict}", "").replace("{fresh}", part("fresh_now"))
"""Inserts all rows that are absent, or fails."""
RESERVE_POLITELY = (
    statement("reserve", COLUMNS)
    .replace("{on_conflict}", "ON CONFLICT (scope, key) DO NOTHING RETURNING k.scope, k.key")
    .replace("{fresh}", part("fresh_each"))
)
"""For use after a lost race. The answer leaves out rows that a rival inserted during the statement."""
END = statement("end")
SWAP = statement("swap", SLIM)
