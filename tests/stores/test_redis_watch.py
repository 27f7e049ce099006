"""A Redis whose settings change under a running app: about once a second a batch asks the server for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest
import redis

from oncekey.core.diagnosis import Level
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import SchemaError, StoreUnavailable
from oncekey.stores.redis import RedisStore, urls, watch
from oncekey.stores.redis.in_loop import InLoop
from oncekey.stores.redis.nodes import Nodes
from oncekey.stores.redis.servers import Server
from oncekey.testing.conformance.base import RESPONSE, one
from oncekey.testing.servers import RedisServer
from tests.engine.doubles import reservation
from tests.web.apps import Api, World, until

pytestmark = pytest.mark.stores

Made = tuple[RedisStore, InLoop]


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """Its settings and its count are afterwards as they were."""
    with redis.Redis.from_url(redis_url) as made:
        yield made
        made.config_set("maxmemory", "0")
        made.config_set("maxmemory-policy", "noeviction")
        made.config_resetstat()


@pytest.fixture
def every_batch_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.0)


@pytest.fixture
async def made(ready_redis_url: str, client: redis.Redis, every_batch_looks: None) -> AsyncIterator[Made]:
    """A store with open connections, in this thread and in this loop."""
    store = RedisStore(ready_redis_url)
    in_loop = store.in_loop()
    assert in_loop is not None
    store.reserve([reservation("warm")])
    await in_loop.reserve([reservation("warm too")])
    yield store, in_loop
    in_loop.abandon()
    store.close()


def _evict_some(client: redis.Redis) -> None:
    """Let it evict keys of another program, and then set noeviction again."""
    for number in range(200):
        client.set(f"junk:{number}", b"x" * 10_000, ex=1000)
    client.config_set("maxmemory-policy", "volatile-ttl")
    client.config_set("maxmemory", str(int(client.info("memory")["used_memory"]) - 500_000))
    client.config_set("maxmemory", "0")
    client.config_set("maxmemory-policy", "noeviction")
    assert client.info("stats")["evicted_keys"] > 0


# ---------------------------------------------------------------- the policy


async def test_eviction_switched_on_under_open_connections_is_refused(made: Made, client: redis.Redis) -> None:
    store, _ = made
    client.config_set("maxmemory-policy", "allkeys-lru")
    for key in ("first", "second"):
        with pytest.raises(SchemaError, match=r"maxmemory-policy is allkeys-lru.*until then oncekey takes no requests"):
            store.reserve([reservation(key)])
    with pytest.raises(SchemaError):
        store.read([("tenant-1", "warm")])
    client.config_set("maxmemory-policy", "noeviction")
    assert one(store.reserve([reservation("after")])[0].record).state is State.IN_PROGRESS


async def test_event_loop_notices_eviction_and_stays_refused(made: Made, client: redis.Redis) -> None:
    """The first error is the loop's; after that it opens no connection to such a server."""
    _, in_loop = made
    client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreUnavailable, match="evicts keys"):
        await in_loop.reserve([reservation("first")])
    with pytest.raises(SchemaError, match="maxmemory-policy is allkeys-lru"):
        await in_loop.reserve([reservation("second")])
    client.config_set("maxmemory-policy", "noeviction")
    assert isinstance((await in_loop.reserve([reservation("after")]))[0], float)


@pytest.mark.parametrize("finder", ["thread", "loop"])
async def test_what_one_connection_noticed_holds_for_all(
    made: Made, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, finder: str
) -> None:
    store, in_loop = made
    client.config_set("maxmemory-policy", "allkeys-lru")
    if finder == "thread":
        with pytest.raises(SchemaError):
            store.reserve([reservation("first")])
    else:
        with pytest.raises(StoreUnavailable):
            await in_loop.reserve([reservation("first")])
    monkeypatch.setattr(watch, "LOOK_SECONDS", 1000.0)
    with pytest.raises(SchemaError):
        store.reserve([reservation("second")])
    with pytest.raises(SchemaError):
        await in_loop.reserve([reservation("third")])


async def test_end_of_a_request_counts_in_the_batch_that_notices_eviction(made: Made, client: redis.Redis) -> None:
    store, in_loop = made
    row = one(store.reserve([reservation("k")])[0].record)
    client.config_set("maxmemory-policy", "allkeys-lru")
    ended = await in_loop.swap([swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])
    assert ended != [None]
    with pytest.raises(SchemaError):
        await in_loop.reserve([reservation("next")])


def test_servers_are_asked_once_a_second_and_not_with_each_batch(ready_redis_url: str, client: redis.Redis) -> None:
    with closing(RedisStore(ready_redis_url)) as store:
        store.reserve([reservation("warm")])
        client.config_resetstat()
        for number in range(50):
            store.reserve([reservation(f"k-{number}")])
            store.calls.watch._next = {address: at - 0.1 for address, at in store.calls.watch._next.items()}
        asked = client.info("commandstats")["cmdstat_info"]["calls"]
    assert 4 <= asked < 25, "50 batches in 5 seconds, as the watch counts them"


# ---------------------------------------------------------------- keys that were evicted


async def test_keys_evicted_while_nobody_looked_are_noticed_by_their_count(made: Made, client: redis.Redis) -> None:
    store, in_loop = made
    _evict_some(client)
    with pytest.raises(StoreUnavailable, match="has evicted some"):
        await in_loop.reserve([reservation("first")])
    client.config_resetstat()
    for _ in range(2):
        with pytest.raises(SchemaError, match=r"has evicted \d+ keys while this process ran.*--accept-loss.*restart"):
            store.reserve([reservation("k")])
        with pytest.raises(SchemaError, match="has evicted"):
            await in_loop.reserve([reservation("k")])
    with pytest.raises(SchemaError, match="has evicted"):
        store.check()


async def test_keys_evicted_before_the_process_began_are_named_by_doctor_only(
    made: Made, client: redis.Redis, ready_redis_url: str
) -> None:
    """They may be of the time before oncekey used this Redis."""
    _evict_some(client)
    with closing(RedisStore(ready_redis_url)) as later:
        later.reserve([reservation("k")])
        found = later.diagnose()[0]
    assert (found.check, found.level) == ("eviction", Level.WARN)
    assert "keys were evicted since the server was started" in found.found


async def test_reset_count_is_no_eviction(made: Made, client: redis.Redis, ready_redis_url: str) -> None:
    _evict_some(client)
    with closing(RedisStore(ready_redis_url)) as store:
        store.reserve([reservation("k")])
        client.config_resetstat()
        store.reserve([reservation("k-2")])
        _evict_some(client)
        with pytest.raises(SchemaError, match="has evicted"):
            store.reserve([reservation("k-3")])


async def test_doctor_names_an_evicting_policy_once(made: Made, client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    found = [each.found for each in made[0].diagnose() if "maxmemory-policy" in each.found]
    assert len(found) == 1


# ---------------------------------------------------------------- persistence


@pytest.mark.usefixtures("every_batch_looks")
def test_persistence_switched_off_under_a_running_app_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer(durable=True) as server, closing(RedisStore(server.url)) as store:
        store.init()
        store.reserve([reservation("k")])
        assert store.capabilities.durable
        assert "may lose" not in caplog.text
        server.command("CONFIG", "SET", "appendonly", "no")
        for number in range(3):
            store.reserve([reservation(f"k-{number}")])
        assert caplog.text.count("may lose what it has confirmed") == 1
        assert not store.capabilities.durable


@pytest.mark.parametrize(
    ("url", "durable"),
    [
        ("redis://host:1/0", True),
        ("redis+cluster://host:1", False),
        ("redis+cluster://host:1?replicas=1", True),
        ("redis+sentinel://host:1/main", False),
        ("redis+sentinel://host:1/main?replicas=1", True),
    ],
)
def test_server_that_can_fail_over_is_durable_only_if_a_replica_confirms(url: str, durable: bool) -> None:
    """All servers write to disk before they answer: a replica that takes over has only what it has got."""
    seen = watch.ServerWatch(urls.read(url))
    assert not seen.durable, "nothing is known yet"
    info = {"aof_enabled": "1", "maxmemory_policy": "noeviction"}
    for port, appendfsync, expected in ((1, "always", durable), (2, "everysec", False), (2, "always", durable)):
        assert seen.refuses(Server(("host", port), info, appendfsync, None, None)) is None
        assert seen.durable is expected


# ---------------------------------------------------------------- an app


def test_address_of_one_server_is_always_known() -> None:
    """The log spoke of servers that must be asked which of them has the key, with one server in the URL."""
    nodes = Nodes(urls.read("redis://host:7/0"))
    nodes.forget()
    assert nodes.known(3) == ("host", 7)


@pytest.mark.usefixtures("every_batch_looks")
async def test_app_answers_503_while_redis_evicts_and_goes_on_after_it(
    ready_redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of the batch that noticed it is given back: its retry runs."""
    monkeypatch.setattr("oncekey.engine.batching.thread_lane._RETRY_SECONDS", 0.05)
    api = Api(World(ready_redis_url), "starlette")
    try:
        assert (await api.post("before")).status_code == 201
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert (await api.post("k-1")).status_code == 503
        assert (await api.post("before")).status_code == 503, "a replay, too: the next one may be gone"
        assert api.runs == 1
        client.config_set("maxmemory-policy", "noeviction")
        await until(lambda: api.world.record("k-1") is None, "the key is given back")
        api.once.engine.breaker.succeeded()
        assert (await api.post("k-1")).status_code == 201
        assert (await api.post("before")).json() == {"id": "pay_1"}
    finally:
        await api.close()
