"""The store for tests: dictionaries in this process. See ``store.py``."""

from oncekey.stores.memory.store import MemoryStore

__all__ = ["MemoryStore", "from_url"]


def from_url(url: str) -> MemoryStore:
    """A new store at each call: the URL names no place."""
    del url
    return MemoryStore()
