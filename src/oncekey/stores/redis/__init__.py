"""Redis and Valkey: one server, Sentinel, or Cluster."""

from oncekey.stores.redis.cache import RedisCache
from oncekey.stores.redis.store import RedisStore

__all__ = ["RedisStore", "cache_from_url", "from_url"]


def from_url(url: str) -> RedisStore:
    return RedisStore(url)


def cache_from_url(url: str) -> RedisCache:
    """The server as a cache in front of another store."""
    return RedisCache(url)
