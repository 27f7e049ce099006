"""Finds the link for what a handler enlists. It goes by the name of the class, so only drivers in use are imported."""

from __future__ import annotations

import sqlite3
from typing import Any

from oncekey.engine.transactions.adapters.base import Link
from oncekey.errors import EnlistError

__all__ = ["Link", "link_to"]

KNOWN = (
    "a SQLAlchemy Session, AsyncSession, Connection or AsyncConnection (also scoped), a psycopg Connection or "
    "AsyncConnection, an asyncpg connection, a sqlite3 or aiosqlite connection"
)


def link_to(target: Any) -> Link:
    """Return the link for this session or connection. For anything else, EnlistError lists what can be enlisted."""
    if isinstance(target, sqlite3.Connection):
        from oncekey.engine.transactions.adapters.sqlite import SqliteLink

        return SqliteLink(target)
    for name in (f"{kind.__module__}.{kind.__qualname__}" for kind in type(target).__mro__):
        package, _, kind = name.partition(".")
        kind = kind.rpartition(".")[2]
        match package, kind:
            case "sqlalchemy", "scoped_session" | "async_scoped_session":
                link = link_to(target.registry())  # not the registry: the task that ends it may get another session
                link.watch_registry(target.registry)
                return link
            case "sqlalchemy", "AsyncSession" | "AsyncConnection":
                from oncekey.engine.transactions.adapters.sqlalchemy import async_link

                return async_link(target)
            case "sqlalchemy", "Session" | "Connection":
                from oncekey.engine.transactions.adapters.sqlalchemy import SqlAlchemyLink

                return SqlAlchemyLink(target)
            case "psycopg", "Connection":
                from oncekey.engine.transactions.adapters.psycopg import PsycopgLink

                return PsycopgLink(target)
            case "psycopg", "AsyncConnection":
                from oncekey.engine.transactions.adapters.psycopg import AsyncPsycopgLink

                return AsyncPsycopgLink(target)
            case "asyncpg", "Connection" | "PoolConnectionProxy":
                from oncekey.engine.transactions.adapters.asyncpg import AsyncpgLink

                return AsyncpgLink(target)
            case "aiosqlite", "Connection":
                from oncekey.engine.transactions.adapters.sqlite import aiosqlite_link

                return aiosqlite_link(target)
    raise EnlistError(f"a {type(target).__name__} cannot be enlisted: give {KNOWN}")
