from __future__ import annotations

from pathlib import Path

import pytest

from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.store_suite import StoreSuite


class TestSqliteStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "keys.db"

    def make_store(self) -> SqliteStore:
        return SqliteStore(self.path, clock=self.clock)
