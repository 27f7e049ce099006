"""Runs the jar's statements in a transaction of the app, on whatever connection or session the app has.

Known are SQLAlchemy's Session and Connection (async ones by their ``run_sync``), and connections of sqlite3 and
psycopg.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from oncekey.client.jar.table import Execute, placeholders
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
        style = on.dialect.paramstyle

        def driver_execute(text: str, values: Sequence[Any] = ()) -> Any:
            return on.exec_driver_sql(placeholders(text, style), tuple(values))

        return work(driver_execute)
    if callable(getattr(on, "cursor", None)) and name != "AsyncConnection":
        style = "qmark" if package == "sqlite3" else "format"

        def execute(text: str, values: Sequence[Any] = ()) -> Any:
            cursor = on.cursor()
            cursor.execute(placeholders(text, style), tuple(values))
            return cursor

        return work(execute)
    raise ConfigurationError(
        f"prepare(on=…) takes a SQLAlchemy Session or Connection, or a sqlite3 or psycopg connection, not {name}"
    )
