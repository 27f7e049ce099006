"""Processes that work on the same keys in DynamoDB are killed and paused past their leases: no effect happens twice.

Each worker reserves keys, writes a line into a ledger, which is the effect, and completes the key. If it finds a key
whose lease is over, it makes it unknown, as the sweeper does: the line may have been written or not.

The test strikes by progress: workers may use a few keys more after each strike, so they cannot end before the last one,
however fast the machine is.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import signal
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Protocol

import pytest

from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.dynamodb import DynamoStore
from tests.engine.doubles import reservation
from tests.stores.dynamo_rows import opened

pytestmark = pytest.mark.stores

LEASE = 0.5
WORKERS = 4
STRIKES = 24
"""Kills and pauses in turn."""
KEYS_A_STRIKE = 12
KEYS = KEYS_A_STRIKE * (STRIKES + 1)


class Released(Protocol):
    """How many keys the workers may use; shared by all processes."""

    value: int


def work(url: str, ledger: Path, seed: int, released: Released) -> None:
    order = random.Random(seed)
    with opened(url, timeout=20.0) as store:
        while left := sorted(set(keys_of()) - over(store)):
            usable = [key for key in left if key < f"key-{released.value:03}"]
            for key in order.sample(usable, min(8, len(usable))):
                with suppress(StoreUnavailable):  # as after a kill: another worker finds that the lease is over
                    attempt(store, key, ledger)
            if not usable:
                time.sleep(0.01)


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
    released = forks.Value("i", 0, lock=False)  # a worker that is killed would keep the lock
    numbers = count()

    def start() -> multiprocessing.process.BaseProcess:
        worker = forks.Process(
            target=work, args=(ready_dynamodb_url, ledger, seed + next(numbers), released), daemon=True
        )
        worker.start()
        return worker

    workers = [start() for _ in range(WORKERS)]
    deadline = time.monotonic() + 300.0

    def wait_for(lines: int) -> None:
        while len(ledger.read_text().splitlines()) < lines:
            assert time.monotonic() < deadline, f"seed {seed}: {lines} lines were not written in time"
            time.sleep(0.001)

    for strike in range(STRIKES):
        before = len(ledger.read_text().splitlines())
        released.value += KEYS_A_STRIKE
        wait_for(before + chance.randrange(1, KEYS_A_STRIKE // 2))
        nth = chance.randrange(WORKERS)
        worker = workers[nth]
        assert worker.pid is not None
        if strike % 2:
            os.kill(worker.pid, signal.SIGSTOP)
            time.sleep(3 * LEASE)
            os.kill(worker.pid, signal.SIGCONT)
        else:
            worker.kill()
            worker.join()
            workers[nth] = start()
    released.value = KEYS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    ended = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
        worker.join()

    lines = [line.split() for line in ledger.read_text().splitlines()]
    with opened(ready_dynamodb_url, timeout=30.0) as store:
        rows = store.read([("tenant-1", key) for key in keys_of()])
    about = f"seed {seed}, {STRIKES} strikes"
    assert ended == [0] * WORKERS, about
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
