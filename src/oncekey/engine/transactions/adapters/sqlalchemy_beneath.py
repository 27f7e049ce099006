"""The guards on the driver's own connection, beneath a SQLAlchemy session or connection.

SQLAlchemy's events do not tell what a handler does there: ``session.connection().connection.dbapi_connection``, and
then ``rollback()``, an insert and ``commit()``. So nothing would prove that nothing was committed (hazard 31). These
guards see each statement before the driver sends it. SQLAlchemy announces its own COMMIT and ROLLBACK by an event. One
that is not announced is the handler's, and is refused. The enlisted transaction then stays open (asyncpg: is rolled
back), and oncekey does not commit it.

A driver that is not named in :func:`_watch` cannot be watched. For it, only the mark of the transaction tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sqlalchemy.engine import Connection

from oncekey.engine.transactions.adapters import mysql, mysql_watch
from oncekey.engine.transactions.adapters.base import Link
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction, writes
from oncekey.errors import EnlistError

IDLE, FAILED = 0, 3
"""As libpq numbers the states of a transaction."""
_OF_A_POOL = frozenset({"COMMIT", "ROLLBACK"})
"""What a pool sends when a connection comes back."""


class Watch(Protocol):
    """What sees the statements of one driver's connection before they are sent."""

    lost: bool
    """The driver has said that the connection was lost."""
    later_reads_only: bool
    """The driver itself begins every later transaction READ ONLY."""

    def bypassed(self) -> bool:
        """Whether something happened that the watch could not refuse: the library has connected again (mysqlclient), or
        a later transaction may write (psycopg)."""

    def stop(self) -> None: ...


class Beneath:
    """The guard on one driver connection, for as long as a SQLAlchemy connection has it."""

    def __init__(self, link: Link, connection: Connection, allows: Callable[[], bool]) -> None:
        self.link = link
        self.connection = connection
        self._allows = allows
        """Whether oncekey itself is sending, or everything is allowed by now."""
        self._driver = _driver_of(connection)
        self.status = status_of(self._driver)
        self.announced = False
        """SQLAlchemy is about to send COMMIT or ROLLBACK."""
        self._refused = ""
        self._watch: Watch | None = None
        self.lost = False

    def start(self) -> bool:
        """False: this driver cannot be watched."""
        self._watch = _watch(self._driver, self.connection.connection.dbapi_connection, self)
        return self._watch is not None

    def watches(self, connection: Connection) -> bool:
        """Whether it sees what this connection's driver sends."""
        if self._watch is None or self.connection is not connection:
            return False
        return connection.invalidated or self._driver is _driver_of(connection)

    def stop(self) -> None:
        self.look()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def look(self) -> None:
        """See what the watch has seen and could not refuse."""
        if self._watch is None:
            return
        self.lost = self.lost or self._watch.lost
        if self._watch.bypassed():
            self.link.may_have_written_later = True

    def sees(self, sql: str) -> str | None:
        """What to send in place of this statement. None: it ends the transaction, and is refused."""
        if self._allows():
            return sql
        link = self.link
        verb = ends_transaction(sql)
        if verb is None and link.dialect == "mysql":
            verb = mysql.commits_by_itself(sql)
        if verb is None:
            self._note(sql)
            return sql
        if self.announced:
            self.announced = False
            return sql
        if link.ended and verb in _OF_A_POOL and self.connection.get_transaction() is None:
            return "ROLLBACK"
        link.end_refused = True
        self._refused = verb
        return None

    def _note(self, sql: str) -> None:
        link = self.link
        if link.ended:
            if (verb := writes(sql)) is not None:
                raise link.refuse_later(verb)
            if self._is_idle():
                link.may_have_written_later = True
        if may_end_transaction(sql):
            link.may_have_written_later = True
        if link.dialect == "mysql" and mysql.may_end_unseen(sql):
            link.may_have_ended_unseen = True

    def _is_idle(self) -> bool:
        """Whether a statement would now be outside of the READ ONLY transactions that SQLAlchemy begins."""
        if self._watch is not None and self._watch.later_reads_only:
            return False
        if self.status is not None:
            return self.status() == IDLE
        return self.connection.get_transaction() is None

    def refused(self) -> EnlistError:
        """The error for what ``sees`` refused."""
        return self.link.refuse(f"{self._refused} on the driver's connection")

    def refuse_to_reconnect(self) -> EnlistError:
        return self.link.refuse_to_reconnect()


def _driver_of(connection: Connection) -> Any:
    """The driver's connection itself, also behind the proxies of a tracing library (wrapt)."""
    driver: Any = connection.connection.driver_connection
    while hasattr(driver, "__wrapped__"):
        driver = driver.__wrapped__
    return driver


def _watch(driver: Any, adapted: Any, beneath: Beneath) -> Watch | None:
    package = type(driver).__module__.partition(".")[0]
    if package == "psycopg":
        from oncekey.engine.transactions.adapters.psycopg_watch import watch_beneath

        return watch_beneath(driver, beneath.link, beneath)
    if package == "asyncpg" and hasattr(adapted, "readonly"):
        from oncekey.engine.transactions.adapters.asyncpg_watch import AsyncpgWatch

        return AsyncpgWatch(driver, adapted, beneath.link, beneath)
    return mysql_watch.watch(driver, beneath)


def status_of(driver: Any) -> Callable[[], int] | None:
    """Returns the transaction status of the driver; None: the driver has none."""
    if hasattr(driver, "pgconn"):  # psycopg
        pgconn = driver.pgconn
        return lambda: int(pgconn.transaction_status)
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return lambda: 2 if driver.is_in_transaction() else IDLE
    if hasattr(driver, "server_status"):  # PyMySQL, aiomysql, asyncmy
        return lambda: 2 if driver.server_status & 1 else IDLE
    if hasattr(driver, "get_transaction_status"):  # psycopg2
        return lambda: int(driver.get_transaction_status())
    return None
