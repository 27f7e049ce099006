"""A jar in the app's MySQL or MariaDB database: one connection for the jar, opened when it is first used.

The connection and its settings are those of oncekey's MySQL store: strict, READ COMMITTED, a limit for every wait. All
texts are in binary columns, so that names compare byte by byte, whatever the database's collation is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import pymysql
from pymysql.constants import ER

from oncekey.client.jar.table import CREATE, TABLE, Dialect, Execute, made_new, missing, placeholders
from oncekey.errors import JarError
from oncekey.stores.mysql import address
from oncekey.stores.mysql.connection import DEADLOCK, LOCK_TIMEOUT, Connection, code_of, connect, explain
from oncekey.stores.registry import plain_url

_log = logging.getLogger("oncekey.client")

_TRIES: Final = 3
_TYPES: Final = {"name": "VARBINARY(1024)", "text": "LONGBLOB", "bytes": "LONGBLOB", "seconds": "DOUBLE"}
_CREATE: Final = (
    f"{CREATE.format(**_TYPES).rpartition(')')[0]}, INDEX {TABLE}_open (account, finished_at, created_at)) "
    "ENGINE = InnoDB"
)


def from_url(url: str, timeout: float, create: bool | None) -> MysqlDatabase:
    return MysqlDatabase(plain_url(url), timeout, create)


class MysqlDatabase:
    def __init__(self, url: str, timeout: float, create: bool | None) -> None:
        self._address, self._timeout, self._create = address.parse(url), timeout, create
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process = 0

    def run(self, work: Callable[[Execute], Any], *, writes: bool) -> Any:  # noqa: ARG002 - reads need no other way
        with self._lock:
            for left in reversed(range(_TRIES)):
                try:
                    return self._run(work)
                except pymysql.Error as error:
                    if code_of(error) == DEADLOCK and left:
                        continue  # the server has rolled the transaction back
                    raise self._explained(error) from error
        raise AssertionError("unreachable")

    def _run(self, work: Callable[[Execute], Any]) -> Any:
        connection = self._open()
        connection.deadline = time.monotonic() + 2 * max(1.0, self._timeout)

        def execute(text: str, values: Sequence[Any] = ()) -> Any:
            cursor = connection.cursor()
            cursor.execute(placeholders(Dialect.MYSQL.statement(text), "format"), Dialect.MYSQL.values(values))
            return cursor

        try:
            connection.begin()
            result = work(execute)
            connection.commit()
        except BaseException:
            try:
                connection.rollback()
            except pymysql.Error:
                self._drop()  # a late answer must not be read as that of the next statement
            raise
        return result

    def _open(self) -> Connection:
        if self._process != os.getpid():
            self._connection = None  # a parent's connection is not ours to use or close
        if self._connection is not None:
            with suppress(pymysql.Error):
                self._connection.deadline = time.monotonic() + self._timeout
                self._connection.ping(reconnect=False)
                return self._connection
            self._drop()
        deadline = time.monotonic() + max(2.0, self._timeout)
        connection = connect(self._address, timeout=self._timeout, lock_timeout=self._timeout, deadline=deadline)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection, self._process = connection, os.getpid()
        return connection

    def _prepare(self, connection: Connection) -> None:
        try:  # A user who may not create tables can use one that is there.
            connection.run(f"SELECT 1 FROM {TABLE} LIMIT 0")  # noqa: S608 - our own table
        except pymysql.Error as error:
            if code_of(error) != ER.NO_SUCH_TABLE:
                raise
            where = f"the table {TABLE} of {self._address.where}"
            if self._create is False:
                raise missing(where) from error
            connection.run(_CREATE)
            made_new(where, self._create)
        ((flushed,),) = connection.run("SELECT @@innodb_flush_log_at_trx_commit")[0]
        if flushed != 1:
            _log.warning(
                "the key jar is in %s, which does not wait for its disk (innodb_flush_log_at_trx_commit = %s): after "
                "a crash of that server an intent may be gone, and would be sent again under a new key. Set it to 1",
                self._address.where,
                flushed,
            )

    def _explained(self, error: pymysql.Error) -> JarError:
        if code_of(error) == LOCK_TIMEOUT:
            return JarError(
                "a transaction that is still open has written this intent, so nothing is sent: commit it first, and "
                "then send"
            )
        found = explain(error, self._address.where)
        return JarError(f"the key jar cannot be used, and nothing is sent until it can: {found}. Then try again")

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def close(self) -> None:
        with self._lock:
            if self._process == os.getpid():
                self._drop()
            self._connection = None
