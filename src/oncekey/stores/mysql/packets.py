"""Builds the text that is sent to the server: named queries with their values written into them. Pure.

MySQL has no arrays. A batch is a derived table instead: ``SELECT 1 AS n, … UNION ALL SELECT 2, …``, which every
statement of a packet joins to the rows that it is about. All text is sent as the bytes of its UTF-8 form, so that no
character set of a connection or a database changes what is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from oncekey.errors import StoreError
from oncekey.stores.sql import queries

PACKAGE = "oncekey.stores.mysql"

_MARK = re.compile(r"(?<![:\w]):([a-z_]+)|\{([a-z_]+)\}")
_PART = re.compile(r"\{([a-z_]+)\}")
# A backslash escapes: connection.py sets an sql_mode without NO_BACKSLASH_ESCAPES.
_ESCAPED = {ord("\\"): "\\\\", ord("'"): "\\'", 0: "\\0", ord("\n"): "\\n", ord("\r"): "\\r", 26: "\\Z"}


_SPECIAL = re.compile(r"[\\'\x00\n\r\x1a]").search


class Text(str):
    """A piece of SQL, which is written as it is."""

    __slots__ = ()


NOW = Text("utc_timestamp(6)")
"""The time of a statement. In a transaction of several, ``now`` of keys.sql is the time of all."""


@cache
def statement(name: str, columns: str = "") -> str:
    """The query of this name, with the parts that it shares with others. ``columns``: see ``columns`` in keys.sql."""
    text = _code(name)
    for _ in range(3):  # parts have parts
        text = _PART.sub(lambda mark: _shared(mark[1]) or mark[0], text)
    return text.replace("{columns}", columns)


_SHARED = frozenset(
    {
        *("at_keys", "is_held", "is_moved", "retention", "hold", "now", "begin", "whole", "end_rows", "reserve_rows"),
        "returns_time",
        *("at_jobs", "jobs_of_keys", "was_tried", "at_steps", "is_old_key", "is_old_job", "rewritten"),
    }
)


def _shared(name: str) -> str | None:
    return part(name) if name in _SHARED else None


def part(name: str) -> str:
    """The text of a query that is a part of others."""
    return _code(name).strip()


def _code(name: str) -> str:
    lines = queries.statement(PACKAGE, name).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("--"))


def columns(now: str) -> str:
    """All columns of a Record; ``now`` is the time that the record carries."""
    return part("columns").replace("{now}", now)


def slim(now: str) -> str:
    """The columns of a record without its response: upkeep does not need it, and the writer of a response has it."""
    response = "k.response_status, k.response_headers, k.response_body, k.response_schema_version"
    return columns(now).replace(response, "NULL, NULL, NULL, NULL")


def filled(text: str, values: Mapping[str, Any]) -> str:
    """The text with a value for each ``:name`` and a piece of SQL for each ``{name}``."""
    return _MARK.sub(lambda mark: literal(values[mark[1] or mark[2]]), text)


def literal(value: Any) -> str:
    """A value as SQL."""
    write = _WRITERS.get(type(value)) or next(
        (each for kind, each in _WRITERS.items() if isinstance(value, kind)), None
    )
    if write is None:
        raise StoreError(f"a {type(value).__name__} cannot be stored")
    return write(value)


def _bytes(value: bytes) -> str:
    return _quoted(value.decode("ascii", "surrogateescape"))


def _text(value: str) -> str:
    """Text that is not valid Unicode is refused: PyMySQL would send bytes that were never meant."""
    if value.isascii():
        return _quoted(value)
    try:
        return _bytes(value.encode())
    except UnicodeEncodeError as error:
        raise StoreError("a text is not valid Unicode, and cannot be stored") from error


def _quoted(text: str) -> str:
    return f"_binary'{text.translate(_ESCAPED) if _SPECIAL(text) else text}'"


def _float(value: float) -> str:
    if not abs(value) < 1e15:
        raise StoreError(f"{value} is no number that can be stored")
    return f"{value!r}e0"


_WRITERS: dict[type, Callable[[Any], str]] = {
    Text: str.__str__,
    str: _text,
    bytes: _bytes,
    type(None): lambda _: "NULL",
    bool: lambda value: "1" if value else "0",
    int: int.__repr__,
    float: _float,
}
"""By type: subclasses stand before their base."""


def table(columns: Mapping[str, Sequence[Any]], numbers: Sequence[int] | None = None) -> Text:
    """A batch as a derived table, with the number of each row as ``n``. ``columns``: by name, the value of each row."""
    names = [f"`{name}`" for name in columns]
    rows = list(zip(*columns.values(), strict=True))
    first, *others = zip(numbers or range(1, len(rows) + 1), rows, strict=True)
    head = ", ".join(f"{literal(value)} AS {name}" for value, name in zip(first[1], names, strict=True))
    parts = [f"SELECT {first[0]} AS n, {head}"]
    parts += [f"SELECT {number}, {', '.join(map(literal, row))}" for number, row in others]
    return Text(" UNION ALL ".join(parts))


def micros(seconds: float | None) -> int | None:
    """A span as whole microseconds: MySQL's INTERVAL takes no double."""
    return None if seconds is None else round(seconds * 1e6)
