"""Redis Cluster under load: masters are killed, replicas are stalled, and every answer is compared afterwards.

The handler counts its runs by key. A violation is a key that ran twice, or a client that got another answer later.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy
from oncekey.core.record import Record, Reservation
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.errors import SchemaError, StoreUnavailable
from oncekey.stores.api import Store
from oncekey.stores.redis import RedisStore, watch
from oncekey.stores.redis.buckets import SLOTS, TAGS, Names, bucket_of, name_of
from oncekey.testing.conformance.base import one
from oncekey.testing.servers import HOST, RedisCluster, RedisServer, ServerUnavailable
from oncekey.testing.store_suite import StoreSuite
from tests.engine.doubles import reservation
from tests.stores import redis_rows
from tests.web.apps import Api, World

pytestmark = [pytest.mark.stores, pytest.mark.timeout(400)]
IMPATIENT = Policy(begin_timeout=timedelta(seconds=1.5))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    try:
        with RedisCluster() as made:
            store = RedisStore(made.url)
            store.init()
            store.close()
            yield made
    except ServerUnavailable as missing:
        pytest.skip(str(missing))


class TestRedisClusterStore(StoreSuite):
    """The public suite on a cluster: one layout for both."""

    @pytest.fixture(autouse=True)
    def _server(self, cluster: RedisCluster) -> None:
        for master in cluster.masters():
            master.flush()
        self.cluster = cluster

    def make_store(self) -> Store:
        store = RedisStore(self.cluster.url)
        store.init()
        store.disconnect()
        return store

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        slot = SLOTS[bucket_of(name_of(scope, key))]
        redis_rows.age(_url_of(self.cluster, slot), [(scope, key)], seconds)


def _url_of(cluster: RedisCluster, slot: int) -> str:
    """The server that has a slot."""
    for line in cluster.masters()[0].command("CLUSTER", "NODES").splitlines():
        _, address, flags, *_, ranges = line.split()
        if "master" in flags and "-" in ranges:
            first, last = map(int, ranges.split("-"))
            if first <= slot <= last:
                return f"redis://{address.partition('@')[0]}/0"
    raise AssertionError("no master has the slot")


class Load:
    """Clients that send new keys, each until it has an answer, while a test does its worst."""

    def __init__(self, url: str) -> None:
        self.runs: Counter[str] = Counter()
        self.answers: dict[str, bytes] = {}
        self.refused = self.changed = 0
        self.api = Api(World(url), "starlette", self._respond, policy=IMPATIENT)
        self._stop = False

    def _respond(self, request: Request, run: int) -> Response:
        self.runs[request.headers["idempotency-key"]] += 1
        return JSONResponse({"run": run}, 201)

    async def send(self, key: str) -> int:
        answer = await self.api.post(key)
        if answer.status_code == 201:
            self.changed += self.answers.setdefault(key, answer.content) != answer.content
        else:
            self.refused += 1
        return answer.status_code

    async def client(self, number: int) -> None:
        turn = 0
        while not self._stop:
            key = f"client-{number}-{turn}"
            while await self.send(key) != 201:
                await asyncio.sleep(0.02)
            turn += 1

    @asynccontextmanager
    async def running(self, clients: int = 8) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.client(number)) for number in range(clients)]
        yield
        self._stop = True
        await asyncio.wait_for(asyncio.gather(*tasks), 60)

    async def check(self) -> None:
        """Every answer is replayed, and every key ran once."""
        for key in list(self.answers):
            while await self.send(key) != 201:
                await asyncio.sleep(0.05)
        assert self.changed == 0, "a client got another answer than before"
        assert set(self.runs.values()) == {1}, {key: runs for key, runs in self.runs.items() if runs > 1}


async def kill_masters(cluster: RedisCluster, times: int) -> None:
    """Kill a master, wait for the failover, start it again as a replica; and the next."""
    for _ in range(times):
        await asyncio.sleep(0.5)
        masters = cluster.masters()
        victim = random.choice(masters)
        await asyncio.to_thread(victim.kill)
        for _ in range(400):
            if len(await asyncio.to_thread(cluster.masters)) == len(masters):
                break
            await asyncio.sleep(0.05)
        victim.start()  # in this thread: a server ends with the thread that started it
        await asyncio.to_thread(cluster.wait_until_whole)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.faults)])
async def test_killed_masters_cause_no_second_run_and_lose_no_answer(cluster: RedisCluster, kills: int) -> None:
    """With replicas=1 and replicas that are in step."""
    load = Load(f"{cluster.url}?replicas=1&replicas_timeout=0.5&timeout=2")
    async with load.running():
        await kill_masters(cluster, kills)
    await load.check()
    print(f"{kills} masters killed: {len(load.answers)} keys, {load.refused} refusals, 0 violations")
    await load.api.close()


def test_keys_of_a_slot_that_is_being_moved_are_unavailable(cluster: RedisCluster) -> None:
    """Half of a bucket is on each node meanwhile, and a key that is still on the other node would look new."""
    source, target = cluster.masters()[:2]
    (key,) = _keys_of(cluster, source, 1, "moving")
    bucket = bucket_of(name_of("single-tenant", key))
    slot, epoch = str(SLOTS[bucket]), Names("oncekey").epochs[bucket].decode()
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target.command("CLUSTER", "MYID"))
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.command("CLUSTER", "MYID"))
    store = RedisStore(cluster.url)
    value = source.command("GET", epoch)
    try:
        with pytest.raises(StoreUnavailable, match="is being moved"):
            store.reserve([reservation(key, scope="single-tenant")])
        source.command("MIGRATE", HOST, str(target.port), epoch, "0", "2000")
        with pytest.raises((StoreUnavailable, SchemaError)):
            store.reserve([reservation(key, scope="single-tenant")])
    finally:
        for server in (target, source):
            server.command("CLUSTER", "SETSLOT", slot, "STABLE")
        source.command("SET", epoch, value)
        target.command("CLUSTER", "SETSLOT", slot, "NODE", source.command("CLUSTER", "MYID"))
    assert one(store.reserve([reservation(key, scope="single-tenant")])[0].record).attempt == 1
    store.close()


def test_eviction_is_noticed_on_each_node(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that evicts is refused, and the keys of the other nodes are not."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.0)
    evicting, other = cluster.masters()[:2]
    (key,), (good,) = _keys_of(cluster, evicting, 1, "evicted"), _keys_of(cluster, other, 1, "kept")
    with closing(RedisStore(cluster.url)) as store:
        store.reserve([reservation(key, scope="single-tenant"), reservation(good, scope="single-tenant")])
        evicting.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(SchemaError, match="maxmemory-policy is allkeys-lru"):
                store.reserve([reservation(key, scope="single-tenant")])
            store.reserve([reservation(good, scope="single-tenant")])
        finally:
            evicting.command("CONFIG", "SET", "maxmemory-policy", "noeviction")


@pytest.mark.parametrize("replicas", [0, 1])
def test_cluster_that_writes_to_disk_is_durable_only_with_replicas(
    cluster: RedisCluster, caplog: pytest.LogCaptureFixture, replicas: int
) -> None:
    masters = cluster.masters()
    for server in masters:
        server.command("CONFIG", "SET", "appendonly", "yes")
        server.command("CONFIG", "SET", "appendfsync", "always")
    try:
        with closing(RedisStore(f"{cluster.url}?replicas={replicas}")) as store:
            store.check()
            assert store.capabilities.durable is bool(replicas)
    finally:
        for server in masters:
            server.command("CONFIG", "SET", "appendonly", "no")
    assert ("with Sentinel or Cluster also ?replicas=1" in caplog.text) is not bool(replicas)


# ---------------------------------------------------------------- a stalled replica


def _keys_of(cluster: RedisCluster, server: RedisServer, count: int, prefix: str) -> list[str]:
    """Keys that live on this master."""
    found = []
    for number in range(10_000):
        key = f"{prefix}-{number}"
        if _url_of(cluster, SLOTS[bucket_of(name_of("single-tenant", key))]) == server.url:
            found.append(key)
            if len(found) == count:
                return found
    raise AssertionError("the master has no keys")


async def _fail_over_to(cluster: RedisCluster, victim: RedisServer, replica: RedisServer) -> None:
    """Kill a master while its replica is paused, and let the replica go on."""
    victim.kill()
    replica.resume()
    for _ in range(400):
        if replica in await asyncio.to_thread(cluster.masters):
            break
        await asyncio.sleep(0.05)
    victim.start()
    await asyncio.to_thread(cluster.wait_until_whole)


@pytest.mark.parametrize("replicas", [1, 0])
async def test_writes_that_no_replica_confirmed_are_503_and_no_handler_ran(
    cluster: RedisCluster, replicas: int
) -> None:
    """With replicas=1 nothing that was answered is lost. Without it, the keys of the stall are lost and run again."""
    victim = cluster.masters()[0]
    replica = cluster.replica_of(victim)
    assert replica is not None
    load = Load(f"{cluster.url}?replicas={replicas}&replicas_timeout=0.3&timeout=2")
    before = _keys_of(cluster, victim, 20, f"before-{replicas}")
    during = _keys_of(cluster, victim, 20, f"during-{replicas}")
    assert [await load.send(key) for key in before] == [201] * 20
    replica.pause()
    # What the kernel has taken still arrives after a kill, so its buffers are filled first.
    victim.command("SET", f"{{{TAGS[bucket_of(name_of('single-tenant', before[0]))]}}}filler", "x" * 32_000_000)
    answers = [await load.send(key) for key in during]
    ran = sum(load.runs[key] for key in during)
    await _fail_over_to(cluster, victim, replica)
    for key in (*before, *during):
        while await load.send(key) != 201:
            await asyncio.sleep(0.05)
    assert [load.runs[key] for key in before] == [1] * 20
    again = sum(load.runs[key] == 2 for key in during)
    print(f"replicas={replicas}: {answers.count(201)} of 20 answered during the stall, {again} ran a second time")
    if replicas:
        assert (set(answers), ran, again, load.changed) == ({503}, 0, 0, 0)
    else:
        assert (set(answers), ran) == ({201}, 20)
        assert again == load.changed > 0, "without WAIT the stalled replica takes over without them"
    await load.api.close()


@pytest.fixture
def stalled(cluster: RedisCluster) -> Iterator[tuple[RedisStore, str, Callable[[], None]]]:
    """A store, a key whose replica is stalled when the function is called, and that function."""
    victim = cluster.masters()[0]
    replica = cluster.replica_of(victim)
    assert replica is not None
    store = RedisStore(f"{cluster.url}?replicas=1&replicas_timeout=0.2&timeout=2")
    (key,) = _keys_of(cluster, victim, 1, f"stalled-{random.random()}")
    yield store, key, replica.pause
    replica.resume()
    store.close()
    cluster.wait_until_whole()


def _reserved(store: RedisStore, wanted: Reservation) -> Record:
    """A replica that an earlier test stalled may need a moment to catch up. Each try waits for it in the store."""
    until = time.monotonic() + 20
    while True:
        try:
            return one(store.reserve([wanted])[0].record)
        except StoreUnavailable:
            assert time.monotonic() < until


@pytest.mark.parametrize("event", [Event.COMPLETE, Event.ADVANCE, Event.TAKE_OVER])
def test_move_counts_only_after_a_replica_has_it(
    stalled: tuple[RedisStore, str, Callable[[], None]], event: Event
) -> None:
    """The end, an intent and a take-over raise while the replica is stalled, also if they are asked for again, and a
    read does not show what no replica has. A renewal and a discard do not wait."""
    store, key, stall = stalled
    wanted = reservation(key, scope="single-tenant", lease=0.0 if event is Event.TAKE_OVER else 60.0)
    record = _reserved(store, wanted)
    stall()
    if event is Event.TAKE_OVER:
        new = reservation(key, scope="single-tenant")
        change = swap(record, event, Actor.REQUEST, reservation=new)
    else:
        change = swap(record, event, Actor.OWNER, recovery_point="started" if event is Event.ADVANCE else None)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas confirmed"):
            store.swap([change])
    with pytest.raises(StoreUnavailable, match="0 of 1 replicas confirmed"):
        store.read([("single-tenant", key)])
    with pytest.raises(StoreUnavailable, match="0 of 1 replicas confirmed"):
        store.reserve([reservation(key, scope="single-tenant")])
    assert len(store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=5.0)])) == 1
