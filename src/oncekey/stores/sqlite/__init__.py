"""The embedded default store: one file, nothing to install. See ``store.py``."""

from oncekey.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
