"""A batch in one script: every row with its own values and response, every bucket with its epoch, in one round trip."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis
from hiredis import pack_command
from hypothesis import given
from hypothesis import strategies as some

from oncekey.core.audit import Audit
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import Swap, swap
from oncekey.errors import SchemaError, StoreError, StoreUnavailable
from oncekey.stores.redis import RedisStore
from oncekey.stores.redis.buckets import Names, bucket_of, name_of
from oncekey.stores.redis.in_loop import InLoop
from oncekey.stores.redis.protocol import pack
from oncekey.testing.conformance.base import RESPONSE, one
from oncekey.testing.servers import RedisServer, ServerUnavailable
from tests.engine.doubles import reservation

NAMES = Names("oncekey")


@pytest.fixture
def client(ready_redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(ready_redis_url) as made:
        yield made


@pytest.fixture
def store(ready_redis_url: str) -> Iterator[RedisStore]:
    with closing(RedisStore(ready_redis_url)) as made:
        made.check()
        yield made


@pytest.fixture
async def in_loop(store: RedisStore) -> AsyncIterator[InLoop]:
    made = store.in_loop()
    assert made is not None
    yield made
    made.abandon()


def _keys(count: int) -> list[str]:
    return [f"k-{number}" for number in range(count)]


def _of_two_routes(count: int) -> list[Reservation]:
    """Two routes, which differ in every value that a call says once."""
    wanted = [replace(reservation(key), fingerprint=key.encode() * 4) for key in _keys(count)]
    other: dict[str, Any] = {
        "operation": 'PUT /orders "ü"',
        "fingerprint_version": 2,
        "effects": Effects.EXTERNAL,
        "lease_seconds": 7.25,
        "retention_seconds": 60.5,
        "fingerprint_recipe": "body",
        "quarantine_seconds": 12.5,
    }
    return [replace(each, **other) if number % 3 == 0 else each for number, each in enumerate(wanted)]


def _ends(rows: list[Record]) -> list[Swap]:
    """A third each with a body, without one, and failed with an error."""
    responses = [replace(RESPONSE, body=row.key.encode()) for row in rows]
    ends = []
    for number, (row, response) in enumerate(zip(rows, responses, strict=True)):
        if number % 3 == 0:
            ends.append(swap(row, Event.COMPLETE, Actor.OWNER, response=response))
        elif number % 3 == 1:
            ends.append(swap(row, Event.COMPLETE, Actor.OWNER, response=StoredResponse(204, (), None)))
        else:
            ends.append(swap(row, Event.FAIL, Actor.OWNER, response=response, last_error='it said "no"\n/ü'))
    return ends


def _same(row: Record | float | None, other: Record) -> None:
    assert isinstance(row, Record)
    assert replace(row, now=0.0) == replace(other, now=0.0)


async def test_rows_of_one_batch_keep_their_own_values_and_responses(store: RedisStore, in_loop: InLoop) -> None:
    wanted = _of_two_routes(30)
    times = await in_loop.reserve(wanted)
    assert len({time for time in times if isinstance(time, float)}) == 2, "one call for each route"
    rows = [one(found.record) for found in store.reserve(wanted)]
    for each, row, time in zip(wanted, rows, times, strict=True):
        assert isinstance(time, float)
        _same(row, each.record(time))
    ends = _ends(rows[:20])
    ended = await in_loop.swap(ends[:10])
    ended += [one(row).now for row in store.swap(ends[10:])]
    new = reservation("new")
    found = await in_loop.reserve([*wanted[:25], new])
    for end, there, moved in zip(ends, found, ended, strict=False):
        assert moved is not None
        _same(there, end.moved(one(end.seen), moved))
    for there, before in zip(found[20:25], rows[20:25], strict=True):
        _same(there, before)
    assert isinstance(found[25], float)
    _same(one(store.read([("tenant-1", "new")])[0]), new.record(found[25]))


def test_batch_costs_one_script_and_no_more_commands_than_its_buckets(store: RedisStore, client: redis.Redis) -> None:
    client.config_resetstat()
    wanted = [reservation(key) for key in _keys(64)]
    rows = [one(found.record) for found in store.reserve(wanted)]
    store.swap([swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for row in rows])
    calls = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in client.info("commandstats").items()}
    assert calls["evalsha"] <= 4, "two scripts, each sent again as text at most"
    assert (calls["hmget"], calls["hget"], calls["hset"]) == (64, 64, 128)
    assert calls["zadd"] <= 3 * 16
    assert calls["zrem"] <= 16


@pytest.mark.parametrize("verb", ["reserve", "end", "move", "read"])
def test_batch_that_touches_one_bucket_without_its_epoch_does_nothing(
    store: RedisStore, client: redis.Redis, verb: str
) -> None:
    wanted = [reservation(key) for key in _keys(40)]
    rows = [one(found.record) for found in store.reserve(wanted)]
    client.delete(NAMES.epochs[bucket_of(name_of("tenant-1", "k-17"))])
    before = {name: client.dump(name) for name in client.keys("*")}
    verbs = {
        "reserve": lambda: store.reserve([reservation(f"new-{number}") for number in range(40)]),
        "end": lambda: store.swap([swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for row in rows]),
        "move": lambda: store.swap([swap(row, Event.RELEASE, Actor.OWNER) for row in rows]),
        "read": lambda: store.read([(row.scope, row.key) for row in rows]),
    }
    with pytest.raises(SchemaError, match="has lost keys"):
        verbs[verb]()
    assert {name: client.dump(name) for name in client.keys("*")} == before


def test_end_clears_the_error_of_an_attempt_that_is_under_way(store: RedisStore) -> None:
    row = one(store.reserve([reservation("k")])[0].record)
    noted = one(store.swap([swap(row, Event.RENEW, Actor.OWNER, lease_seconds=9.0, last_error='a,null,"b"')])[0])
    assert noted.last_error == 'a,null,"b"'
    end = swap(noted, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
    moved = one(store.swap([end])[0])
    _same(store.read([("tenant-1", "k")])[0], end.moved(noted, moved.now))


@pytest.mark.parametrize("owner", ['"', "a/b", "ü\n\\", "in_progress", 'x","y'])
def test_owners_of_any_text_are_compared_whole(store: RedisStore, owner: str) -> None:
    row = one(store.reserve([reservation("k", owner=owner)])[0].record)
    end = swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
    assert store.swap([replace(end, owner=owner[:-1])]) == [None]
    assert store.swap([replace(end, owner=owner + "x")]) == [None]
    assert one(store.swap([end])[0]).state is State.COMPLETED
    assert store.swap([end]) == [None], "ended already"


def test_damaged_row_is_an_error_and_harms_no_row_beside_it(store: RedisStore, client: redis.Redis) -> None:
    store.reserve([reservation("good"), reservation("bad")])
    name = name_of("tenant-1", "bad")
    client.hset(NAMES.rows[bucket_of(name)] + name, "live", '"in_progress"')
    for keys in (["bad"], ["good", "bad"]):
        with pytest.raises(StoreError, match="damaged"):
            store.reserve([reservation(key) for key in keys])
    assert one(store.reserve([reservation("good")])[0].record).attempt == 1


def test_layout_of_another_version_is_refused(store: RedisStore, client: redis.Redis, ready_redis_url: str) -> None:
    for epoch in NAMES.epochs:
        client.set(epoch, "1-0123456789abcdef")
    with closing(RedisStore(ready_redis_url)) as new:
        for verb in (new.check, new.init, lambda: new.accept_loss(Audit("ana", "moved"))):
            with pytest.raises(SchemaError, match="another version of oncekey"):
                verb()
    assert client.get(NAMES.epochs[0]) == b"1-0123456789abcdef"


@given(some.lists(some.lists(some.binary(max_size=40) | some.integers(1000, 1100).map(bytes), min_size=1), max_size=4))
def test_commands_are_packed_as_hiredis_packs_them(commands: list[list[bytes]]) -> None:
    assert pack(commands) == b"".join(pack_command(tuple(command)) for command in commands)  # type: ignore[arg-type]


# ---------------------------------------------------------------- a server that refuses calls over two slots


@pytest.fixture(scope="module")
def lone_node() -> Iterator[RedisServer]:
    """A cluster of one node, which has all slots."""
    try:
        with RedisServer(settings={"cluster-enabled": "yes", "cluster-config-file": "nodes.conf"}) as server:
            server.command("CLUSTER", "ADDSLOTS", *map(str, range(16384)))
            while "cluster_state:ok" not in server.command("CLUSTER", "INFO"):
                pass
            yield server
    except ServerUnavailable as missing:
        pytest.skip(str(missing))


async def test_server_that_refuses_calls_over_two_slots_gets_one_for_each_bucket(lone_node: RedisServer) -> None:
    with closing(RedisStore(lone_node.url)) as store:
        store.init()
        wanted = [reservation(key) for key in _keys(40)]
        rows = [one(found.record) for found in store.reserve(wanted)]
        ended = store.swap([swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for row in rows[:20]])
        assert None not in ended
        in_loop = store.in_loop()
        assert in_loop is not None
        found = await in_loop.reserve([*wanted, reservation("new")])
        for row, before in zip(found, [*ended, *rows[20:]], strict=False):
            _same(row, one(before))
        assert isinstance(found[40], float)
        in_loop.abandon()
        lone_node.flush()


def test_server_that_becomes_a_node_of_a_cluster_is_asked_again(lone_node: RedisServer) -> None:
    with closing(RedisStore(lone_node.url)) as store:
        store.init()
        store.calls.together = True  # as a server answers that is in no cluster
        wanted = [reservation(key) for key in _keys(40)]
        with pytest.raises(StoreUnavailable, match=r"redis\+cluster"):
            store.reserve(wanted)
        assert store.read([("tenant-1", key) for key in _keys(40)]) == [None] * 40
        assert [one(found.record).attempt for found in store.reserve(wanted)] == [1] * 40
        lone_node.flush()


def test_end_without_a_response_leaves_none(store: RedisStore) -> None:
    """Also if an earlier move gave the row one. The campaign found it: "stores agree with the model"."""
    row = one(store.reserve([reservation("k")])[0].record)
    renewed = swap(row, Event.RENEW, Actor.OWNER, lease_seconds=60.0, response=RESPONSE)
    assert one(store.swap([renewed])[0]).response == RESPONSE
    assert store.swap([swap(row, Event.FAIL, Actor.OWNER)]) != [None]
    assert one(store.read([("tenant-1", "k")])[0]).response is None
