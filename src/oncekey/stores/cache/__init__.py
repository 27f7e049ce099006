"""A cache in front of a store: replays without a question to the database (``OnceKey(url, cache=…)``)."""

from __future__ import annotations

from collections.abc import Callable

from oncekey.errors import ConfigurationError
from oncekey.stores.api import Store
from oncekey.stores.cache.client import Identified
from oncekey.stores.cache.entries import Entries, secret_of
from oncekey.stores.cache.front import Cache
from oncekey.stores.registry import cache_client


def open_cache(
    url: str,
    secret: str | bytes | None,
    ttl: float,
    store: Store,
    entries: Callable[[bytes, float], Entries] = Entries,
) -> Cache:
    """The cache that ``url`` names. Opens no connection yet. ``entries``: what makes entries of rows."""
    if secret is None:
        raise ConfigurationError(
            "OnceKey(cache=…) needs cache_secret=…, which seals what is in the cache: without it, a program that can "
            "write there could make oncekey replay what it likes. Make one with python -c 'import secrets; "
            "print(secrets.token_hex(32))', and give the same to all processes of the app"
        )
    if not isinstance(store, Identified):
        raise ConfigurationError(
            "OnceKey(cache=…): a cache goes in front of a database on a server. In front of this store it would "
            "only make requests slower: leave cache= out"
        )
    return Cache(cache_client(url), entries(secret_of(secret), ttl), store)
