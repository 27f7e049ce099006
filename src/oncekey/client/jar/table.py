"""The table of intents: its columns, its statements, and a row of it.

Statements have ``?`` for each value; ``placeholders`` writes them as a driver wants them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from itertools import count
from typing import Any, Final, Protocol

from oncekey.client.calls import Request
from oncekey.client.reading import Answer
from oncekey.core.values import value

TABLE: Final = "oncekey_intents"

_COLUMNS: Final = (
    "account", "name", "key", "fingerprint", "method", "url", "headers", "body", "created_at", "first_sent_at",
    "last_sent_at", "expires_at", "not_before", "note", "finished_at", "status", "answer_headers", "answer_body",
)  # fmt: skip

CREATE: Final = f"""
CREATE TABLE IF NOT EXISTS {TABLE} (
    account TEXT NOT NULL,
    name TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint {{bytes}} NOT NULL,
    method TEXT NOT NULL,
    url TEXT NOT NULL,
    headers TEXT NOT NULL,
    body {{bytes}} NOT NULL,
    created_at {{seconds}} NOT NULL,
    first_sent_at {{seconds}},
    last_sent_at {{seconds}},
    expires_at {{seconds}},
    not_before {{seconds}},
    note TEXT NOT NULL,
    finished_at {{seconds}},
    status INTEGER,
    answer_headers TEXT,
    answer_body {{bytes}},
    PRIMARY KEY (account, name)
)"""
CREATE_INDEX: Final = (
    f"CREATE INDEX IF NOT EXISTS {TABLE}_open ON {TABLE} (account, created_at) WHERE finished_at IS NULL"
)

# S608: every value is a parameter; the texts are made of the constants above.
_NAMED: Final = "account = ? AND name = ?"
INSERT: Final = (
    f"INSERT INTO {TABLE} ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "  # noqa: S608
    "ON CONFLICT (account, name) DO NOTHING"
)
READ: Final = f"SELECT {', '.join(_COLUMNS)} FROM {TABLE} WHERE {_NAMED}"  # noqa: S608
SENT: Final = f"UPDATE {TABLE} SET first_sent_at = COALESCE(first_sent_at, ?), last_sent_at = ? WHERE {_NAMED}"  # noqa: S608
RESTARTED: Final = f"UPDATE {TABLE} SET first_sent_at = ?, last_sent_at = ?, expires_at = NULL WHERE {_NAMED}"  # noqa: S608
LEFT_OPEN: Final = (
    f"UPDATE {TABLE} SET note = ?, expires_at = COALESCE(?, expires_at), not_before = ? "  # noqa: S608
    f"WHERE {_NAMED} AND key = ? AND finished_at IS NULL"
)
ANSWERED: Final = (
    f"UPDATE {TABLE} SET finished_at = ?, status = ?, answer_headers = ?, answer_body = ?, note = '', "  # noqa: S608
    f"not_before = NULL WHERE {_NAMED} AND key = ? AND finished_at IS NULL"
)
OPEN: Final = (
    f"SELECT {', '.join(_COLUMNS)} FROM {TABLE} WHERE account = ? AND finished_at IS NULL "  # noqa: S608
    "ORDER BY created_at, name LIMIT ?"
)
FINISHED: Final = f"SELECT name, status FROM {TABLE} WHERE account = ? AND finished_at IS NOT NULL"  # noqa: S608
FORGET: Final = f"DELETE FROM {TABLE} WHERE {_NAMED}"  # noqa: S608
FORGET_FINISHED: Final = f"DELETE FROM {TABLE} WHERE account = ? AND finished_at IS NOT NULL AND finished_at < ?"  # noqa: S608

Execute = Callable[[str, Sequence[Any]], Any]
"""Runs one statement of this module in a transaction; a cursor with ``fetchone`` and ``fetchall``."""


class Database(Protocol):
    """Where a jar keeps its table: SQLite or PostgreSQL. Every error is a JarError."""

    def run(self, work: Callable[[Execute], Any], *, writes: bool) -> Any:
        """Run ``work`` in a transaction. When this returns, what it wrote is on disk."""

    def close(self) -> None: ...


@value
class Row:
    """One intent, as it is on disk."""

    account: str
    name: str
    key: str = field(repr=False)  # keys and bodies are not for logs
    fingerprint: bytes
    request: Request = field(repr=False)
    created_at: float
    first_sent_at: float | None = None
    """When the first byte may have been sent. None: nothing was sent yet."""
    last_sent_at: float | None = None
    expires_at: float | None = None
    """What the server last said in Idempotency-Expires."""
    not_before: float | None = None
    note: str = ""
    finished_at: float | None = None
    status: int | None = None
    answer: Answer | None = field(default=None, repr=False)
    """None after the end: the body was too large to keep."""

    def values(self) -> list[Any]:
        """For INSERT."""
        request = self.request
        return [
            *(self.account, self.name, self.key, self.fingerprint, request.method, request.url),
            *(json.dumps(request.headers), request.body, self.created_at, self.first_sent_at, self.last_sent_at),
            *(self.expires_at, self.not_before, self.note, None, None, None, None),
        ]


def row(found: Sequence[Any]) -> Row:
    of = dict(zip(_COLUMNS, found, strict=True))
    headers = _pairs(of["headers"])
    answer = None
    if of["answer_headers"] is not None and of["answer_body"] is not None:
        answer = Answer(of["status"], _pairs(of["answer_headers"]), bytes(of["answer_body"]))
    return Row(
        *(of["account"], of["name"], of["key"], bytes(of["fingerprint"])),
        Request(of["method"], of["url"], headers, bytes(of["body"])),
        *(of["created_at"], of["first_sent_at"], of["last_sent_at"], of["expires_at"], of["not_before"], of["note"]),
        *(of["finished_at"], of["status"], answer),
    )


def chosen(headers: Iterable[tuple[str, str]], names: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """The headers with these names, in lower case."""
    return tuple([(name.lower(), text) for name, text in headers if name.lower() in names])


def placeholders(statement: str, style: str) -> str:
    """The statement with the placeholders of a DB-API paramstyle."""
    if style == "qmark":
        return statement
    if style == "numeric_dollar":
        numbers = count(1)
        return "".join(f"${next(numbers)}" if letter == "?" else letter for letter in statement)
    return statement.replace("?", "%s")


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple([(name, value) for name, value in json.loads(text)])
