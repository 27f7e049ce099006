"""DynamoDB against the public suite, on two servers: dynalite and moto."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.stores.dynamodb import DynamoStore
from oncekey.stores.dynamodb.settings import settings_of
from oncekey.testing.conformance.audits import AuditSuite
from oncekey.testing.conformance.finds import FindSuite
from oncekey.testing.conformance.rows import RowSuite
from oncekey.testing.servers import DynaliteServer, MotoServer
from oncekey.testing.store_suite import StoreSuite


class _OnAServer(StoreSuite):
    url: str

    def make_store(self) -> DynamoStore:
        # Batches of 500 keys on a crowded machine take longer than a request may.
        return DynamoStore(replace(settings_of(self.url), timeout=60.0), clock=self.clock)


class TestDynamoStoreInShort(RowSuite, FindSuite, AuditSuite):
    """A part of the suite, for ``make test``."""

    make_store = _OnAServer.make_store

    @pytest.fixture(autouse=True)
    def _database(self, dynalite_server: DynaliteServer) -> None:
        self.url = dynalite_server.new_url()


@pytest.mark.stores
class TestDynamoStore(_OnAServer):
    @pytest.fixture(autouse=True)
    def _database(self, dynalite_server: DynaliteServer) -> None:
        self.url = dynalite_server.new_url()


@pytest.mark.stores
@pytest.mark.timeout(300)  # moto takes 20 ms and more for a write, one at a time
class TestDynamoStoreOnMoto(_OnAServer):
    @pytest.fixture(autouse=True)
    def _database(self, moto_server: MotoServer) -> None:
        self.url = moto_server.new_url()
