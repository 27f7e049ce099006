"""Watches a MySQL connection: shows every statement to a guard before it is sent, and refuses to connect again.

PyMySQL, and aiomysql and asyncmy, which are made after it, send every command through one method,
``_execute_command``. So one wrapper around it sees all that a handler sends: commits, statements of cursors,
``begin()``. mysqlclient is written in C and has several such methods, but the connection is a Python object, whose
attributes come first: each method gets a wrapper.

A transaction ends with its connection. What a handler writes after ``ping(reconnect=True)`` would be committed without
the key, so the watch refuses to connect again. mysqlclient connects again inside of its library. That cannot be
refused, and ``bypassed`` tells of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oncekey.engine.transactions.adapters.lost import says_connection_lost
from oncekey.engine.transactions.adapters.texts import Judge
from oncekey.errors import EnlistError

NAME = "_oncekey_watch"
ROLLBACK = "ROLLBACK"
NOTHING = "DO 0"
"""A statement that does nothing, to be sent in place of one that must do nothing."""
_TEXTS = frozenset({3, 22})  # COM_QUERY, COM_STMT_PREPARE


class Watch:
    """The wrappers on one use of a PyMySQL connection."""

    def __init__(self, connection: Any, judge: Judge) -> None:
        self._connection = connection
        self._judge = judge
        self._wrapped: tuple[str, ...] = ()
        self.lost = False
        """An error has said that the connection was lost, or the handler wanted to connect again."""
        self.later_reads_only = False

    def start(self) -> None:
        wrappers = self._wrappers()
        self._wrapped = tuple(wrappers)
        self._connection.__dict__.update(wrappers, **{NAME: self})

    def holds(self) -> bool:
        """Whether the connection still belongs to this use of it."""
        return self._connection.__dict__.get(NAME) is self

    def stop(self) -> None:
        if self.holds():
            for name in (NAME, *self._wrapped):
                self._connection.__dict__.pop(name, None)

    def bypassed(self) -> bool:
        """Whether the connection has another session of the server by now, which the watch could not refuse."""
        return False

    def _wrappers(self) -> dict[str, Callable[..., Any]]:
        send, read = self._connection._execute_command, self._connection._read_query_result

        def execute_command(command: int, sql: Any) -> Any:
            instead = self._instead(command, sql)
            if instead is None:
                raise self._judge.refused()
            return send(command, instead)

        def read_query_result(*args: Any, **options: Any) -> Any:
            with self._noting():
                return read(*args, **options)

        def connect(*_: Any, **__: Any) -> Any:
            raise self._refusal_to_connect()

        return {"_execute_command": execute_command, "_read_query_result": read_query_result, "connect": connect}

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.lost = self.lost or says_connection_lost(error)
            raise

    def _refusal_to_connect(self) -> EnlistError:
        self.lost = True
        return self._judge.refuse_to_reconnect()

    def _instead(self, command: int, sql: Any) -> Any:
        if command not in _TEXTS:
            return sql
        text = sql if isinstance(sql, str) else bytes(sql).decode("utf-8", "replace")
        instead = self._judge.sees(text)
        return sql if instead == text else instead


class AsyncWatch(Watch):
    """On a connection of aiomysql or asyncmy."""

    def _wrappers(self) -> dict[str, Callable[..., Any]]:
        send, read = self._connection._execute_command, self._connection._read_query_result

        async def execute_command(command: int, sql: Any) -> Any:
            instead = self._instead(command, sql)
            if instead is None:
                error = self._judge.refused()
                raise await error if inspect.isawaitable(error) else error
            return await send(command, instead)

        async def read_query_result(*args: Any, **options: Any) -> Any:
            with self._noting():
                return await read(*args, **options)

        async def connect(*_: Any, **__: Any) -> Any:
            raise self._refusal_to_connect()

        name = "_connect" if hasattr(self._connection, "_connect") else "connect"
        return {"_execute_command": execute_command, "_read_query_result": read_query_result, name: connect}


_SAME_AS = {"commit": "COMMIT", "rollback": ROLLBACK, "autocommit": "SET autocommit", "change_user": ROLLBACK}
"""The statement that does the same as a method of mysqlclient."""


class MysqlclientWatch(Watch):
    """On a connection of mysqlclient."""

    _methods = ("query", "send_query", "commit", "rollback", "autocommit", "change_user")
    _session = 0
    """The server's number of this connection."""

    def start(self) -> None:
        self._session = self._connection.thread_id()
        super().start()

    def bypassed(self) -> bool:
        try:
            return self.holds() and bool(self._connection.thread_id() != self._session)
        except Exception:
            return False  # it is closed

    def _wrappers(self) -> dict[str, Callable[..., Any]]:
        return {name: self._wrapper(name, getattr(self._connection, name)) for name in self._methods}

    def _wrapper(self, name: str, send: Any) -> Callable[..., Any]:
        text = _SAME_AS.get(name)
        roll_back = self._connection.rollback

        def send_query(sql: Any, *given: Any) -> Any:
            instead = self._instead(3, sql)
            if instead is None:
                raise self._judge.refused()
            with self._noting():
                return send(instead, *given)

        def call(*given: Any) -> Any:
            if name == "autocommit" and bool(given[0]) == self._connection.get_autocommit():
                return None  # it is so already
            assert text is not None  # noqa: S101 - the method is not a query
            instead = self._judge.sees(text)
            if instead is None:
                raise self._judge.refused()
            if instead == text:
                return send(*given)
            return roll_back() if instead == ROLLBACK else None

        return send_query if text is None else call


_WATCHES: dict[str, type[Watch]] = {
    "pymysql": Watch,
    "MySQLdb": MysqlclientWatch,
    "aiomysql": AsyncWatch,
    "asyncmy": AsyncWatch,
}


def watch(connection: Any, judge: Judge) -> Watch | None:
    """The watch on a connection, started. None: this driver cannot be watched."""
    for kind in type(connection).__mro__:
        of = _WATCHES.get(kind.__module__.partition(".")[0])
        if of is not None:
            made = of(connection, judge)
            made.start()
            return made
    return None
