"""Opens the store that a URL names. Only this module knows all stores; it imports a store when its URL is used.

To add a store, add its folder and its entry in ``STORES``. Its package has a function ``from_url(url)``, which opens
no connection yet.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from oncekey.core.values import value
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Store

if TYPE_CHECKING:
    from oncekey.stores.cache.client import CacheClient

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*").fullmatch


@value
class Entry:
    """One store."""

    scheme: str
    """Its URLs start with this. A store with transactions has it as its ``dialect``, too."""
    example: str
    """A URL, as messages show it."""
    package: str
    extra: str | None = None
    """The driver comes with ``pip install 'oncekey[extra]'``. None: the store needs no other package."""
    transactions: bool = False
    """It has the protocols ``Transactions`` and ``Outbox``."""
    alias: str | None = None
    """Another word for its scheme."""
    drivers: tuple[str, ...] = ()
    """Drivers in SQLAlchemy's URLs (``scheme+driver://``) that the store replaces by its own. A driver of another kind
    of database is left out: ``sqlite+pysqlcipher`` opens an encrypted file."""
    cache: bool = False
    """Its package has ``cache_from_url(url)`` too: its server can be the cache in front of another store."""
    renamed: tuple[tuple[str, str, str], ...] = ()
    """(driver, option, name): an option of that driver's URLs, and its name in the store's own."""
    also: tuple[str, ...] = ()
    """Further schemes, each with a meaning of its own: the store gets such a URL as it is."""

    def opens(self, kind: str, driver: str) -> bool:
        if (f"{kind}+{driver}" if driver else kind) in self.also:
            return True
        return kind in (self.scheme, self.alias) and (not driver or driver in self.drivers)


STORES = (
    Entry("memory", "memory://", "oncekey.stores.memory"),
    Entry("sqlite", "sqlite:///file.db", "oncekey.stores.sqlite", transactions=True, drivers=("pysqlite", "aiosqlite")),
    Entry(
        *("postgresql", "postgresql://user@host/database", "oncekey.stores.postgres", "postgres"),
        transactions=True,
        alias="postgres",
        drivers=("psycopg", "psycopg_async", "psycopg2", "asyncpg"),
        renamed=(("asyncpg", "ssl", "sslmode"),),  # without it the connection is not encrypted
    ),
    Entry(
        *("mysql", "mysql://user@host/database", "oncekey.stores.mysql", "mysql"),
        transactions=True,
        alias="mariadb",
        drivers=("pymysql", "mysqldb", "aiomysql", "asyncmy", "mysqlconnector", "mariadbconnector"),
    ),
    Entry(
        *("redis", "redis://host:6379/0", "oncekey.stores.redis", "redis"),
        cache=True,
        also=("rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"),
    ),
    Entry("dynamodb", "dynamodb://table?region=eu-central-1", "oncekey.stores.dynamodb", "dynamodb"),
)
KNOWN = ", ".join(entry.example for entry in STORES)
"""The URLs that messages and help texts list."""
WITH_TRANSACTIONS = ", ".join(entry.example for entry in STORES if entry.transactions)
DATABASES = "SQLite, PostgreSQL, MySQL or MariaDB"
"""The same for errors that are raised in a handler: in the log, a URL of an exception is masked."""


def find(url: str) -> Entry | None:
    """The store of this URL, if there is one."""
    scheme, colon, _ = url.partition("://")
    kind, plus, driver = scheme.partition("+")
    if not colon or (plus and not driver):
        return None
    return next((entry for entry in STORES if entry.opens(kind, driver)), None)


def plain_url(url: str) -> str:
    """The URL without the driver's name, so that an app can pass the URL that it passes to SQLAlchemy."""
    entry = find(url)
    if entry is None:
        return url
    scheme, _, rest = url.partition("://")
    if scheme in entry.also:
        return url
    place, mark, options = rest.partition("?")
    for driver, option, name in entry.renamed:
        if scheme.endswith(f"+{driver}"):
            options = re.sub(rf"(?:(?<=&)|^){option}=", f"{name}=", options)
    return f"{entry.scheme}://{place}{mark}{options}"


def open_store(url: str) -> Store:
    """The store that ``url`` names. Opens no connection yet."""
    entry = find(url)
    if entry is not None:
        return load(entry, plain_url(url))
    # The message does not quote the URL: it may hold a password.
    scheme = url.partition("://")[0] if "://" in url else ""
    what = f"a URL that starts with '{scheme}'" if _SCHEME(scheme) else "what was given, which is not a URL"
    raise ConfigurationError(f"no store is known for {what}: use one of {KNOWN}")


def load(entry: Entry, url: str) -> Store:
    store: Store = _package(entry).from_url(url)
    return store


def _package(entry: Entry) -> Any:
    try:
        return import_module(entry.package)
    except ModuleNotFoundError as error:
        if entry.extra is None or (error.name or "").startswith("oncekey"):
            raise
        raise ConfigurationError(
            f"this store needs a driver that is not installed: pip install 'oncekey[{entry.extra}]'"
        ) from error


def cache_client(url: str) -> CacheClient:
    """The client of the cache that ``url`` names. Opens no connection yet."""
    entry = find(url)
    if entry is None or not entry.cache:
        offered = ", ".join(entry.example for entry in STORES if entry.cache)
        raise ConfigurationError(f"OnceKey(cache=…): no cache is known for this URL: use {offered}")
    client: CacheClient = _package(entry).cache_from_url(url)
    return client


def package_of(dialect: str) -> str:
    """The package of the store with this SQL dialect. It is not imported."""
    return next(entry.package for entry in STORES if entry.scheme == dialect)
