"""From a URL to a store. The only place that knows all stores; each is imported only when its URL is used."""

from __future__ import annotations

from importlib import import_module
from urllib.parse import unquote, urlsplit

from oncekey.errors import ConfigurationError
from oncekey.stores.base import Store

KNOWN = "memory://, sqlite:///file.db, postgresql://user@host/database"


def open_store(url: str) -> Store:
    """The store that ``url`` names. Opens no connection yet."""
    scheme = urlsplit(url).scheme if "://" in url else ""
    match scheme:
        case "memory":
            from oncekey.stores.memory import MemoryStore

            return MemoryStore()
        case "sqlite":
            return _sqlite(url)
        case "postgresql" | "postgres":
            return _with_extra("oncekey.stores.postgres", "PostgresStore", "postgres", url)
    raise ConfigurationError(f"no store is known for a URL that starts with '{scheme or url[:12]}': use one of {KNOWN}")


def _sqlite(url: str) -> Store:
    from oncekey.stores.sqlite import SqliteStore

    # As in SQLAlchemy: three slashes and a relative path, four for an absolute one.
    path = unquote(url.removeprefix("sqlite://").removeprefix("/"))
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
