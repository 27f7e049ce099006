"""kill -9 at random times under load, with upkeep in the killed process: every key ends done, with one effect.

The clients send payments of every kind of effects and retry by the rules; a 409 for an unknown outcome is one more
reason to wait, because a resolver asks the provider's ledger. The provider honours no keys: asked twice, it charges
twice. A short form is ``tests/upkeep/test_must_show.py``, with one kill and a request at every point. Prints its seed.
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from oncekey.core.states import State
from tests.upkeep.every_state import EFFECTS, LEASE, SWEEP_SECONDS
from tests.upkeep.test_must_show import SLACK_SECONDS, House, until

CLIENTS = 12
PATIENCE_SECONDS = 60.0
ROWS = {
    "external": (),
    "phased": ("opened", "closed"),
    "repeatable": ("written",),
    "transactional": ("written",),
}


class Clients:
    def __init__(self, house: House) -> None:
        self.house = house
        self.stop = threading.Event()
        self.done: dict[str, str] = {}

    def run(self, number: int) -> None:
        turn = 0
        while not self.stop.is_set():
            kind = EFFECTS[turn % len(EFFECTS)]
            self.pay(kind, f"{kind}-{number:02d}-{turn:06d}")
            turn += 1

    def pay(self, kind: str, key: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        told = "no answer"
        while time.monotonic() < deadline:
            try:
                first, again = (self.house.send(kind, key) for _ in range(2))
            except httpx.TransportError:
                continue
            if first.status_code == again.status_code == 201:
                assert first.content == again.content, "two answers for one key"
                self.done[key] = kind
                return
            for answer in (first, again):
                assert answer.status_code in (201, 409, 500, 503), (key, answer.text)
            told = again.text
            time.sleep(0.02)
        raise AssertionError(f"{key} is stuck: {told}")


@pytest.mark.faults
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_killed_at_random_with_upkeep(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seed = int(os.environ.get("ONCEKEY_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    kills = int(os.environ.get("ONCEKEY_KILLS", "50"))
    print(f"\nseed {seed}: ONCEKEY_SEED={seed} repeats it")
    chance = random.Random(seed)
    url = f"sqlite:///{tmp_path / 'house.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    house = House(url, tmp_path)
    clients = Clients(house)
    try:
        house.start(upkeep=True)
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(clients.run, number) for number in range(CLIENTS)]
            try:
                for _ in range(kills):
                    served = len(clients.done)
                    until(lambda: len(clients.done) > served or any(each.done() for each in running), "no answers")  # noqa: B023
                    time.sleep(chance.uniform(0.0, 0.3))
                    house.kill()
                    house.start(upkeep=True)
            finally:
                clients.stop.set()
            for each in running:
                each.result()
        until(
            lambda: not house.keys(State.IN_PROGRESS, State.UNKNOWN, State.FAILED_RETRYABLE),
            "stuck: a key is not done, and nobody is at it",
            LEASE.total_seconds() + 2 * SWEEP_SECONDS + SLACK_SECONDS,
        )
        check(house, clients.done)
    finally:
        house.close()


def check(house: House, done: dict[str, str]) -> None:
    """One charge for each key whose kind charges, each row once, and every answered key is completed."""
    assert house.keys(*State) == dict.fromkeys(done, State.COMPLETED)
    charged, entries = house.charged(), house.entries()
    assert charged == {key: 1 for key, kind in done.items() if kind in ("external", "phased")}
    settled = {key for key in done if house.store.audit("single-tenant", key, 10)}
    print(f"{len(done)} keys, {len(settled)} were unknown and settled from the ledger")
    assert set(entries.values()) == {1}
    for key, kind in done.items():
        # What the ledger settled was answered for, and its last phase never ran.
        wanted = set(ROWS[kind]) - ({"closed"} if key in settled else set())
        assert {what for of, what in entries if of == key} >= wanted, key
