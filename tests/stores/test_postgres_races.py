"""Races for the same keys on PostgreSQL: one owner, no deadlock, and an answer for the second request."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import errors

from oncekey.core.record import Found, Reservation
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.postgres import store as postgres_store
from oncekey.testing.company import Child
from tests.engine.doubles import PATIENCE, eventually, reservation
from tests.stores.postgres import holding, opened

# ---------------------------------------------------------------- lost races


def test_a_race_that_shows_no_row_is_asked_again_and_then_busy(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race was lost, and then neither inserted nor seen: five statements in all, each for what is still missing, then
    busy (hazard 6)."""
    asked: list[list[str]] = []
    real = store._execute

    def execute(statement: Any, parameters: Any) -> Any:
        asked.append(list(parameters["key"].values))
        if len(asked) == 1:
            raise postgres_store._LostRace
        rows = real(statement, parameters).fetchall()
        shown = [row for row in rows if row[1] != "ghost" and (len(asked) > 2 or row[1] != "late")]
        return SimpleNamespace(fetchall=lambda: shown)

    monkeypatch.setattr(store, "_execute", execute)
    found = store.reserve([reservation(key) for key in ("seen", "late", "ghost")])
    assert [answer.busy for answer in found] == [False, False, True]
    assert asked == [["seen", "late", "ghost"], ["seen", "late", "ghost"], ["late", "ghost"], ["ghost"], ["ghost"]]


def test_rival_that_inserts_first_is_found_and_the_others_reserve(store: PostgresStore, ready_url: str) -> None:
    """The plain INSERT breaks on a key that a rival commits meanwhile: the batch is asked again, politely."""
    with (
        psycopg.connect(ready_url) as rival,
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(ready_url, autocommit=True) as watcher,
    ):
        rival.execute(
            "INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, "
            "attempt, owner, lease_until, created_at, retention_seconds, expires_at) "
            "VALUES ('tenant-1', 'hot', '', '', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 1, now())"
        )

        def reserve() -> list[Found]:
            try:
                return store.reserve([reservation("cold"), reservation("hot")])
            finally:
                store.disconnect()

        asking: Future[list[Found]] = pool.submit(reserve)
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        eventually(lambda: watcher.execute(waiting).fetchone() == (1,))
        rival.commit()
        cold, hot = asking.result(PATIENCE)
    assert cold.record is not None
    assert hot.record is not None
    assert hot.record.owner == "rival"
    assert cold.record.owner != "rival"


# ---------------------------------------------------------------- one owner


def _race(url: str, process: int, seconds: float) -> dict[str, int]:
    """Reserve, hold and discard hot keys until the time is over, and each thread has held some; a key with two holders
    is a UniqueViolation."""
    store = PostgresStore(url)
    counts = {"held": 0, "lost": 0, "busy": 0, "twice": 0}
    lock = threading.Lock()
    ends = time.monotonic() + seconds

    def run(thread: int) -> None:
        dice = random.Random(process * 100 + thread)
        serial = count()
        with psycopg.connect(url, autocommit=True) as ledger:
            held = 0
            while time.monotonic() < ends or held <= 20:
                keys = dice.sample(range(64), 12)
                wanted = [reservation(f"hot-{key}", owner=f"{process}-{thread}-{next(serial)}") for key in keys]
                held += _hold(store, ledger, wanted, counts, lock)
        store.disconnect()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, thread) for thread in range(2)]:
            done.result()
    store.close()
    return counts


def _hold(
    store: PostgresStore, ledger: Any, wanted: list[Reservation], counts: dict[str, int], lock: threading.Lock
) -> int:
    """How many of them it held."""
    found: list[Found] = store.reserve(wanted)
    mine = [f.record for w, f in zip(wanted, found, strict=True) if f.record and f.record.owner == w.owner]
    twice = 0
    for record in mine:
        try:
            ledger.execute("INSERT INTO holders VALUES (%s)", [record.key])
        except errors.UniqueViolation:
            twice += 1
    ledger.execute("DELETE FROM holders WHERE key = ANY(%s)", [[record.key for record in mine]])
    moved = store.swap([swap(record, Event.DISCARD, Actor.OWNER) for record in mine])
    with lock:
        counts["held"] += len(mine)
        counts["lost"] += moved.count(None)
        counts["busy"] += sum(f.busy for f in found)
        counts["twice"] += twice
    return len(mine)


def test_two_processes_never_own_a_key_at_once(store: PostgresStore, ready_url: str) -> None:
    """64 hot keys, two processes of two threads, reserved and deleted for two seconds: no key has two owners (I1)."""
    with psycopg.connect(ready_url, autocommit=True) as own:
        own.execute("CREATE TABLE holders (key text PRIMARY KEY)")
    store.disconnect()
    children = [Child(lambda number=number: _race(ready_url, number, 2.0)) for number in range(2)]  # type: ignore[misc]
    results = [child.result() for child in children]
    assert sum(result["twice"] for result in results) == 0
    assert sum(result["lost"] for result in results) == 0


# ---------------------------------------------------------------- the order of a batch


def test_batches_in_any_order_do_not_deadlock(store: PostgresStore) -> None:
    """Four threads insert, renew and delete the same 40 keys, each in an order of its own, for 25 rounds."""
    begin = threading.Barrier(4)

    def run(thread: int) -> int:
        dice = random.Random(thread)
        moved = 0
        for number in range(25):
            keys = [f"round-{number}-{key}" for key in range(40)]
            begin.wait(PATIENCE)
            dice.shuffle(keys)
            found = store.reserve([reservation(key) for key in keys])
            records = [answer.record for answer in found if answer.record]
            dice.shuffle(records)
            renewed = store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=9) for record in records])
            dice.shuffle(records)
            removed = store.swap([swap(record, Event.DISCARD, Actor.OWNER) for record in records])
            moved += sum(one is not None for one in (*renewed, *removed))
        store.disconnect()
        return moved

    with ThreadPoolExecutor(4) as pool:
        totals = [future.result(PATIENCE * 3) for future in [pool.submit(run, thread) for thread in range(4)]]
    assert sum(totals) >= 25 * 40


def test_a_batch_is_inserted_in_the_order_of_its_keys(store: PostgresStore, ready_url: str) -> None:
    """Two batches that insert the same keys in different orders would wait for each other (hazard 7). This one waits
    for 'b', which another transaction is inserting: it has inserted 'a' before, and not 'c'."""
    insert = """
        INSERT INTO idempotency_keys (scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt,
            owner, lease_until, created_at, retention_seconds, expires_at)
        VALUES ('tenant-1', '{}', '', '', 1, 'external', 'in_progress', 1, 'rival', now(), now(), 1, now())
    """

    def is_free(key: str) -> bool:
        with psycopg.connect(ready_url) as own:
            try:
                own.execute(f"SET lock_timeout = '200ms'; {insert.format(key)}".encode())
            except psycopg.errors.LockNotAvailable:
                return False
            finally:
                own.rollback()
        return True

    def is_waiting() -> bool:
        with psycopg.connect(ready_url, autocommit=True) as own:
            ours = "query LIKE '%insert it where%'"
            waiting = f"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND {ours}"
            found = own.execute(waiting.encode()).fetchone()
        return found == (1,)

    def reserve(lane: PostgresStore) -> list[bool]:
        try:
            return [found.busy for found in lane.reserve([reservation(key) for key in ("c", "b", "a")])]
        finally:
            lane.disconnect()

    with opened(ready_url, lock_timeout=20, timeout=20) as lane, ThreadPoolExecutor(1) as pool:
        with holding(ready_url, insert.format("b")):
            reserved = pool.submit(reserve, lane)
            eventually(is_waiting, "the batch waits")
            assert (is_free("a"), is_free("c")) == (False, True)
        assert reserved.result(PATIENCE) == [False, False, False]
