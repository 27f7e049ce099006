"""PostgreSQL: the reference store."""

from oncekey.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
