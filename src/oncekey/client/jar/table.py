"""The table of intents: its columns, its statements, and a row of it.

Statements have ``?`` for each value, and are written as SQLite and PostgreSQL understand them. ``Dialect`` says what
another database wants, and ``placeholders`` what a driver wants.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from itertools import count
from typing import Any, Final, Protocol

from oncekey.client.calls import Request
from oncekey.client.reading import Answer
from oncekey.client.spelling import KeyForm, Spelling
from oncekey.core.values import Word, value
from oncekey.errors import JarError

_log = logging.getLogger("oncekey.client")

TABLE: Final = "oncekey_intents"
DAY: Final = 86_400.0

_COLUMNS: Final = (
    *("account", "name", "idempotency_key", "fingerprint", "method", "url", "headers", "body"),
    *("created_at", "first_sent_at", "last_sent_at", "expires_at", "not_before", "note", "finished_at", "status"),
    *("answer_headers", "answer_body", "key_lifetime", "key_header", "spelling"),
)

_BYTES: Final = frozenset({"fingerprint", "body", "answer_body"})

CREATE: Final = f"""
CREATE TABLE IF NOT EXISTS {TABLE} (
    account {{name}} NOT NULL,
    name {{name}} NOT NULL,
    idempotency_key {{name}} NOT NULL,
    fingerprint {{bytes}} NOT NULL,
    method {{name}} NOT NULL,
    url {{text}} NOT NULL,
    headers {{text}} NOT NULL,
    body {{bytes}} NOT NULL,
    created_at {{seconds}} NOT NULL,
    first_sent_at {{seconds}},
    last_sent_at {{seconds}},
    expires_at {{seconds}},
    not_before {{seconds}},
    note {{text}} NOT NULL,
    finished_at {{seconds}},
    status INTEGER,
    answer_headers {{text}},
    answer_body {{bytes}},
    key_lifetime {{seconds}} NOT NULL,
    key_header {{name}},
    spelling {{name}},
    PRIMARY KEY (account, name)
)"""
CREATE_INDEX: Final = (
    f"CREATE INDEX IF NOT EXISTS {TABLE}_open ON {TABLE} (account, created_at) WHERE finished_at IS NULL"
)

# S608: every value is a parameter; the texts are made of the constants above.
_UNLESS_THERE: Final = "ON CONFLICT (account, name) DO NOTHING"
_NAMED: Final = "account = ? AND name = ?"
INSERT: Final = (
    f"INSERT INTO {TABLE} ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "  # noqa: S608
    f"{_UNLESS_THERE}"
)
READ: Final = f"SELECT {', '.join(_COLUMNS)} FROM {TABLE} WHERE {_NAMED}"  # noqa: S608
READ_INSERTED: Final = f"{READ} FOR UPDATE"
"""After INSERT: the row as it is now, also if another transaction has inserted it since this one began."""
SENT: Final = (
    f"UPDATE {TABLE} SET first_sent_at = COALESCE(first_sent_at, ?), last_sent_at = ?, "  # noqa: S608
    f"key_header = COALESCE(key_header, ?), spelling = COALESCE(spelling, ?) WHERE {_NAMED}"
)
RESTARTED: Final = f"UPDATE {TABLE} SET first_sent_at = ?, last_sent_at = ?, expires_at = NULL WHERE {_NAMED}"  # noqa: S608
LEFT_OPEN: Final = (
    f"UPDATE {TABLE} SET note = ?, expires_at = COALESCE(?, expires_at), not_before = ? "  # noqa: S608
    f"WHERE {_NAMED} AND idempotency_key = ? AND finished_at IS NULL"
)
RESPELLED: Final = f"UPDATE {TABLE} SET spelling = ? WHERE {_NAMED} AND idempotency_key = ? AND finished_at IS NULL"  # noqa: S608
ANSWERED: Final = (
    f"UPDATE {TABLE} SET finished_at = ?, status = ?, answer_headers = ?, answer_body = ?, note = '', "  # noqa: S608
    f"not_before = NULL WHERE {_NAMED} AND idempotency_key = ? AND finished_at IS NULL"
)
OPEN: Final = (
    f"SELECT {', '.join(_COLUMNS)} FROM {TABLE} WHERE account = ? AND finished_at IS NULL "  # noqa: S608
    "ORDER BY created_at, name LIMIT ?"
)
FINISHED: Final = f"SELECT name, status FROM {TABLE} WHERE account = ? AND finished_at IS NOT NULL"  # noqa: S608
FORGET: Final = f"DELETE FROM {TABLE} WHERE {_NAMED}"  # noqa: S608
_FINISHED_BEFORE: Final = f"FROM {TABLE} WHERE account = ? AND finished_at IS NOT NULL AND finished_at < ?"
COUNT_FINISHED: Final = f"SELECT COUNT(*) {_FINISHED_BEFORE}"
FORGET_FINISHED: Final = f"DELETE {_FINISHED_BEFORE}"

NO_ROWS: Final = f"SELECT * FROM {TABLE} WHERE 1 = 0"  # noqa: S608
"""Its cursor has the columns of the table in ``description``."""

Execute = Callable[[str, Sequence[Any]], Any]
"""Runs one statement of this module in a transaction; a cursor with ``fetchone`` and ``fetchall``."""


class Dialect(Word):
    """Of which database a statement is to be understood."""

    SQLITE = "sqlite"
    POSTGRES = "postgresql"
    MYSQL = "mysql"

    def statement(self, text: str) -> str:
        if self is Dialect.SQLITE:
            return text.removesuffix(" FOR UPDATE")  # a transaction that writes has the whole file
        return text.replace(_UNLESS_THERE, "ON DUPLICATE KEY UPDATE account = account") if self.is_mysql else text

    def values(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """MySQL: texts are kept as bytes, so that nothing depends on the character set of a connection or a table."""
        return tuple([each.encode() if isinstance(each, str) and self.is_mysql else each for each in values])

    @property
    def is_mysql(self) -> bool:
        return self is Dialect.MYSQL


def check_columns(execute: Execute) -> None:
    """JarError if the table is not that of a jar, or of a jar that an earlier version made."""
    lacking = set(_COLUMNS) - {str(column[0]) for column in execute(NO_ROWS, ()).description}
    if lacking:
        raise JarError(
            f"the table {TABLE} is not that of a key jar of this version: it has no {', '.join(sorted(lacking))}. "
            "Nothing is sent. If an earlier version of oncekey made it, resume its open intents with that version, and "
            "then make a new jar. If it belongs to another program, correct the URL of the jar"
        )


class Database(Protocol):
    """Where a jar keeps its table. Every error is a JarError."""

    def run(self, work: Callable[[Execute], Any], *, writes: bool) -> Any:
        """Run ``work`` in a transaction. When this returns, what it wrote is on disk."""

    def close(self) -> None: ...


def made_new(where: str, create: bool | None, more: str = "") -> None:
    """Call it after a jar was made. ``more``: what else the reader must know."""
    if create is None:
        _log.warning(
            "made a new key jar, %s. If this program has sent requests before, their keys are not known here, and it "
            "would send them again under new keys: then stop it, and put the old jar back (docs/client.md, If the jar "
            "is lost). KeyJar(url, create=True) makes a jar without this warning, and with create=False a jar that is "
            "gone is an error%s",
            where,
            more,
        )


def missing(where: str) -> JarError:
    """For a jar that must be there."""
    return JarError(
        f"there is no key jar at {where}, and nothing is sent without it: correct the URL, or put the jar back "
        "(docs/client.md, If the jar is lost). A new one, made with KeyJar(url, create=True), does not know what was "
        "sent before"
    )


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
    key_lifetime: float = DAY
    """How long the server is assumed to keep the key, in seconds from the first try. It counts while ``expires_at`` is
    None."""
    key_header: str | None = None
    """Under which header the key was sent. None: nothing was sent yet, and the client that sends it first decides."""
    spelling: Spelling | None = None
    """As ``key_header``."""

    def form(self, own: KeyForm) -> KeyForm:
        """How to send the key. ``own`` is the form of the client that sends now."""
        return KeyForm(self.key_header or own.header, self.spelling or own.spelling)

    def values(self) -> list[Any]:
        """For INSERT."""
        request = self.request
        return [
            *(self.account, self.name, self.key, self.fingerprint, request.method, request.url),
            *(json.dumps(request.headers), request.body, self.created_at, self.first_sent_at, self.last_sent_at),
            *(self.expires_at, self.not_before, self.note, None, None, None, None, self.key_lifetime),
            *(self.key_header, self.spelling),
        ]


def row(found: Sequence[Any]) -> Row:
    of = {name: _text(name, each) for name, each in zip(_COLUMNS, found, strict=True)}
    headers = _pairs(of["headers"])
    answer = None
    if of["answer_headers"] is not None and of["answer_body"] is not None:
        answer = Answer(of["status"], _pairs(of["answer_headers"]), bytes(of["answer_body"]))
    return Row(
        *(of["account"], of["name"], of["idempotency_key"], bytes(of["fingerprint"])),
        Request(of["method"], of["url"], headers, bytes(of["body"])),
        *(of["created_at"], of["first_sent_at"], of["last_sent_at"], of["expires_at"], of["not_before"], of["note"]),
        *(of["finished_at"], of["status"], answer, of["key_lifetime"]),
        key_header=of["key_header"],
        spelling=of["spelling"],
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


def _text(name: str, found: Any) -> Any:
    return found if name in _BYTES or not isinstance(found, bytes | bytearray | memoryview) else bytes(found).decode()


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple([(name, value) for name, value in json.loads(text)])
