"""MySQL (MariaDB here) against the public suite and against the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from oncekey.stores.api import Store
from oncekey.stores.mysql import MysqlStore
from oncekey.testing.store_suite import StoreSuite
from tests.stores import test_stores_agree
from tests.stores.mysql import empty, older


class TestMysqlStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _database(self, request: pytest.FixtureRequest) -> None:
        self.url = request.getfixturevalue("mysql_url" if "migrating" in request.node.name else "ready_mysql")

    def make_store(self) -> MysqlStore:
        return MysqlStore(self.url)

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        older(self.url, seconds, scope, key)


class MysqlAgrees(test_stores_agree.StoresAgree):
    exact = False
    url: str

    def make_store(self, clock: Callable[[], float]) -> Store:
        empty(self.url)
        return MysqlStore(self.url)

    def tick(self, seconds: float) -> None:
        older(self.url, seconds)


@pytest.mark.stores
@pytest.mark.timeout(240)
def test_store_agrees_with_the_model(ready_mysql: str) -> None:
    """Random moves against MySQL and the dictionary: every answer and every row is the same."""
    from hypothesis.stateful import run_state_machine_as_test

    MysqlAgrees.url = ready_mysql
    run_state_machine_as_test(
        MysqlAgrees,
        settings=settings(
            max_examples=8,
            stateful_step_count=20,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
