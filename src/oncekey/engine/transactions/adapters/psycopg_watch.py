"""The guards on a psycopg connection that a handler enlists.

They stay on the connection after the handler has ended its transaction, until the request is over or the connection
goes back to its pool. Until then a later transaction can only read. That costs no round trip: psycopg sends the BEGIN
itself, and :class:`Watch` makes it a BEGIN READ ONLY.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from psycopg.errors import ReadOnlySqlTransaction

from oncekey.engine.transactions.adapters.base import Link
from oncekey.engine.transactions.adapters.texts import Judge, ends_transaction, may_end_transaction

NAME = "_oncekey_watch"


class Watch:
    """The guards on one use of a psycopg connection."""

    def __init__(self, connection: Any, link: Link, judge: Judge | None = None) -> None:
        self._connection = connection
        self.link = link
        self.judge = judge
        """Beneath SQLAlchemy: decides in place of the link."""
        self._class: type = type(connection)
        self._factory: Any = None
        self._begin = b""
        self.lost = False  # SQLAlchemy knows it
        self.later_reads_only = True

    def start(self) -> None:
        connection = self._connection
        connection.__dict__[NAME] = self
        read_only, connection._read_only, connection._begin_statement = connection._read_only, True, b""
        self._begin = connection._get_tx_start_command()  # psycopg caches it in _begin_statement
        connection._read_only = read_only
        if hasattr(connection, "_pool"):
            connection.__class__ = _pooled(self._class)

    def see_statements(self) -> None:
        self._factory = self._connection.cursor_factory
        self._connection.cursor_factory = _watched(self._factory)

    def replace(self, **methods: Callable[..., Any]) -> None:
        self._connection.__dict__.update(methods)

    def later_may_write(self) -> None:
        """Undo READ ONLY: the enlisted transaction is committed, so the app may write again."""
        if self._connection._begin_statement == self._begin:
            self._connection._begin_statement = b""

    def bypassed(self) -> bool:
        """Whether a later transaction could write: the app reset READ ONLY, or turned autocommit on."""
        connection = self._connection
        mine = connection.__dict__.get(NAME) is self
        return mine and (connection._begin_statement != self._begin or connection.autocommit)

    def sees(self, query: bytes) -> None:
        sql = query.decode("utf-8", "replace")
        if self.judge is not None:
            if self.judge.sees(sql) != sql:
                raise self.judge.refused()
            return
        verb = ends_transaction(sql)
        if verb is not None and not self.link.end_allowed:
            self.link.end_refused = True
            raise self.link.refuse(verb)
        if may_end_transaction(sql):
            self.link.may_have_written_later = True

    def stop(self) -> None:
        connection = self._connection
        if connection.__dict__.get(NAME) is not self:
            return
        for name in (NAME, "commit", "rollback"):
            connection.__dict__.pop(name, None)
        if connection.__class__ is _pooled(self._class):
            connection.__class__ = self._class
        if self._factory is not None and connection.cursor_factory is _watched(self._factory):
            connection.cursor_factory = self._factory
        self.later_may_write()


def watch_beneath(connection: Any, link: Link, judge: Judge) -> Watch:
    """Guard the driver's connection beneath SQLAlchemy, sync or async. It works as on an enlisted connection, but
    ``judge`` decides, because it knows what SQLAlchemy itself is about to send."""
    kind = type(connection)
    watch = Watch(connection, link, judge)
    watch.start()
    watch.see_statements()

    def method(verb: str) -> Callable[[], Any]:
        def end() -> Any:
            instead = judge.sees(verb)
            if instead is None:
                raise judge.refused()
            return getattr(kind, instead.lower())(connection)

        return end

    watch.replace(commit=method("COMMIT"), rollback=method("ROLLBACK"))
    return watch


@cache
def _pooled(kind: type) -> type:
    class Pooled(kind):  # type: ignore[misc]
        """Stops the watch when the pool takes the connection back: the pool sets ``_pool`` to None."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_pool" and value is None and (watch := self.__dict__.get(NAME)) is not None:
                watch.stop()

    Pooled.__qualname__ = Pooled.__name__ = kind.__name__
    return Pooled


@cache
def _watched(factory: type) -> type:
    class Watched(factory):  # type: ignore[misc]
        """A cursor that shows each statement to the guards before it is sent."""

        def _convert_query(self, query: Any, params: Any = None) -> Any:
            converted = super()._convert_query(query, params)
            watch: Watch | None = self._conn.__dict__.get(NAME)
            if watch is not None:
                watch.sees(converted.query)
            return converted

        def _raise_for_result(self, result: Any) -> Any:
            try:
                super()._raise_for_result(result)
            except ReadOnlySqlTransaction as error:
                watch: Watch | None = self._conn.__dict__.get(NAME)
                if watch is None or watch.judge is not None:
                    raise
                raise watch.link.refuse_later("a write") from error

    Watched.__qualname__ = Watched.__name__ = factory.__name__
    return Watched
