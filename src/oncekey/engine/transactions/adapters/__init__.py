"""Finds the link for what a handler enlists. Only this module knows all drivers; it imports one when it is in use.

A driver is known by the names of its classes, so that a driver that the app does not use is never imported. To add
one, add its file beside this one and its line in ``ADAPTERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from oncekey.engine.transactions.adapters.base import Link
from oncekey.errors import EnlistError

__all__ = ["ADAPTERS", "Link", "link_to"]

# fmt: off
ADAPTERS: dict[tuple[str, str], str] = {
    ("sqlite3", "Connection"): "sqlite:SqliteLink",
    ("aiosqlite", "Connection"): "sqlite:aiosqlite_link",
    ("psycopg", "Connection"): "psycopg:PsycopgLink",
    ("psycopg", "AsyncConnection"): "psycopg:AsyncPsycopgLink",
    ("asyncpg", "Connection"): "asyncpg:AsyncpgLink",
    ("asyncpg", "PoolConnectionProxy"): "asyncpg:AsyncpgLink",
    ("pymysql", "Connection"): "mysql:PymysqlLink",
    ("MySQLdb", "Connection"): "mysql:MysqlclientLink",
    ("aiomysql", "Connection"): "mysql:AsyncMysqlLink",
    ("asyncmy", "Connection"): "mysql:AsyncMysqlLink",
    ("django", "BaseDatabaseWrapper"): "django:link_to_wrapper",
    ("django", "ConnectionProxy"): "django:link_to_proxy",
    ("sqlalchemy", "Session"): "sqlalchemy:SqlAlchemyLink",
    ("sqlalchemy", "Connection"): "sqlalchemy:SqlAlchemyLink",
    ("sqlalchemy", "AsyncSession"): "sqlalchemy:async_link",
    ("sqlalchemy", "AsyncConnection"): "sqlalchemy:async_link",
    ("sqlalchemy", "scoped_session"): "sqlalchemy:scoped_link",
    ("sqlalchemy", "async_scoped_session"): "sqlalchemy:scoped_link",
}
# fmt: on
"""(package, class) of what can be enlisted -> the module beside this one, and what makes the link in it."""
KNOWN = (
    "a SQLAlchemy Session, AsyncSession, Connection or AsyncConnection (also scoped), a psycopg Connection or "
    "AsyncConnection, an asyncpg connection, a sqlite3 or aiosqlite connection, "
    "a PyMySQL, mysqlclient, aiomysql or asyncmy connection, or Django's django.db.connection"
)


def link_to(target: Any) -> Link:
    """Return the link for this session or connection. For anything else, EnlistError lists what can be enlisted."""
    of = type(target)
    return (_makers.get(of) or _maker(of))(target)


_makers: WeakKeyDictionary[type, Callable[[Any], Link]] = WeakKeyDictionary()


def _maker(of: type) -> Callable[[Any], Link]:
    """What makes the links to objects of this class."""
    for kind in of.__mro__:
        package = kind.__module__.partition(".")[0]
        if (where := ADAPTERS.get((package, kind.__qualname__.rpartition(".")[2]))) is not None:
            module, _, name = where.partition(":")
            maker: Callable[[Any], Link] = getattr(import_module(f"{__name__}.{module}"), name)
            _makers[of] = maker
            return maker
    raise EnlistError(f"a {of.__name__} cannot be enlisted: give {KNOWN}")
