"""Reserve and end in the event loop: the same rows as by a thread, and every failure leaves no connection behind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.redis import RedisStore
from oncekey.stores.redis.in_loop import InLoop
from oncekey.testing.conformance.base import RESPONSE, one
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import RedisServer
from tests.engine.doubles import reservation

Made = tuple[RedisStore, InLoop]


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", redis_server.port) as made:
        yield made


@pytest.fixture
async def made(ready_redis_url: str, proxy: TcpProxy) -> AsyncIterator[Made]:
    """A store that a verb has used, and its connections in this loop."""
    store = RedisStore(f"{proxy.rewrite(ready_redis_url)}?timeout=2&replicas_timeout=0.1")
    store.check()
    store.reserve([reservation("warm")])
    in_loop = store.in_loop()
    assert in_loop is not None
    yield store, in_loop
    proxy.pass_through()
    in_loop.abandon()
    store.close()


def _read(store: RedisStore, *keys: str) -> list[Record | None]:
    return [row and replace(row, now=0.0) for row in store.read([("tenant-1", key) for key in keys])]


async def test_keys_are_inserted_found_and_ended_as_by_a_thread(made: Made) -> None:
    store, in_loop = made
    wanted = [reservation(f"k-{number}") for number in range(40)]
    times = await in_loop.reserve(wanted)
    rows = [one(row) for row in _read(store, *(each.key for each in wanted))]
    assert [row.created_at for row in rows] == times
    assert [row.owner for row in rows] == [each.owner for each in wanted]
    ends = [swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for row in rows[:20]]
    lost = replace(ends[3], owner="another-owner")
    new = reservation("new")
    found, ended = await in_loop.both([wanted[0], new, wanted[30]], [*ends[:3], lost, *ends[4:]])
    assert [each is None for each in ended] == [number == 3 for number in range(20)]
    assert isinstance(found[0], Record)
    assert (found[0].state, found[0].response) == (State.COMPLETED, RESPONSE), "ends come first"
    assert isinstance(found[1], float)
    assert one(_read(store, "new")[0]).owner == new.owner
    assert [one(row).state for row in _read(store, "k-2", "k-3")] == [State.COMPLETED, State.IN_PROGRESS]
    assert await in_loop.swap(ends[:2]) == [None, None], "ended already"


async def test_large_bodies_pass_in_both_directions(ready_redis_url: str) -> None:
    """More than the socket takes at once."""
    store = RedisStore(ready_redis_url)
    store.check()
    in_loop = store.in_loop()
    assert in_loop is not None
    wanted = [reservation(f"k-{number}") for number in range(8)]
    await in_loop.reserve(wanted)
    rows = [each.record(1.0) for each in wanted]
    large = replace(RESPONSE, body=b"\0\r\n$5" * 200_000)
    ended = await in_loop.swap([swap(row, Event.COMPLETE, Actor.OWNER, response=large) for row in rows])
    assert None not in ended
    found = await in_loop.reserve(wanted)
    assert [each.response for each in found if isinstance(each, Record)] == [large] * 8
    in_loop.abandon()
    store.close()


async def test_hung_server_is_left_in_time(made: Made, proxy: TcpProxy) -> None:
    _, in_loop = made
    await in_loop.reserve([reservation("before")])
    proxy.hang("to_client")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        await in_loop.reserve([reservation("hung")])
    assert time.monotonic() - began < 10, "a server that hangs never answers"
    assert in_loop._wires == {}, "the late answer must not be read as the next one's"
    proxy.pass_through()
    assert isinstance((await in_loop.reserve([reservation("after")]))[0], float)


async def test_connection_that_was_lost_between_two_batches_is_replaced(
    made: Made, proxy: TcpProxy, redis_server: RedisServer
) -> None:
    _, in_loop = made
    await in_loop.reserve([reservation("before")])
    proxy.cut()
    (wire,) = in_loop._wires.values()
    while not wire.dead:
        wire._read()
    assert isinstance((await in_loop.reserve([reservation("after")]))[0], float)


async def test_lost_epoch_and_missing_replicas_raise(made: Made, redis_server: RedisServer) -> None:
    """A thread lane asks next, and says why."""
    _, in_loop = made
    redis_server.flush()
    with pytest.raises(StoreUnavailable, match="ONCEKEY-EPOCH"):
        await in_loop.reserve([reservation("k")])
    alone = RedisStore(f"{redis_server.url}?replicas=1&replicas_timeout=0.05")
    alone.init()
    waiting = alone.in_loop()
    assert waiting is not None
    try:
        with pytest.raises(StoreUnavailable, match="did not confirm"):
            await waiting.reserve([reservation("k")])
    finally:
        waiting.abandon()
        alone.close()


def test_tls_is_left_to_threads() -> None:
    assert RedisStore("rediss://localhost:1/0").in_loop() is None
