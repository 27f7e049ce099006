"""Runs the jar's statements in a transaction of the app, on whatever connection or session the app has.

Known are SQLAlchemy's Session and Connection (async ones by their ``run_sync``), Django's connections, and connections
of sqlite3, psycopg, PyMySQL and mysqlclient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from oncekey.client.jar.table import Dialect, Execute, placeholders
from oncekey.errors import ConfigurationError

_T = TypeVar("_T")


def in_transaction(on: Any, work: Callable[[Execute], _T]) -> _T:
    """Run ``work`` on the app's connection. It neither begins nor ends a transaction beyond what the driver does."""
    package = type(on).__module__.partition(".")[0]
    name = type(on).__name__
    if package == "sqlalchemy" and name.startswith(("Async", "async_")):
        raise ConfigurationError("an async session: `await session.run_sync(lambda s: jar.prepare(…, on=s))`")
    if hasattr(on, "get_bind") and callable(getattr(on, "connection", None)):
        on = on.connection()  # a Session, also a scoped one
    if hasattr(on, "exec_driver_sql"):
        return work(_executing(on.exec_driver_sql, _dialect(on.dialect.name), on.dialect.paramstyle))
    if callable(getattr(on, "cursor", None)) and name != "AsyncConnection":
        dialect = _dialect(getattr(on, "vendor", "") or package)  # ``vendor``: of Django's connections
        style = "qmark" if package == "sqlite3" else "format"

        def execute(text: str, values: tuple[Any, ...]) -> Any:
            cursor = on.cursor()
            cursor.execute(text, values)
            return cursor

        return work(_executing(execute, dialect, style))
    raise ConfigurationError(
        "prepare(on=…) takes a SQLAlchemy Session or Connection, Django's connection, or one of sqlite3, psycopg, "
        f"PyMySQL or mysqlclient, not {name}"
    )


def _dialect(word: str) -> Dialect:
    if word in ("mysql", "mariadb", "pymysql", "MySQLdb"):
        return Dialect.MYSQL
    return Dialect.SQLITE if word in ("sqlite", "sqlite3") else Dialect.POSTGRES


def _executing(run: Callable[[str, tuple[Any, ...]], Any], dialect: Dialect, style: str) -> Execute:
    def execute(text: str, values: Sequence[Any] = ()) -> Any:
        return run(placeholders(dialect.statement(text), style), dialect.values(values))

    return execute
