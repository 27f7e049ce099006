"""The key jar: intents on disk, so that a process that was killed asks again with the same key.

An **intent** is one operation that the app wants done once, under a name of the app's own ("order-42"). Before the
first byte is sent, its key, its request and the request's fingerprint are on disk. The answer is put there too. So
after a crash the same code runs again: it finds the answer, or asks with the same key.

On disk are: name, key, method, URL, body, and the headers named in ``KEPT`` and ``keep_headers``. Never on disk are
Authorization, Cookie and other headers; ``resume`` takes them from the client that sends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from oncekey.client.attempts import CURRENT
from oncekey.client.calls import TIMESTAMP, Request
from oncekey.client.jar import table
from oncekey.client.jar.intent import Intent
from oncekey.client.jar.session import in_transaction
from oncekey.client.jar.table import DAY, Database, Execute, Row
from oncekey.client.spelling import Spelling, checked_header, checked_key, checked_spelling, new_key
from oncekey.errors import ConfigurationError

KEPT: Final = frozenset(
    {"accept", "accept-language", "content-encoding", "content-type", "if-match", "if-none-match", "prefer", TIMESTAMP}
)
"""Headers of a request that are put on disk."""
KEPT_OF_ANSWER: Final = frozenset(
    {
        *("content-encoding", "content-language", "content-location", "content-type", "date", "etag", "last-modified"),
        *("link", "location", "idempotency-expires", "idempotency-replayed", "idempotent-replayed"),
    }
)
SECRET: Final = frozenset({"authorization", "cookie", "proxy-authorization", "set-cookie"})

DATABASES: Final = {
    "sqlite": "oncekey.client.jar.sqlite",
    "postgresql": "oncekey.client.jar.postgres",
    "postgres": "oncekey.client.jar.postgres",
    "mysql": "oncekey.client.jar.mysql",
    "mariadb": "oncekey.client.jar.mysql",
}
"""Scheme of a URL -> the module that opens it."""
KNOWN: Final = "sqlite:///intents.db, postgresql://user@host/database, mysql://user@host/database"
"""The URLs that messages and help texts list."""

_MOST: Final = 1_000_000


def file_url(path: Path) -> str:
    """The URL of a jar in this file."""
    return f"sqlite:///{quote(str(path.absolute()))}"


class KeyJar:
    """``url`` names an SQLite file, or the app's own database.

    ``account`` separates intents that are sent with different credentials: a jar opened with one account neither sees
    nor sends the intents of another. ``longest_answer``: a longer body of an answer is not kept.

    ``create``: what to do if there is no jar at ``url``. None: make one, and log a warning, because a jar that was lost
    looks the same, and what was sent before would be sent again under new keys. True: make one, for the step that sets
    a machine up. False: JarError, for a program whose jar must be there.

    ``key_lifetime``: how long the server keeps a key, counted from the first try, if it never says so with
    Idempotency-Expires. Past that time an intent is not sent any more, since the server would run it as new. It is
    kept with each intent, so that a process that does not set it goes by it too; the default is 24 hours.
    """

    def __init__(
        self,
        url: str,
        *,
        account: str = "",
        keep_headers: Iterable[str] = (),
        create: bool | None = None,
        timeout: float = 5.0,
        longest_answer: int = 1_048_576,
        key_lifetime: timedelta | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if isinstance(keep_headers, str):
            raise ConfigurationError(f"keep_headers={keep_headers!r}: it takes several names, such as ['X-Trace']")
        kept = frozenset(name.lower() for name in keep_headers)
        if kept & SECRET:
            raise ConfigurationError(
                f"keep_headers: {', '.join(sorted(kept & SECRET))} would be a secret on disk; give it to the client "
                "that sends, and resume takes it from there"
            )
        self._key_lifetime = None if key_lifetime is None else _seconds("key_lifetime", key_lifetime)
        self.account = account
        self.kept_headers = KEPT | kept
        self.longest_answer = longest_answer
        self.clock = clock
        self._database = _open(url, timeout, create)
        try:  # an unusable jar fails here, not at the first payment
            self.run(table.check_columns, writes=False)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def intent(self, name: str, *, key: str | None = None, again: bool = False) -> Iterator[Intent]:
        """Every request in this block that changes state is sent under this intent, by whatever library.

        The library must send through oncekey (a transport, an adapter or a session of ``oncekey.client``), and in the
        thread or task of this block. ``key``: for an operation whose key exists already. ``again``: send although the
        server may have forgotten the key, and may run it as new.
        """
        with entered(self.find(name, key=key, again=again)) as intent:
            yield intent

    def find(self, name: str, *, key: str | None = None, again: bool = False) -> Intent:
        found = self.read(_checked_name(name))
        if found is not None and key is not None and key != found.key:
            raise ConfigurationError(f"intent '{name}' has another key already: leave key= out")
        chosen = found.key if found else checked_key(key) if key is not None else new_key()
        return Intent(self, name, chosen, found, again=again)

    def prepare(
        self,
        name: str,
        method: str,
        url: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        headers: Iterable[tuple[str, str]] = (),
        key_header: str | None = None,
        spelling: Spelling | None = None,
        on: Any = None,
    ) -> str:
        """Put an intent on disk without sending it, and return its key. ``resume`` sends it.

        With ``on``, a connection or session to the same database, it is written in the app's own transaction: it exists
        if and only if the app's other writes do. Send it after the commit. An intent that is there already stays as it
        is, if this is the same request.

        ``key_header`` and ``spelling``: how the server wants the key, as ``header`` and ``spelling`` of ``Client``.
        Without them the client that sends it first decides.
        """
        request = _request(method, url, json, content, headers)
        _checked_name(name)
        header = None if key_header is None else checked_header(key_header)
        spelled = None if spelling is None else checked_spelling(spelling)
        wanted = self.row_of(name, new_key(), request, header, spelled)

        def write(execute: Execute) -> Row:
            execute(table.INSERT, wanted.values())
            return table.row(execute(table.READ_INSERTED, (self.account, name)).fetchone())

        found: Row = self.run(write, writes=True) if on is None else in_transaction(on, write)
        Intent(self, name, found.key, found).check_same(found, request)
        return found.key

    def row_of(self, name: str, key: str, request: Request, key_header: str | None, spelling: Spelling | None) -> Row:
        kept = Request(request.method, request.url, table.chosen(request.headers, self.kept_headers), request.body)
        return Row(
            *(self.account, name, key, request.fingerprint(), kept, self.clock()),
            key_lifetime=self._key_lifetime or DAY,
            key_header=key_header,
            spelling=spelling,
        )

    def kept_until(self, row: Row) -> float | None:
        """When the server may have forgotten the key: what it said last, otherwise an assumption by ``key_lifetime``.

        None: nothing was sent yet, so there is nothing to forget.
        """
        if row.first_sent_at is None:
            return None
        if row.expires_at is not None:
            return row.expires_at
        return row.first_sent_at + (self._key_lifetime or row.key_lifetime)

    def read(self, name: str) -> Row | None:
        found = self.run(lambda execute: execute(table.READ, (self.account, name)).fetchone(), writes=False)
        return None if found is None else table.row(found)

    def open_intents(self, limit: int = _MOST) -> list[Row]:
        """What was prepared or sent and has no answer yet, the oldest first."""
        found: Sequence[Any] = self.run(
            lambda execute: execute(table.OPEN, (self.account, limit)).fetchall(), writes=False
        )
        return [table.row(each) for each in found]

    def finished(self) -> dict[str, int]:
        """The names of answered intents, with their status."""
        found = self.run(lambda execute: execute(table.FINISHED, (self.account,)).fetchall(), writes=False)
        return {name if isinstance(name, str) else bytes(name).decode(): status for name, status in found}

    def forget(self, name: str) -> bool:
        """Delete an intent: the next request under this name gets a new key. False: there was none."""
        gone = self.run(lambda execute: execute(table.FORGET, (self.account, name)).rowcount, writes=True)
        return bool(gone)

    def count_finished(self, *, older_than: float = 30 * DAY) -> int:
        """How many intents ``forget_finished`` would delete."""
        values = (self.account, self.clock() - older_than)
        (count,) = self.run(lambda execute: execute(table.COUNT_FINISHED, values).fetchone(), writes=False)
        return int(count)

    def forget_finished(self, *, older_than: float = 30 * DAY) -> int:
        """Delete answered intents that ended longer ago than this many seconds, and return how many.

        The next request under one of their names gets a new key.
        """
        before = self.clock() - older_than
        gone = self.run(lambda execute: execute(table.FORGET_FINISHED, (self.account, before)).rowcount, writes=True)
        return int(gone)

    def run(self, work: Callable[[Execute], Any], *, writes: bool) -> Any:
        return self._database.run(work, writes=writes)

    def close(self) -> None:
        self._database.close()


@contextmanager
def entered(intent: Intent) -> Iterator[Intent]:
    if CURRENT.get() is not None:
        raise ConfigurationError("an intent inside an intent: end the outer one first, each stands for one request")
    token = CURRENT.set(intent)
    try:
        yield intent
        intent.check_used()
    finally:
        intent.ended = True
        CURRENT.reset(token)


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name.strip():  # 42 is not "42": another process may look for the text
        raise ConfigurationError("an intent needs a name of your own that you find again, such as 'order-42'")
    return name


def _seconds(name: str, given: object) -> float:
    if not isinstance(given, timedelta) or given <= timedelta(0):
        raise ConfigurationError(f"{name}={given!r}: it takes a timedelta over 0, such as timedelta(hours=1)")
    return given.total_seconds()


def _module(url: str) -> str:
    scheme = url.partition("://")[0].partition("+")[0] if "://" in url else ""
    module = DATABASES.get(scheme)
    if module is None:
        raise ConfigurationError(f"no key jar is known for this URL: use one of {KNOWN}")
    return module


def _open(url: str, timeout: float, create: bool | None) -> Database:
    module = _module(url)
    try:
        database: Database = import_module(module).from_url(url, timeout, create)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("oncekey"):
            raise
        extra = module.rpartition(".")[2]
        raise ConfigurationError(f"this key jar needs a driver: pip install 'oncekey[{extra}]'") from error
    return database


def _request(method: str, url: str, members: Any, content: bytes | None, headers: Iterable[tuple[str, str]]) -> Request:
    if "://" not in url:
        raise ConfigurationError(f"prepare needs the whole URL, not '{url}'")
    lines = tuple(headers.items() if isinstance(headers, dict) else headers)
    body = content or b""
    if members is not None:
        if content is not None:
            raise ConfigurationError("give json= or content=, not both")
        body = json.dumps(members, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        if not any(name.lower() == "content-type" for name, _ in lines):
            lines = (*lines, ("content-type", "application/json"))
    return Request(method.upper(), url, lines, body)
