"""Sentinel: the store finds the new master after a failover, with all that a replica had confirmed."""

from __future__ import annotations

import time

import pytest

from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.redis import RedisStore
from oncekey.testing.conformance.base import RESPONSE, one
from oncekey.testing.servers import RedisSentinel, ServerUnavailable
from tests.engine.doubles import reservation

pytestmark = [pytest.mark.stores, pytest.mark.timeout(120)]


def test_store_finds_the_new_master_and_no_confirmed_key_is_lost() -> None:
    try:
        group = RedisSentinel()
        with group:
            store = RedisStore(f"{group.url}?replicas=1")
            store.init()
            records = [one(found.record) for found in store.reserve([reservation(f"k-{n}") for n in range(50)])]
            ends = [swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for record in records[:25]]
            assert None not in store.swap(ends)
            group.data[0].kill()
            after = RedisStore(group.url)  # the new master has no replica yet
            found = None
            deadline = time.monotonic() + 60
            while found is None:
                try:
                    found = after.read([(record.scope, record.key) for record in records])
                except StoreUnavailable:
                    assert time.monotonic() < deadline
            states = [one(record).state for record in found]
            assert states == [State.COMPLETED] * 25 + [State.IN_PROGRESS] * 25
            assert one(after.reserve([reservation("k-30")])[0].record).owner == records[30].owner
            store.close()
            after.close()
    except ServerUnavailable as missing:
        pytest.skip(str(missing))


def test_unknown_master_and_unreachable_sentinels_are_unavailable() -> None:
    store = RedisStore("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main?timeout=1&replicas_timeout=0.1")
    with pytest.raises(StoreUnavailable, match="no sentinel names the master"):
        store.check()
    store.close()
