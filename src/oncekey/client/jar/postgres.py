"""A jar in the app's PostgreSQL database: one connection for the jar, opened when it is first used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from oncekey.client.jar.table import CREATE, CREATE_INDEX, TABLE, Execute, made_new, missing, placeholders
from oncekey.errors import JarError
from oncekey.stores.registry import plain_url
from oncekey.telemetry.redaction import describe

_ONE_AT_A_TIME = 7_305_210_119
"""An advisory lock: CREATE TABLE IF NOT EXISTS fails if two sessions run it at once."""


def from_url(url: str, timeout: float, create: bool | None) -> PostgresDatabase:
    return PostgresDatabase(plain_url(url), timeout, create)


class PostgresDatabase:
    def __init__(self, url: str, timeout: float, create: bool | None) -> None:
        self._url, self._timeout, self._create = url, timeout, create
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._process = 0

    def run(self, work: Callable[[Execute], Any], *, writes: bool) -> Any:  # noqa: ARG002 - reads need no other way
        try:
            with self._lock:
                return self._run(work)
        except psycopg.errors.LockNotAvailable as error:
            raise JarError(
                "a transaction that is still open has written this intent, so nothing is sent: commit it first, and "
                "then send"
            ) from error
        except psycopg.Error as error:
            raise JarError(
                f"the key jar's database cannot be used, and nothing is sent until it can ({describe(error)}): mend "
                "it, and run the same again"
            ) from error

    def _run(self, work: Callable[[Execute], Any]) -> Any:
        connection = self._open()

        def execute(statement: str, values: Sequence[Any] = ()) -> Any:
            return connection.execute(placeholders(statement, "format").encode(), values)

        try:
            with connection.transaction():
                return work(execute)
        except psycopg.OperationalError as error:
            if not isinstance(error, psycopg.errors.LockNotAvailable):
                connection.close()
            raise

    def _open(self) -> psycopg.Connection[Any]:
        if self._process != os.getpid():
            self._connection = None  # a parent's connection is not ours to use or close
        if self._connection is None or self._connection.closed:
            milliseconds = int(self._timeout * 1000)
            connection = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=max(2, int(self._timeout)),
                options=f"-c lock_timeout={milliseconds} -c statement_timeout={2 * milliseconds}",
            )
            try:
                self._prepare(connection)
                # The role or database may have it off, and then a commit is lost with the server.
                connection.execute(
                    "SELECT set_config('synchronous_commit', 'on', false) "
                    "WHERE current_setting('synchronous_commit') = 'off'"
                )
            except BaseException:
                connection.close()
                raise
            self._connection, self._process = connection, os.getpid()
        return self._connection

    def _prepare(self, connection: psycopg.Connection[Any]) -> None:
        where = f"the table {TABLE} of the PostgreSQL database {connection.info.dbname}"
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_ONE_AT_A_TIME,))
            # A role that may not create tables can use one that is there.
            is_there = connection.execute("SELECT to_regclass(%s)", (TABLE,)).fetchone() != (None,)
            if not is_there:
                if self._create is False:
                    raise missing(where)
                create = CREATE.format(name="TEXT", text="TEXT", bytes="BYTEA", seconds="DOUBLE PRECISION")
                connection.execute(create.encode())
                connection.execute(CREATE_INDEX)
        if not is_there:
            made_new(where, self._create)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None
