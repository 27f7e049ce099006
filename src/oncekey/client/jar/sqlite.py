"""A jar in an SQLite file: its own, or the app's.

Uses the connections of oncekey's SQLite store: WAL with ``synchronous=FULL``, one per thread, none across a fork, and
a check that the file still is the one that was opened. A new file can be read by its owner only, because it has bodies
of requests. Its name is synced into the folder, so the file is there after a power failure.

A file of 0 bytes is refused, because a jar that was cut off looks like that. So a new file gets its table under another
name, and then its own name: neither a kill nor a second process ever finds an empty jar.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from oncekey.client.jar.table import CREATE, CREATE_INDEX, TABLE, Dialect, Execute, made_new, missing
from oncekey.errors import ConfigurationError, JarError, StoreError, StoreUnavailable
from oncekey.stores.sqlite.connections import Connections

_log = logging.getLogger("oncekey.client")

_CREATE: Final = CREATE.format(name="TEXT", text="TEXT", bytes="BLOB", seconds="REAL")
_HAS_TABLE: Final = "SELECT 1 FROM sqlite_master WHERE name = ?"


def from_url(url: str, timeout: float, create: bool | None) -> SqliteDatabase:
    return SqliteDatabase(_named(url), timeout, create)


def _named(url: str) -> Path:
    path = unquote(url.removeprefix("sqlite://").removeprefix("/"))
    if not path or path == ":memory:":
        raise ConfigurationError("a key jar must outlive the process: name a file, as in sqlite:///intents.db")
    return Path(path)


class SqliteDatabase:
    def __init__(self, named: Path, timeout: float, create: bool | None) -> None:
        self._path = path = named.absolute()
        self._is_relative = not named.is_absolute()
        self._create = create
        self._connections = _JarConnections(path, timeout, self._prepare)

    def run(self, work: Callable[[Execute], Any], *, writes: bool) -> Any:
        try:
            if self._connections.file_id is None:
                self._check_file()
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
            raise self._unusable(error) from error

    def _unusable(self, error: StoreError) -> JarError:
        keep = ""
        with suppress(OSError):
            if self._path.exists():
                keep = ". Do not delete the file: without its keys, what was sent before is sent again under new keys"
        return JarError(
            f"the key jar cannot be used, and nothing is sent until it can: {error}. Mend that, and run the same "
            f"again{keep}"
        )

    def _check_file(self) -> None:
        """Before the file is opened for the first time: make it, or refuse it."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            if self._create is False:
                raise missing(str(self._path)) from None
            self._create_file()
            found = self._path.stat()
        except OSError:
            return  # opening it fails, too, and says why
        if not found.st_size:
            raise JarError(
                f"{self._path} is empty (0 bytes), and a key jar never is: it was cut off, or another program made the "
                "file. Nothing is sent. If this program has used it as its jar, put the jar back (docs/client.md, If "
                "the jar is lost). If it is a new database of your app, let the app make its tables first. If it was "
                "never used, delete it"
            )
        if found.st_mode & stat.S_IROTH:
            _log.warning(
                "the key jar %s can be read by every user of this machine (mode %o), and it has requests and answers "
                "in clear text. Run: chmod o= '%s'",
                self._path,
                stat.S_IMODE(found.st_mode),
                self._path,
            )

    def _create_file(self) -> None:
        at = self._path.resolve()  # the path may be a link to a file that is not there
        if not at.parent.is_dir():
            raise StoreError(
                f"{self._path} cannot be made, because its folder does not exist: correct the path, or mount its disk"
            )
        made = None
        try:
            descriptor, made = tempfile.mkstemp(prefix=".oncekey-jar-", dir=at.parent)  # mode 600
            os.close(descriptor)
            with closing(sqlite3.connect(made)) as connection:
                connection.execute(_CREATE)
            os.link(made, at)
            folder = os.open(at.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except FileExistsError:
            return  # another process has made it meanwhile
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self._path} cannot be made ({getattr(error, 'strerror', error)})") from error
        finally:
            if made is not None:
                Path(made).unlink(missing_ok=True)
        self._made_new()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if connection.execute(_HAS_TABLE, (TABLE,)).fetchone() is None:
            if self._create is False:
                raise missing(f"{self._path}: the file has no table {TABLE}")
            connection.execute(_CREATE)
            self._made_new()
        connection.execute(CREATE_INDEX)

    def _made_new(self) -> None:
        more = ""
        if self._is_relative:
            more = (
                ". The URL is relative to the working folder, so a process that is started in another folder has "
                f"another jar: write the whole path, sqlite:///{quote(str(self._path))}"
            )
        made_new(str(self._path), self._create, more)

    def close(self) -> None:
        self._connections.close()


class _JarConnections(Connections):
    """A jar has other advice than a store: no other file can take its place."""

    or_else = ". With a new file, what was sent before is sent again under a new key, and can happen a second time"

    def in_words(self, code: int, said: str, lock_seconds: float) -> StoreUnavailable:
        if code == sqlite3.SQLITE_NOTADB:
            return StoreUnavailable(
                f"{self.path} is not an SQLite database. If it was this program's jar, it is damaged: restore it from "
                "a backup. If it belongs to another program, correct the URL of the jar"
            )
        return super().in_words(code, said, lock_seconds)
