"""Opens the store that a URL names. Only this module knows all stores; it imports a store when its URL is used."""

from __future__ import annotations

import re
from importlib import import_module
from urllib.parse import unquote

from oncekey.errors import ConfigurationError
from oncekey.stores.api import Store

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*").fullmatch
KNOWN = "memory://, sqlite:///file.db, postgresql://user@host/database"
_DRIVERS = {
    "sqlite": frozenset({"pysqlite", "aiosqlite"}),
    "postgresql": frozenset({"psycopg", "psycopg_async", "psycopg2", "asyncpg"}),
}
"""Drivers in SQLAlchemy's URLs that oncekey replaces by its own. Drivers of another kind of database are left out:
``sqlite+pysqlcipher`` opens an encrypted file."""


def plain_url(url: str) -> str:
    """The URL without the driver's name, so that an app can pass the URL that it passes to SQLAlchemy."""
    scheme, colon, rest = url.partition("://")
    kind, plus, driver = scheme.partition("+")
    kind = "postgresql" if kind == "postgres" else kind
    if not plus:
        return f"{kind}{colon}{rest}"
    if driver not in _DRIVERS.get(kind, ()):
        return url
    place, mark, options = rest.partition("?")
    if driver == "asyncpg":
        # asyncpg calls it ``ssl``, with the values of libpq's ``sslmode``. Without it the connection is not encrypted.
        options = re.sub(r"(?:(?<=&)|^)ssl=", "sslmode=", options)
    return f"{kind}://{place}{mark}{options}"


def open_store(url: str) -> Store:
    """The store that ``url`` names. Opens no connection yet."""
    url = plain_url(url)
    scheme = url.partition("://")[0] if "://" in url else ""
    match scheme:
        case "memory":
            from oncekey.stores.memory import MemoryStore

            return MemoryStore()
        case "sqlite":
            return _sqlite(url)
        case "postgresql":
            return _with_extra("oncekey.stores.postgres", "PostgresStore", "postgres", url)
    # The message does not quote the URL: it may hold a password.
    what = f"a URL that starts with '{scheme}'" if _SCHEME(scheme) else "what was given, which is not a URL"
    raise ConfigurationError(f"no store is known for {what}: use one of {KNOWN}")


def _sqlite(url: str) -> Store:
    from oncekey.stores.sqlite import SqliteStore

    # As in SQLAlchemy: three slashes before a relative path, four before an absolute one.
    path = url.removeprefix("sqlite://").removeprefix("/")
    if "?" in path or "#" in path:
        raise ConfigurationError(
            "the SQLite URL takes no options: use sqlite:///file.db, without '?' and '#' (%3F and %23 in a file's name)"
        )
    path = unquote(path)
    if not path:
        raise ConfigurationError("the SQLite URL names no file: use sqlite:///file.db, or memory:// to keep nothing")
    return SqliteStore(path)


def _with_extra(module: str, name: str, extra: str, url: str) -> Store:
    try:
        kind = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("oncekey"):
            raise
        raise ConfigurationError(
            f"this store needs a driver that is not installed: pip install 'oncekey[{extra}]'"
        ) from error
    store: Store = kind(url)
    return store
