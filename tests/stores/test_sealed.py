"""The public suites of stores over encrypted stores: nothing about a store changes, but what its rows show."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from oncekey.core.audit import Audit
from oncekey.core.jobs import NewJob
from oncekey.encryption.store import SealedStore, sealed
from oncekey.stores.api import (
    Epochs,
    EventLoops,
    Outbox,
    Sealing,
    SharedCommit,
    SharedTurn,
    Store,
    Tallies,
    Transactions,
)
from oncekey.stores.cache.client import Identified
from oncekey.stores.dynamodb import DynamoStore
from oncekey.stores.dynamodb.settings import settings_of
from oncekey.stores.memory import MemoryStore
from oncekey.stores.mysql import MysqlStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.redis import RedisStore
from oncekey.stores.redis.epochs import EPOCH_NAME
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.conformance.audits import AuditSuite
from oncekey.testing.conformance.job_upkeep import JobUpkeepSuite
from oncekey.testing.conformance.jobs import JobSuite
from oncekey.testing.conformance.rows import RowSuite
from oncekey.testing.conformance.steps import StepSuite
from oncekey.testing.servers import DynaliteServer
from oncekey.testing.store_suite import StoreSuite
from tests.encryption.rings import ring
from tests.stores import (
    test_dynamodb,
    test_mysql,
    test_mysql_outbox,
    test_outbox,
    test_postgres,
    test_redis,
    test_sqlite,
)

PROTOCOLS = (Outbox, SharedTurn, Transactions, SharedCommit, EventLoops, Tallies, Epochs, Identified)


class Sealed:
    """Encrypts the store of the suite that follows it among the bases."""

    def make_store(self) -> Any:
        return sealed(super().make_store(), ring(2, 1))  # type: ignore[misc]

    def add_job(self, store: Outbox, job: NewJob) -> None:
        super().add_job(store, cast("SealedStore", store).sealed_job(job))  # type: ignore[misc]


@pytest.mark.parametrize(
    "inner",
    [
        MemoryStore(),
        SqliteStore("never-opened.db"),
        PostgresStore("postgresql://nowhere/none"),
        MysqlStore("mysql://root@nowhere/none"),
        RedisStore("redis://nowhere"),
        DynamoStore(settings_of("dynamodb://table?region=eu-central-1")),
    ],
    ids=lambda store: type(store).__name__,
)
def test_sealed_store_has_the_protocols_of_its_inner_store(inner: Store) -> None:
    outer = sealed(inner, ring(1))
    assert [isinstance(outer, each) for each in PROTOCOLS] == [isinstance(inner, each) for each in PROTOCOLS]
    assert isinstance(outer, Sealing)
    assert not isinstance(inner, Sealing)
    assert outer.capabilities == inner.capabilities
    public = {name for name in dir(outer) if not name.startswith("_")}
    own = {"inner", "keyring", "values", "sealed_swap", "sealed_step", "sealed_job"}
    assert public - own <= {name for name in dir(inner) if not name.startswith("_")}


class TestSealedMemory(Sealed, StoreSuite):
    @pytest.fixture(autouse=True)
    def _inner(self, _own_clock: None) -> None:
        self.inner = MemoryStore(self.clock)

    def make_store(self) -> Store:
        return sealed(self.inner, ring(2, 1))


# in short, for every test run: the parts of the suites that are about contents


class TestSealedSqliteInShort(Sealed, RowSuite, StepSuite, AuditSuite, JobSuite, JobUpkeepSuite):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "keys.db"

    def make_store(self) -> Store:
        return sealed(SqliteStore(self.path, clock=self.clock), ring(2, 1))

    def add_job(self, store: Outbox, job: NewJob) -> None:
        test_outbox.TestSqliteOutbox.add_job(cast("Any", self), store, cast("SealedStore", store).sealed_job(job))


class TestSealedPostgresInShort(Sealed, RowSuite, StepSuite, AuditSuite):
    @pytest.fixture(autouse=True)
    def _database(self, ready_url: str) -> None:
        self.url = ready_url

    def make_store(self) -> Store:
        return sealed(PostgresStore(self.url), ring(2, 1))

    age = test_postgres.TestPostgresStore.age


# in full


@pytest.mark.stores
class TestSealedSqlite(Sealed, test_sqlite.TestSqliteStore):
    pass


@pytest.mark.stores
class TestSealedSqliteOutbox(Sealed, test_outbox.TestSqliteOutbox):
    pass


@pytest.mark.stores
class TestSealedPostgres(Sealed, test_postgres.TestPostgresStore):
    pass


@pytest.mark.stores
class TestSealedPostgresOutbox(Sealed, test_outbox.TestPostgresOutbox):
    pass


@pytest.mark.stores
class TestSealedMysql(Sealed, test_mysql.TestMysqlStore):
    pass


@pytest.mark.stores
class TestSealedMysqlOutbox(Sealed, test_mysql_outbox.TestMysqlOutbox):
    pass


@pytest.mark.stores
class TestSealedRedis(Sealed, test_redis.TestRedisStore):
    def test_reason_for_an_accepted_loss_is_sealed(self) -> None:
        store = self.make_store()
        self.client.flushall()
        store.accept_loss(Audit("ann", "secret reason"))
        (line,) = store.audit(*EPOCH_NAME, 10)
        assert (line.who, line.why) == ("ann", "16 of 16 buckets: secret reason")
        (raw,) = store.inner.audit(*EPOCH_NAME, 10)
        assert "secret" not in raw.why
        store.close()


@pytest.mark.stores
class TestSealedDynamo(Sealed, test_dynamodb._OnAServer):
    @pytest.fixture(autouse=True)
    def _database(self, dynalite_server: DynaliteServer) -> None:
        self.url = dynalite_server.new_url()
