"""A jar in an SQLite file: its own, or the app's.

Uses the connections of oncekey's SQLite store: WAL with ``synchronous=FULL``, one per thread, none across a fork, and
a check that the file still is the one that was opened. A new file can be read by its owner only, because it has bodies
of requests. Its name is synced into the folder, so the file is there after a power failure.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from oncekey.client.jar.table import CREATE, CREATE_INDEX, Dialect, Execute
from oncekey.errors import ConfigurationError, JarError, StoreError
from oncekey.stores.sqlite.connections import Connections

_log = logging.getLogger("oncekey.client")


def from_url(url: str, timeout: float) -> SqliteDatabase:
    return SqliteDatabase(_named(url), timeout)


def file_of(url: str) -> Path:
    return _named(url).absolute()


def _named(url: str) -> Path:
    path = unquote(url.removeprefix("sqlite://").removeprefix("/"))
    if not path or path == ":memory:":
        raise ConfigurationError("a key jar must outlive the process: name a file, as in sqlite:///intents.db")
    return Path(path)


class SqliteDatabase:
    def __init__(self, named: Path, timeout: float) -> None:
        self._path = path = named.absolute()
        self._is_relative = not named.is_absolute()
        self._connections = Connections(path, timeout, _prepare)
        self._connections.or_else = (
            ". With a new file, what was sent before is sent again under a new key, and can happen a second time"
        )

    def run(self, work: Callable[[Execute], Any], *, writes: bool) -> Any:
        try:
            if self._connections.file_id is None:
                self._create_file()
            with self._connections.use() as connection:

                def execute(text: str, values: Sequence[Any] = ()) -> Any:
                    return connection.execute(Dialect.SQLITE.statement(text), values)

                if not writes:
                    return work(execute)
                connection.execute("BEGIN IMMEDIATE")
                try:
                    result = work(execute)
                    connection.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                    raise
                return result
        except StoreError as error:
            raise JarError(
                f"the key jar cannot be used, and nothing is sent until it can: {error}. Mend it, and run the same "
                "again. Do not delete the file: its keys say what was sent before"
            ) from error

    def _create_file(self) -> None:
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            folder = os.open(self._path.parent, os.O_RDONLY)
        except FileExistsError:
            return
        except OSError as error:
            raise StoreError(f"{self._path} cannot be created ({error.strerror})") from error
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        if self._is_relative:
            _log.warning(
                "made a new key jar, %s: its URL is relative to the working folder, so a process that is started in "
                "another folder has another jar, does not see what was sent, and may send it again. Write the whole "
                "path: sqlite:///%s",
                self._path,
                quote(str(self._path)),
            )

    def close(self) -> None:
        self._connections.close()


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute(CREATE.format(name="TEXT", text="TEXT", bytes="BLOB", seconds="REAL"))
    connection.execute(CREATE_INDEX)
