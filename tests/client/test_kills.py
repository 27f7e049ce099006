"""A client that is killed, behind a network that cuts: every intent has one effect and one answer.

``make client`` runs the full form: 1,000 intents and 50 kills for each of two servers.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from oncekey.client import KeyJar
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.proxy_links import Cut, Direction, When
from oncekey.testing.servers import free_port
from tests.client import key_server

ROOT = Path(__file__).parents[2]
SCALE = float(os.environ.get("ONCEKEY_CLIENT_SCALE", "0.04"))
INTENTS, KILLS = round(1000 * SCALE), max(3, round(50 * SCALE))
SECONDS = 50 + 1500 * SCALE
DIRECTIONS: list[Direction] = ["to_server", "to_client"]


@contextmanager
def plain_server(folder: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "tests.client.key_server", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def protected_server(folder: Path) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "tests.client.oncekey_server:app", "--port", str(port)]
    environ = os.environ | {"CLIENT_TEST_FOLDER": str(folder)}
    with subprocess.Popen([*command, "--log-level", "error"], cwd=ROOT, env=environ) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield port
        finally:
            process.kill()


def protected_effects(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "shop.db") as file:
        return [name for (name,) in file.execute("SELECT name FROM orders")]


SERVERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], list[str]]]] = {
    "oncekey": (protected_server, protected_effects),
    "plain": (plain_server, key_server.effects),
}


class Part(StrEnum):
    """What a chunk to the client is of its answer."""

    WHOLE = "whole"
    BEGIN = "begin"
    REST = "rest"


def part_of(chunk: bytes) -> Part:
    """The answers of both servers are short: a chunk that does not begin one ends one."""
    if not chunk.startswith(b"HTTP/1.1 "):
        return Part.REST
    head, end, body = chunk.partition(b"\r\n\r\n")
    length = re.search(rb"^content-length: *(\d+)", head, re.IGNORECASE | re.MULTILINE)
    return Part.WHOLE if end and length is not None and len(body) == int(length[1]) else Part.BEGIN


class Cuts:
    """Cuts at random: before the request arrives, before its answer, inside the answer, after it, and all at once."""

    def __init__(self, proxy: TcpProxy, chance: random.Random) -> None:
        self._proxy, self._chance = proxy, chance
        self.all_at_once = 0
        self._cuts: dict[str, list[Cut]] = {"request": [], "before": [], "inside": [], "after": []}
        self._add("request", "to_server", "before")
        self._add("before", "to_server", "after")  # the server acts, and its answer is lost
        self._add("before", "to_client", "before", Part.WHOLE, Part.BEGIN)
        self._add("inside", "to_client", "before", Part.REST)
        self._add("inside", "to_client", "after", Part.BEGIN)
        self._add("after", "to_client", "after", Part.WHOLE, Part.REST)

    def _add(self, place: str, direction: Direction, when: When, *parts: Part) -> None:
        def matches(chunk: bytes) -> bool:
            if parts and part_of(chunk) not in parts:
                return False
            return self._chance.random() < 0.04 or not self.struck[place]  # the first in each place is sure

        self._cuts[place].append(self._proxy.cut_on(direction, matches, when=when, times=10**9))

    def all(self) -> None:
        self._proxy.cut()
        self.all_at_once += 1

    def end(self) -> None:
        for cut in chain(*self._cuts.values()):
            cut.cancel()

    @property
    def struck(self) -> dict[str, int]:
        """How many cuts struck in each place."""
        return {place: sum(cut.struck for cut in cuts) for place, cuts in self._cuts.items()}


class Killer:
    """Kills the client when a chosen chunk of its traffic passes the proxy: a fast client cannot end before it.

    A run that is to be killed passes at most ``INTENTS // KILLS`` chunks. An intent needs one in each direction, so
    some intent is still open at the last kill.
    """

    def __init__(self, proxy: TcpProxy, chance: random.Random) -> None:
        self.kills = 0
        self._chance = chance
        self._victim: subprocess.Popen[bytes] | None = None
        self._direction: Direction = "to_server"
        self._chunks_left = 0
        for direction in DIRECTIONS:
            proxy.cut_on(direction, self._count(direction))

    def aim(self, victim: subprocess.Popen[bytes]) -> None:
        self._direction = self._chance.choice(DIRECTIONS)
        self._chunks_left = self._chance.randint(1, INTENTS // KILLS)
        self._victim = victim

    def _count(self, direction: Direction) -> Callable[[bytes], bool]:
        def passes(chunk: bytes) -> bool:
            if self._victim is not None and direction == self._direction:
                self._chunks_left -= 1
                if not self._chunks_left:
                    self._victim.kill()
                    self._victim = None
                    self.kills += 1
            return False

        return passes


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", ["oncekey", pytest.param("plain", marks=pytest.mark.frameworks)])
def test_every_intent_has_one_effect_and_one_answer_though_the_client_is_killed(kind: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("ONCEKEY_CLIENT_SEED", random.randrange(2**32)))
    print(f"seed {seed}, {INTENTS} intents, {KILLS} kills")
    chance = random.Random(seed)
    start, effects = SERVERS[kind]
    jar = f"sqlite:///{tmp_path}/intents.db"
    runs = 0
    with start(tmp_path) as port, TcpProxy("127.0.0.1", port) as proxy:
        killer = Killer(proxy, chance)
        cuts = Cuts(proxy, random.Random(seed + 1))
        command = [
            sys.executable,
            "-m",
            "tests.client.sender",
            f"http://127.0.0.1:{proxy.port}",
            jar,
            str(INTENTS),
            "4",
        ]
        began = time.monotonic()
        while True:
            assert time.monotonic() - began < SECONDS, "not all intents were answered in time"
            process = subprocess.Popen(command, cwd=ROOT)
            runs += 1
            if killer.kills < KILLS:
                killer.aim(process)
            if process.wait(SECONDS) == 0:
                break
            if chance.random() < 0.3:
                cuts.all()
        took = time.monotonic() - began
        cuts.end()
    names = sorted(f"order-{number}" for number in range(INTENTS))
    assert sorted(effects(tmp_path)) == names
    opened = KeyJar(jar)
    try:
        assert opened.finished() == dict.fromkeys(names, 201)
        assert opened.open_intents() == []
        answers = {name: json.loads(opened.read(name).answer.body) for name in names}  # type: ignore[union-attr]
    finally:
        opened.close()
    assert {name: answer["name"] for name, answer in answers.items()} == {name: name for name in names}
    assert len({answer["id"] for answer in answers.values()}) == INTENTS
    struck = cuts.struck
    places = ", ".join(f"{count} {place}" for place, count in (struck | {"all at once": cuts.all_at_once}).items())
    strikes = f"{killer.kills} kills, {sum(struck.values()) + cuts.all_at_once} cuts ({places})"
    print(f"{kind}: {INTENTS} effects, {INTENTS} answers, {strikes}, {runs} runs, {took:.0f} s")
    assert killer.kills == KILLS
    answers_cut = [struck[place] for place in ("before", "inside", "after")]
    assert all(answers_cut) if SCALE >= 1 else any(answers_cut), struck
