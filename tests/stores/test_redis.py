"""Redis passes the public store suite, and agrees with the dictionary under random moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from oncekey.stores.api import Store
from oncekey.stores.redis import RedisStore
from oncekey.testing.servers import RedisServer
from oncekey.testing.store_suite import StoreSuite
from tests.stores.redis_rows import age
from tests.stores.test_stores_agree import KEYS, StoresAgree


class TestRedisStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _server(self, redis_url: str) -> Iterator[None]:
        with redis.Redis.from_url(redis_url) as self.client:
            self.url = redis_url
            yield

    def make_store(self) -> Store:
        store = RedisStore(self.url)
        store.init()
        store.disconnect()  # a test that is skipped does not close it
        return store

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        age(self.client, [(scope, key)], seconds)


@pytest.fixture(scope="module")
def durable_server() -> Iterator[RedisServer]:
    with RedisServer(durable=True) as server:
        yield server


@pytest.mark.stores
class TestDurableRedisStore(TestRedisStore):
    """With appendfsync always: the tests of what survives a kill are not skipped."""

    @pytest.fixture(autouse=True)
    def _server(self, durable_server: RedisServer) -> Iterator[None]:
        durable_server.flush()
        with redis.Redis.from_url(durable_server.url) as self.client:
            self.url = durable_server.url
            yield

    def test_store_says_that_it_is_durable(self) -> None:
        assert self.make_store().capabilities.durable


class RedisAgrees(StoresAgree):
    exact = False
    url: str

    def make_store(self, clock: Callable[[], float]) -> Store:
        del clock
        self.client = redis.Redis.from_url(self.url)
        self.client.flushall()
        store = RedisStore(self.url)
        store.init()
        return store

    def tick(self, seconds: float) -> None:
        age(self.client, KEYS, seconds)

    def teardown(self) -> None:
        super().teardown()
        self.client.close()


@pytest.mark.timeout(240)  # many small round trips to a real server: slow on a busy machine
def test_redis_agrees_with_the_model(redis_server: RedisServer) -> None:
    """Random moves: every answer and every row is as in memory."""
    RedisAgrees.url = redis_server.url
    run_state_machine_as_test(
        RedisAgrees,
        settings=settings(
            max_examples=15,
            stateful_step_count=20,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # to make a failure short takes minutes
        ),
    )
