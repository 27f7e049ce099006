"""Three Galera nodes: one winner of each race across nodes, no stale read, and nothing lost when nodes are killed.

``make galera`` runs it: five minutes or more. ``ONCEKEY_GALERA_SCALE`` makes it shorter.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from oncekey import Policy
from oncekey.core.jobs import Conclusion, JobEnd, JobState
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.mysql import MysqlStore
from oncekey.testing.servers import GaleraCluster, ServerUnavailable
from tests.engine.doubles import reservation
from tests.outbox.outbox_table import OutboxTable
from tests.stores.galera_shop import two_shops

pytestmark = [pytest.mark.galera, pytest.mark.timeout(1_800)]
SCALE = float(os.environ.get("ONCEKEY_GALERA_SCALE", "1"))
RACES = max(20, round(2_000 * SCALE))
MOVES = max(10, round(300 * SCALE))
KILLS = max(1, round(10 * SCALE))
CLIENTS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[GaleraCluster]:
    made = GaleraCluster()
    try:
        made.__enter__()
    except ServerUnavailable as missing:
        pytest.skip(str(missing))
    try:
        yield made
    finally:
        made.__exit__(None, None, None)


@pytest.fixture(scope="module")
def name(cluster: GaleraCluster) -> str:
    store = MysqlStore(cluster.database("races"), timeout=20.0)
    store.migrate()
    store.close()
    return "races"


@contextmanager
def each_node(cluster: GaleraCluster, name: str) -> Iterator[list[MysqlStore]]:
    """A store on each node, and on that node alone."""
    stores = [MysqlStore(node.url_of(name), timeout=10.0) for node in cluster.nodes]
    try:
        yield stores
    finally:
        for store in stores:
            store.close()


def at_once(stores: list[MysqlStore], rounds: int, work: Callable[[int, int, MysqlStore], Any]) -> list[list[Any]]:
    """Call ``work(round, node, store)`` for each node in a thread of its own, all of them at the same moment."""
    barrier = threading.Barrier(len(stores))
    results: list[list[Any]] = [[None] * len(stores) for _ in range(rounds)]
    failed: list[BaseException] = []

    def run(node: int) -> None:
        try:
            for number in range(rounds):
                barrier.wait(120)
                results[number][node] = work(number, node, stores[node])
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(node,)) for node in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return results


def insisting(verb: Callable[[], Any], seconds: float = 60.0) -> Any:
    """As an engine does: the same call again, with the same owner token."""
    until = time.monotonic() + seconds
    while True:
        try:
            return verb()
        except StoreUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def owner_of(store: MysqlStore, wanted: Any) -> Record:
    """Ask until the row is seen. Busy is allowed; two owners are not."""
    for _ in range(1_000):
        (found,) = insisting(lambda: store.reserve([wanted]))
        if found.record is not None:
            record: Record = found.record
            return record
    raise AssertionError("busy for ever")


def test_races_for_one_key_across_nodes_have_one_winner(cluster: GaleraCluster, name: str) -> None:
    def reserve(number: int, node: int, store: MysqlStore) -> tuple[bool, str]:
        wanted = replace(reservation(f"race-{number:05d}"), owner=f"{number}-{node}")
        owner = owner_of(store, wanted).owner
        return owner == wanted.owner, owner

    with each_node(cluster, name) as stores:
        for node, store in enumerate(stores):
            assert reserve(RACES + node, node, store)[0], "each node wins where it has no rival"
        results = at_once(stores, RACES, reserve)
    assert [sum(mine for mine, _ in each) for each in results] == [1] * RACES
    assert all(len({owner for _, owner in each}) == 1 for each in results)
    wins = Counter(owner.rpartition("-")[2] for each in results for mine, owner in each if mine)
    print(f"{RACES} races, won by each node: {dict(sorted(wins.items()))}")


def test_moves_of_one_key_across_nodes_have_one_winner(cluster: GaleraCluster, name: str) -> None:
    """FOR UPDATE locks on one node only: the loser is told at COMMIT (1213), looks again, and moves nothing."""
    with each_node(cluster, name) as stores:
        records = []
        for number in range(MOVES):
            record = owner_of(stores[0], reservation(f"move-{number:05d}"))
            (released,) = insisting(lambda: stores[0].swap([swap(record, Event.RELEASE, Actor.OWNER)]))  # noqa: B023
            records.append(released)

        def retry(number: int, node: int, store: MysqlStore) -> bool:
            taken = replace(reservation(f"move-{number:05d}"), owner=f"{number}-{node}")
            change = swap(records[number], Event.RETRY, Actor.REQUEST, reservation=taken)
            (moved,) = insisting(lambda: store.swap([change]))
            if moved is None:  # it may have been ours, and its answer lost
                (row,) = insisting(lambda: store.read([(taken.scope, taken.key)]))
                return bool(row.owner == taken.owner)
            return True

        results = at_once(stores, MOVES, retry)
    assert [sum(each) for each in results] == [1] * MOVES


def test_jobs_that_three_nodes_claim_at_once_have_one_worker_each(cluster: GaleraCluster, name: str) -> None:
    """SKIP LOCKED knows the locks of one node only: a worker that was told that it has a job must be the only one."""
    with each_node(cluster, name) as stores:
        table = OutboxTable(stores[0].url)
        jobs = [table.job("charge") for _ in range(8 * MOVES)]  # fewer than they ask for
        insisting(lambda: table.insert(jobs))

        def work(number: int, node: int, store: MysqlStore) -> tuple[list[str], list[bool]]:
            owner = f"{number}-{node}"
            claimed = insisting(lambda: store.claim(owner, ["charge"], 4, 3600.0))
            ended = [Conclusion(job.id, owner, JobEnd.DONE) for job in claimed]
            return [job.id for job in claimed], insisting(lambda: store.conclude(ended))

        results = at_once(stores, MOVES, work)
        states = Counter(table.get(job.id).state for job in jobs)
        table.close()
    claims = Counter(job_id for each in results for ids, _ in each for job_id in ids)
    assert [job_id for job_id, times in claims.items() if times > 1] == []
    assert states[JobState.DONE] == len(claims)
    assert claims
    print(f"{len(claims)} jobs claimed by one worker each, {len(jobs) - len(claims)} by a claim whose answer was lost")


def test_row_is_seen_on_every_node_as_soon_as_it_is_committed(cluster: GaleraCluster, name: str) -> None:
    """Without wsrep_sync_wait more than half of these were missed."""
    with each_node(cluster, name) as stores:
        for number in range(MOVES):
            record = owner_of(stores[number % 3], reservation(f"seen-{number:05d}"))
            (row,) = stores[(number + 1) % 3].read([(record.scope, record.key)])
            assert row is not None
            assert row.owner == record.owner


def test_node_without_the_others_is_unavailable_until_they_are_back(cluster: GaleraCluster, name: str) -> None:
    with each_node(cluster, name) as stores:
        owner_of(stores[0], reservation("alone"))
        for node in cluster.nodes[1:]:
            node.pause()
        try:
            said, until = "", time.monotonic() + 60
            while "primary component" not in said and time.monotonic() < until:
                try:
                    stores[0].reserve([reservation(f"alone-{time.monotonic()}")])
                except StoreUnavailable as error:
                    said = str(error)
            assert "primary component" in said
        finally:
            for node in cluster.nodes[1:]:
                node.resume()
        assert owner_of(stores[0], reservation("together")).state is State.IN_PROGRESS


@pytest.mark.parametrize("driver", ["pymysql", "sqlalchemy"])
@pytest.mark.parametrize("meet_at", ["commit", "handler"])
async def test_enlisted_transaction_that_meets_a_write_of_another_node_runs_again(
    cluster: GaleraCluster, name: str, driver: str, meet_at: str
) -> None:
    """Another node has written the same business row: Galera ends the transaction, and the client's retry runs."""
    async with two_shops(cluster, name, driver) as (here, there):
        key = f"met-{driver}-{meet_at}"

        def meet() -> None:
            there.take(1)
            assert here.balance() == 99, "this node has the other one's write, and not ours"

        here.meet_at, here.meet = meet_at, meet
        assert (await here.app.post(key)).status_code == 503
        assert here.commits == ([1213] if meet_at == "commit" else [])
        record = here.record(key)
        assert record is not None
        assert (record.state, record.response) == (State.FAILED_RETRYABLE, None)
        assert (here.payments(key), here.balance()) == (0, 99)
        assert (await there.app.post(key)).status_code == 201
        assert (here.runs, there.runs, here.payments(key), here.balance()) == (1, 1, 1, 94)
        replayed = await here.app.post(key)
        assert (replayed.status_code, replayed.headers["idempotency-replayed"]) == (201, "true")


@pytest.mark.parametrize("driver", ["pymysql", "sqlalchemy"])
async def test_enlisted_transaction_whose_key_was_taken_over_on_another_node_commits_nothing(
    cluster: GaleraCluster, name: str, driver: str
) -> None:
    """Its lock of the key's row holds on its own node only: on the others the lease counts, and runs out."""
    short = Policy(effects="transactional", lease=timedelta(seconds=2))
    async with two_shops(cluster, name, driver, short) as (here, there):
        key = f"taken-{driver}"

        async def meet() -> None:
            async with asyncio.timeout(30):
                while (await there.app.post(key)).status_code != 201:
                    await asyncio.sleep(0.1)

        here.meet_at, here.meet = "handler", meet
        first = await here.app.post(key)
        assert (first.status_code, first.headers["idempotency-replayed"]) == (201, "true"), "the other node's answer"
        record = here.record(key)
        assert record is not None
        assert (record.state, record.attempt) == (State.COMPLETED, 2)
        assert (here.runs, there.runs, here.payments(key), here.balance()) == (1, 1, 1, 95)


class Load:
    """Clients that race for keys on all nodes, run the winner's operation, and store its response."""

    def __init__(self, cluster: GaleraCluster, name: str) -> None:
        self.stop = threading.Event()
        self.ran: dict[str, list[str]] = defaultdict(list)
        """The ledger: which owners ran the operation of a key."""
        self.completed: dict[str, bytes] = {}
        self.acknowledged = 0
        self.failures: list[BaseException] = []
        self._urls = [cluster.url_of(name, first % 3) for first in range(CLIENTS)]
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        store = MysqlStore(self._urls[number], timeout=5.0)
        rounds = random.Random(number)
        try:
            turn = 0
            while not self.stop.is_set():
                turn += 1
                self._one(store, f"load-{turn // 3 + rounds.randrange(3):06d}", f"{number}-{turn}")
        except BaseException as error:
            self.failures.append(error)
        finally:
            store.close()

    def _one(self, store: MysqlStore, key: str, owner: str) -> None:
        wanted = replace(reservation(key), owner=owner, lease_seconds=3600.0)
        record = owner_of(store, wanted)
        if record.owner != owner:
            return
        with self._lock:
            self.ran[key].append(owner)
        response = StoredResponse(201, (), owner.encode())
        change = swap(record, Event.COMPLETE, Actor.OWNER, response=response)
        until = time.monotonic() + 60
        while insisting(lambda: store.swap([change])) == [None]:
            (row,) = insisting(lambda: store.read([(record.scope, key)]))
            assert row is not None
            assert row.owner == owner, "another owner has the key"
            if row.response == response:  # the first answer was lost
                break
            # Busy: the transaction of a cut attempt still has the row. The engine asks again, too.
            assert row.state is State.IN_PROGRESS
            assert time.monotonic() < until, "the completion is lost"
            time.sleep(0.05)
        with self._lock:
            self.completed[key] = owner.encode()
            self.acknowledged += 2


def test_nodes_killed_under_load_lose_nothing_and_run_nothing_twice(cluster: GaleraCluster, name: str) -> None:
    with Load(cluster, name) as load:
        for number in range(KILLS):
            before = load.acknowledged
            while load.acknowledged < before + 50 and not load.failures:
                time.sleep(0.05)
            node = cluster.nodes[number % 3]
            node.kill()
            time.sleep(random.uniform(0.0, 1.0))
            node.start()
            assert not load.failures, load.failures
    assert not load.failures, load.failures
    twice = {key: owners for key, owners in load.ran.items() if len(owners) > 1}
    assert not twice
    with each_node(cluster, name) as stores:
        keys = sorted(load.completed)
        for store in stores:
            for at in range(0, len(keys), 100):
                rows = store.read([("tenant-1", key) for key in keys[at : at + 100]])
                for key, row in zip(keys[at : at + 100], rows, strict=True):
                    assert row is not None, "an acknowledged key is lost"
                    assert row.response is not None
                    assert row.response.body == load.completed[key]
    print(f"{KILLS} kills, {len(load.completed)} keys, {load.acknowledged} acknowledged writes")
