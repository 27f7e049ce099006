"""DynamoDB against the public suite and against the model, on two servers: dynalite and moto.

``ONCEKEY_DYNAMODB_URL=dynamodb://prefix?region=…`` runs the suite against a real account too, in tables whose names
begin with the prefix, and deletes them. It signs with the credentials that pytest was started with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from hypothesis.strategies import booleans, sampled_from

from oncekey.errors import SchemaError
from oncekey.stores.api import Duty, Store
from oncekey.stores.dynamodb import DynamoStore
from oncekey.stores.dynamodb.settings import settings_of
from oncekey.testing.conformance.audits import AuditSuite
from oncekey.testing.conformance.finds import FindSuite
from oncekey.testing.conformance.rows import RowSuite
from oncekey.testing.servers import DynaliteServer, DynamoServer, MotoServer
from oncekey.testing.store_suite import StoreSuite
from tests.stores.dynamo_rows import opened
from tests.stores.test_stores_agree import StoresAgree

REAL = os.environ.get("ONCEKEY_DYNAMODB_URL", "")


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


if REAL:

    @pytest.mark.stores
    @pytest.mark.timeout(600)  # Amazon takes half a minute to make a table
    class TestDynamoStoreOnAmazon(_OnAServer):
        _numbers_of_tables = count(1)

        @pytest.fixture(autouse=True)
        def _database(self, given_credentials: None) -> Iterator[None]:
            table = settings_of(REAL).table
            self.url = REAL.replace(f"//{table}", f"//{table}-{os.getpid()}-{next(self._numbers_of_tables)}", 1)
            yield
            with opened(self.url) as store, suppress(SchemaError):  # a test that calls no verb makes no table
                store._client.verb()("delete_table")


class DynamoAgrees(StoresAgree):
    """All times are exact: the store takes the clock of the model. Only the order of rows that are due at the same
    moment is not defined, because they are read from several buckets."""

    server: DynamoServer

    def make_store(self, clock: Callable[[], float]) -> Store:
        # Without a margin: the model has none, and a lease is over at the very moment.
        return DynamoStore(replace(settings_of(self.server.new_url()), timeout=60.0, margin=0.0), clock=clock)

    @rule(expired_state_only=booleans())
    def purge(self, expired_state_only: bool) -> None:
        mine, right = (store.purge(100, expired_state_only=expired_state_only) for store in (self.store, self.model))
        assert mine == right

    @rule(duty=sampled_from(list(Duty)))
    def due(self, duty: Duty) -> None:
        for pair in zip(self.store.due(duty, 100), self.model.due(duty, 100), strict=True):
            self._same(*pair)


@pytest.mark.timeout(400)  # many small round trips to a real server: slow on a busy machine
@pytest.mark.parametrize(
    ("server", "examples"),
    [
        ("dynalite_server", 4),
        pytest.param("dynalite_server", 25, marks=pytest.mark.stores),
        pytest.param("moto_server", 4, marks=pytest.mark.stores),
    ],
)
def test_dynamodb_agrees_with_the_model(request: pytest.FixtureRequest, server: str, examples: int) -> None:
    """Random moves: every answer and every row is as in memory."""
    DynamoAgrees.server = request.getfixturevalue(server)
    run_state_machine_as_test(
        DynamoAgrees,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
