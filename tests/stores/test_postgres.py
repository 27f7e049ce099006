"""PostgreSQL against the public suite and against the model, and what a batch of rows keeps apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.stores.api import Store
from oncekey.stores.postgres import PostgresStore
from oncekey.testing.store_suite import StoreSuite
from tests import databases
from tests.engine.doubles import reservation
from tests.stores import test_stores_agree
from tests.stores.postgres import complete, older, put


class TestPostgresStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _database(self, request: pytest.FixtureRequest) -> None:
        """Our tables are there, but for the tests that make them."""
        self.url = request.getfixturevalue("url" if "migrating" in request.node.name else "ready_url")

    def make_store(self) -> PostgresStore:
        return PostgresStore(self.url)

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        older(self.url, seconds, scope, key)


class PostgresAgrees(test_stores_agree.StoresAgree):
    exact = False
    url: str

    def make_store(self, clock: Callable[[], float]) -> Store:
        databases.empty(self.url)
        return PostgresStore(self.url)

    def tick(self, seconds: float) -> None:
        older(self.url, seconds)


@pytest.mark.timeout(240)  # many small transactions on a real server: slow on a busy machine
def test_store_agrees_with_the_model(ready_url: str) -> None:
    """Random moves against PostgreSQL and the dictionary: every answer and every row is the same."""
    from hypothesis.stateful import run_state_machine_as_test

    PostgresAgrees.url = ready_url
    run_state_machine_as_test(
        PostgresAgrees,
        settings=settings(
            max_examples=8,
            stateful_step_count=20,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_tombstone_and_a_body_share_a_batch(store: PostgresStore) -> None:
    """Rows with and without a response, a body, an error: each column of the batch keeps its own."""
    records = put(store, "body", "tombstone", "released")
    changes = [
        complete(records[0]),
        swap(records[1], Event.COMPLETE, Actor.OWNER, response=StoredResponse(204, (), None)),
        swap(records[2], Event.RELEASE, Actor.OWNER, last_error="not executed"),
    ]
    moved = store.swap(changes)
    seen = store.read([(record.scope, record.key) for record in records])
    assert [one and one.response for one in moved] == [one and one.response for one in seen]
    assert [one and one.response and one.response.status for one in seen] == [201, 204, None]
    assert [one and one.last_error for one in seen] == [None, None, "not executed"]


def test_a_move_made_from_an_older_look_shows_the_row_as_it_is(store: PostgresStore) -> None:
    """The owner advanced meanwhile: what swap returns has the new recovery point, not the one that the mover saw."""
    record = store.reserve([reservation("resumed")])[0].record
    assert record is not None
    assert store.swap([swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="charge_created")]) != [None]
    (moved,) = store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=30.0)])
    assert moved is not None
    assert moved.recovery_point == "charge_created"
