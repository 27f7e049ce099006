"""The last statement of an enlisted transaction and its COMMIT, as one message to PostgreSQL: one round trip, not two.

PostgreSQL takes several statements in one message only as text, without parameters. To plan the last statement again
for every request would cost more than the round trip. So it is prepared once for each session (``PREPARE``), and the
message is ``EXECUTE oncekey_…(…); COMMIT``. The statement raises an error where it finds no row, and then PostgreSQL
does not run the COMMIT.

The first statement of the transaction asks whether this session has the prepared statement: after ``DISCARD ALL``, or
behind a pooler that gives each transaction another session, it may not. Then it is prepared in the transaction. If the
app keeps its driver from preparing statements, the end is two messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

from oncekey.core.values import value
from oncekey.engine.transactions.adapters.base import numbered

NO_ROW = "22012"
"""The SQLSTATE of the error by which the last statement says that it found no row: a division by zero."""
MAX_BODY_BYTES = 32 * 1024
"""A body is twice as long in the message. From this size on, a round trip costs less than that."""


@value
class SessionStatement:
    """A statement that is prepared once for each connection."""

    name: str
    """It contains a hash of the text, so that two versions of oncekey never share a name."""
    prepare: str
    names: tuple[str, ...]
    """The names of its parameters, in their order."""

    def message(self, parameters: Mapping[str, Any]) -> str:
        values = ", ".join([literal(parameters[name]) for name in self.names])
        return f"EXECUTE {self.name}({values}); COMMIT"


@lru_cache(maxsize=16)
def session_statement(sql: str) -> SessionStatement:
    text, names = numbered(sql)
    name = f"oncekey_{sha256(sql.encode()).hexdigest()[:16]}"
    return SessionStatement(name, f"PREPARE {name} AS {text}", names)


def fits(parameters: Mapping[str, Any]) -> bool:
    """Whether these values are small enough for a message of text."""
    body = parameters["body"]
    return body is None or len(body) <= MAX_BODY_BYTES


def literal(given: str | bytes | float | bool | None) -> str:
    """A value as an SQL literal, for a connection whose encoding is UTF-8.

    With ``E'…'`` a backslash has the same meaning whatever ``standard_conforming_strings`` says.
    """
    match given:
        case None:
            return "NULL"
        case bool():
            return "true" if given else "false"
        case int() | float():
            return repr(given)
        case bytes():
            return f"E'\\\\x{given.hex()}'"
    if "\0" in given:
        raise ValueError("PostgreSQL cannot store a NUL character in text")
    return "E'" + given.replace("\\", "\\\\").replace("'", "''") + "'"
