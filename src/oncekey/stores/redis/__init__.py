"""Redis and Valkey: one server, Sentinel, or Cluster."""

from oncekey.stores.redis.store import RedisStore

__all__ = ["RedisStore", "from_url"]


def from_url(url: str) -> RedisStore:
    return RedisStore(url)
