"""PostgreSQL: the reference store."""

from oncekey.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore", "from_url"]


def from_url(url: str) -> PostgresStore:
    return PostgresStore(url)
