"""What the guards on a SQLAlchemy session see of writes that MySQL's rollbacks leave behind: those in tables without
transactions (MyISAM).

The server says so in a warning (1196) of the statement that rolled back, and the next statement clears it. So oncekey
looks before each rollback of SQLAlchemy, and after each error: a deadlock (1213), or a write of another Galera node,
rolls back the whole transaction, and SQLAlchemy does not know that.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection, ExceptionContext
from sqlalchemy.exc import OperationalError

from oncekey.engine.transactions.adapters import mysql
from oncekey.engine.transactions.adapters.base import Link

_NAME = "_oncekey_watch"


class MysqlWatch:
    """One use of a connection, from enlist until the request is over."""

    def __init__(self, connection: Connection, link: Link) -> None:
        self._connection = connection
        self._link = link

    def start(self) -> None:
        self._connection.__dict__[_NAME] = self
        engine = self._connection.engine
        if not event.contains(engine, "handle_error", _on_error):  # it stays: listeners of one request would collide
            event.listen(engine, "handle_error", _on_error)

    def stop(self) -> None:
        self._connection.__dict__.pop(_NAME, None)

    def look_for_kept_writes(self) -> None:
        """Before the enlisted transaction is rolled back, see whether that undoes everything. After it the connection
        may be back in its pool."""
        try:
            with closing(self._cursor()) as cursor:
                cursor.execute(mysql.TO_THE_MARK)
                cursor.execute(mysql.WARNINGS)
                mysql.note_kept_writes(self._link, cursor.fetchall())
        except Warning:  # aiomysql warns by itself, and the app takes warnings as errors
            mysql.note_kept_writes(self._link, [("Warning", mysql.NOT_ROLLED_BACK)])
        except Exception as error:  # the savepoint or the connection is gone
            if mysql.is_another(error):
                self._link.mark_is_gone()

    def look_after_error(self) -> None:
        """See whether the failed statement rolled back, and left writes behind."""
        if not self._link.ended:
            with suppress(Exception), closing(self._cursor()) as cursor:
                cursor.execute(mysql.WARNINGS)
                mysql.note_kept_writes(self._link, cursor.fetchall())

    def _cursor(self) -> Any:
        return self._connection.connection.cursor()


def _on_error(context: ExceptionContext) -> None:
    watch = getattr(context.connection, _NAME, None)
    if watch is not None and isinstance(context.sqlalchemy_exception, OperationalError) and not context.is_disconnect:
        watch.look_after_error()
