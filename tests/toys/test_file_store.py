"""The toy store against the public suite: it needs no more than CONTRIBUTING.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.stores.api import Outbox, Store, Transactions
from oncekey.testing.conformance.base import missing_methods
from oncekey.testing.store_suite import StoreSuite
from tests.toys import file_store
from tests.toys.file_store import FileStore


class TestFileStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "keys.pickle"

    def make_store(self) -> FileStore:
        return FileStore(self.path, self.clock)


def test_toy_store_is_short() -> None:
    assert len(Path(file_store.__file__).read_text("utf-8").splitlines()) < 150


def test_suite_names_the_methods_that_a_store_lacks(tmp_path: Path) -> None:
    lacks = missing_methods(FileStore(tmp_path / "keys.pickle"), Outbox)
    assert lacks.startswith("FileStore is no Outbox: it has no claim, conclude, deferred_to, job, jobs")
    assert missing_methods(FileStore(tmp_path / "keys.pickle"), Store) == ""


def test_toy_store_opens_with_oncekey_and_has_no_outbox(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "keys.pickle")
    once = OnceKey(store, scope=SINGLE_TENANT)
    assert once.store is store
    assert not isinstance(store, Outbox | Transactions)
    once.close()
