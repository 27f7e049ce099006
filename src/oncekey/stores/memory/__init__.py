"""The store for tests: dictionaries in this process. See ``store.py``."""

from oncekey.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]
