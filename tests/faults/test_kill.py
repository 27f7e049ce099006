"""kill -9 at random times under load: at most one charge per key, identical answers, and no key that stays stuck.

The long form is ``make faults`` (200 kills per store); a short one runs with every ``make test``. Prints its seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.faults.app import LEASE

CLIENTS = 16


class Campaign:
    """A server that is killed and started again, and clients that retry by the rules of seed 000."""

    def __init__(self, store: str, folder: Path, effects: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = folder / "ledger.txt"
        self.environ = os.environ | {
            "ONCEKEY_TEST_STORE": store,
            "ONCEKEY_TEST_LEDGER": str(self.ledger),
            "ONCEKEY_TEST_EFFECTS": effects,
        }
        # The campaign holds the port: clients wait for the next server instead of being refused.
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.answers: dict[str, list[bytes]] = {}
        self.unknown: set[str] = set()
        self.kills = 0

    def start(self) -> subprocess.Popen[bytes]:
        fd = self.listener.fileno()
        command = [sys.executable, "-m", "uvicorn", "--factory", "tests.faults.app:make_app"]
        command += ["--fd", str(fd), "--log-level", "critical", "--lifespan", "off"]
        return subprocess.Popen(command, env=self.environ, pass_fds=[fd])

    async def client(self, number: int, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=10) as http:
            turn = 0
            while not stop.is_set():
                turn += 1
                await self.pay(http, f"key-{number:03d}-{turn:06d}", turn)

    async def pay(self, http: httpx.AsyncClient, key: str, cents: int) -> None:
        """Until the key is settled: the same key on lost connections, 5xx and 409."""
        headers = {"Idempotency-Key": key}
        while True:
            try:
                answer = await http.post("/payments", headers=headers, json={"cents": cents})
            except httpx.TransportError:
                continue
            if answer.status_code == 201:
                self.answers.setdefault(key, []).append(answer.content)
                if len(self.answers[key]) == 2:
                    return
            elif answer.status_code == 409 and "outcome-unknown" in answer.text:
                self.unknown.add(key)
                return
            else:
                assert answer.status_code in (409, 503), (answer.status_code, answer.text)
                await asyncio.sleep(0.02)

    async def run(self, kills: int) -> None:
        stop = asyncio.Event()
        server = self.start()
        clients = [asyncio.create_task(self.client(number, stop)) for number in range(CLIENTS)]
        try:
            while self.kills < kills:
                served = len(self.answers)
                while len(self.answers) == served:  # it works before it is killed
                    await asyncio.sleep(0.01)
                    assert not any(client.done() for client in clients), [c.exception() for c in clients if c.done()]
                await asyncio.sleep(self.random.uniform(0, 0.05))
                server.send_signal(signal.SIGKILL)
                server.wait()
                self.kills += 1
                print(f"\r{self.kills}/{kills} kills, {len(self.answers)} keys, {len(self.unknown)} unknown", end="")
                server = self.start()
            stop.set()
            await asyncio.wait_for(asyncio.gather(*clients), 60 + LEASE.total_seconds())  # nothing stays stuck (I4)
        finally:
            server.kill()
            server.wait()
            self.listener.close()

    def check(self, *, at_most_once: bool) -> None:
        charged = Counter(self.ledger.read_text().split())
        if at_most_once:
            twice = {key: count for key, count in charged.items() if count > 1}
            assert not twice, f"charged more than once: {twice}"
        assert all(len(set(seen)) == 1 for seen in self.answers.values()), "two answers for one key"
        assert not [key for key in self.answers if not charged[key]], "answered and not charged"
        assert not (self.unknown & set(self.answers)), "unknown after an answer"


def store_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "sqlite":
        return f"sqlite:///{folder / 'keys.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


async def campaign(kind: str, request: pytest.FixtureRequest, folder: Path, effects: str, kills: int) -> None:
    seed = int(os.environ.get("ONCEKEY_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"\nseed {seed}: ONCEKEY_SEED={seed} repeats it")
    run = Campaign(store_of(kind, request, folder), folder, effects, seed)
    await run.run(kills)
    run.check(at_most_once=effects == "external")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.timeout(180)
async def test_a_few_kills(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """External effects: at most one charge per key, or the key says unknown; an answer once given stays."""
    await campaign(kind, request, tmp_path, "external", kills=3)


@pytest.mark.faults
@pytest.mark.parametrize("effects", ["external", "repeatable"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_many_kills(kind: str, effects: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The same, 200 times for each store and kind of effects."""
    await campaign(kind, request, tmp_path, effects, kills=int(os.environ.get("ONCEKEY_KILLS", "200")))
