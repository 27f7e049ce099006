"""What the guards on a SQLAlchemy session see of MySQL's own rollbacks.

After a deadlock, or after another Galera node has written the same row, MySQL has rolled back the whole transaction
(1213). SQLAlchemy does not know that, and the next statement begins another transaction. So after each error of the
server this module asks whether the enlisted transaction is still open. If not, the key cannot be completed any more,
and what follows gets a mark of its own: as long as it is there, nothing was committed since.
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
_MARK_AGAIN = ("START TRANSACTION", "SAVEPOINT oncekey")


class MysqlWatch:
    """One use of a connection, from enlist until the request is over."""

    def __init__(self, connection: Connection, link: Link) -> None:
        self._connection = connection
        self._link = link
        self.undone = False
        """The server has rolled the enlisted transaction back by itself."""

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
        except Exception:  # noqa: S110 - the savepoint or the connection is gone, and the rollback shows it
            pass

    def look_after_error(self) -> None:
        """Ask whether the failed statement has ended the transaction. The warnings are those of that statement."""
        if self.undone or self._link.ended:
            return
        with suppress(Exception), closing(self._cursor()) as cursor:
            cursor.execute(mysql.WARNINGS)
            warnings = cursor.fetchall()
            cursor.execute(mysql.ASK_IF_BEGUN)  # fails if the transaction is open
            self.undone = True
            mysql.note_kept_writes(self._link, warnings)
            for sql in _MARK_AGAIN:
                cursor.execute(sql)

    def _cursor(self) -> Any:
        return self._connection.connection.cursor()


def _on_error(context: ExceptionContext) -> None:
    watch = getattr(context.connection, _NAME, None)
    if watch is not None and isinstance(context.sqlalchemy_exception, OperationalError) and not context.is_disconnect:
        watch.look_after_error()
