"""The store in memory against the public suite: it is the model, so it must pass what it models."""

from __future__ import annotations

from oncekey.stores.memory import MemoryStore
from oncekey.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    def make_store(self) -> MemoryStore:
        return MemoryStore(self.clock)
