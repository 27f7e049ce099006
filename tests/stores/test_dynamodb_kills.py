"""Processes that work on the same keys in DynamoDB are killed and paused past their leases: no effect happens twice.

Each worker reserves keys, writes a line into a ledger, which is the effect, and completes the key. If it finds a key
whose lease is over, it makes it unknown, as the sweeper does: the line may have been written or not.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.dynamodb import DynamoStore
from tests.engine.doubles import reservation
from tests.stores.dynamo_rows import opened

LEASE = 0.5
WORKERS = 4
KEYS = 400


def work(url: str, ledger: Path, seed: int) -> None:
    order = random.Random(seed)
    with opened(url, timeout=5.0) as store:
        while left := sorted(set(keys_of()) - over(store)):
            for key in order.sample(left, min(8, len(left))):
                attempt(store, key, ledger)


def keys_of() -> list[str]:
    return [f"key-{number:03}" for number in range(KEYS)]


def over(store: DynamoStore) -> set[str]:
    rows = store.read([("tenant-1", key) for key in keys_of()])
    return {row.key for row in rows if row is not None and row.state in (State.COMPLETED, State.UNKNOWN)}


def attempt(store: DynamoStore, key: str, ledger: Path) -> None:
    wanted = reservation(key, owner=secrets.token_hex(8), effects=Effects.EXTERNAL, lease=LEASE)
    record = store.reserve([wanted])[0].record
    if record is None or record.state is not State.IN_PROGRESS:
        return
    if record.owner == wanted.owner:
        with ledger.open("a", buffering=1) as file:
            file.write(f"{key} {wanted.owner}\n")
        store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=StoredResponse(201, (), wanted.owner.encode()))])
    elif record.lease_over:
        store.swap([swap(record, Event.DOUBT, Actor.SWEEPER)])


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger"
    path.touch()
    return path


@pytest.mark.stores
@pytest.mark.timeout(400)
def test_workers_that_are_killed_and_paused_have_each_effect_once(ready_dynamodb_url: str, ledger: Path) -> None:
    """A key is completed by the owner that wrote the line, or unknown; none has two lines (I1, I2, I3, I4)."""
    seed = int(os.environ.get("ONCEKEY_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    chance = random.Random(seed)
    forks = multiprocessing.get_context("fork")
    strikes: Counter[str] = Counter()

    def start(number: int) -> multiprocessing.process.BaseProcess:
        worker = forks.Process(target=work, args=(ready_dynamodb_url, ledger, seed + number), daemon=True)
        worker.start()
        return worker

    workers = [start(number) for number in range(WORKERS)]
    numbers = iter(range(WORKERS, 10_000))
    deadline = time.monotonic() + 120.0
    while any(worker.exitcode is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(chance.uniform(0.05, 0.3))  # on a fast machine, too, there are strikes enough
        nth = chance.randrange(WORKERS)
        worker = workers[nth]
        if worker.exitcode is not None or worker.pid is None:
            if worker.exitcode != 0:
                workers[nth] = start(next(numbers))
        elif sum(strikes.values()) < 60 and strikes["kills"] <= strikes["pauses"]:
            strikes["kills"] += 1
            worker.kill()
            worker.join()
            workers[nth] = start(next(numbers))
        elif sum(strikes.values()) < 60:
            strikes["pauses"] += 1
            os.kill(worker.pid, signal.SIGSTOP)
            time.sleep(3 * LEASE)
            os.kill(worker.pid, signal.SIGCONT)
    for worker in workers:
        worker.kill()
        worker.join()

    lines = [line.split() for line in ledger.read_text().splitlines()]
    with opened(ready_dynamodb_url, timeout=30.0) as store:
        rows = store.read([("tenant-1", key) for key in keys_of()])
    about = f"seed {seed}, {dict(strikes)}"
    assert max(Counter(key for key, _ in lines).values()) == 1, about
    written = dict(lines)
    states: Counter[State] = Counter()
    for row in rows:
        assert row is not None, about
        states[row.state] += 1
        if row.state is State.COMPLETED:
            assert row.response is not None
            assert written[row.key].encode() == row.response.body, about
    assert set(states) <= {State.COMPLETED, State.UNKNOWN}, f"{about} {states}"
    assert strikes["kills"] >= 3, about
    assert strikes["pauses"] >= 3, about
