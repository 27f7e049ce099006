"""What the contestants are asked, and which of them: the list that ``__main__.py`` goes through in every round."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contestants import (
    ALL,
    ASYNCPG_BY_HAND,
    ASYNCPG_BY_HAND_HELD,
    BARE,
    BY_HAND,
    DBOS_POSTGRES,
    IDEMKIT_POSTGRES,
    IDEMKIT_REDIS,
    ONCEKEY_POSTGRES,
    ONCEKEY_POSTGRES_CACHE,
    ONCEKEY_REDIS_MEMORY,
    ONCEKEY_SQLITE,
    WITHOUT_CACHE,
    Contestant,
)
from benchmarks.load import BODY, Mode
from benchmarks.serving import Server

NOTE_BYTES = 16 * 1024
PRIMED_KEYS = 1000
_text = random.Random(8785).choices(string.ascii_letters + string.digits, k=NOTE_BYTES)
LARGE_BODY = json.dumps({"amount": 1299, "currency": "EUR", "note": "".join(_text)}, separators=(",", ":"))
"""Random letters: a database that compresses would otherwise store next to nothing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is served: contestants of one setting are up at the same time, and are loaded in turns."""

    server: Server = "uvicorn"
    framework: str = "starlette"
    inserts: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    connections: int
    mode: Mode
    about: str
    setting: Setting = Setting()
    contestants: tuple[Contestant, ...] = WITHOUT_CACHE
    keys: int = PRIMED_KEYS
    body: str = BODY
    targets: bool = False
    """Part of ``--targets``."""

    @property
    def id(self) -> str:
        return f"{self.name}@{self.connections}"


PLAIN = Setting()
INSERTING = Setting(inserts=True)
FASTAPI = Setting(framework="fastapi")
WSGI = Setting(server="gunicorn")
FOUR_PROCESSES = Setting(server="uvicorn x 4")

ON_POSTGRES = (BARE, ONCEKEY_POSTGRES, IDEMKIT_POSTGRES, DBOS_POSTGRES, *BY_HAND)
UNDER_WSGI = (BARE, ONCEKEY_POSTGRES, ONCEKEY_SQLITE, IDEMKIT_POSTGRES, IDEMKIT_REDIS)
IN_PROCESSES = (BARE, ONCEKEY_POSTGRES, IDEMKIT_POSTGRES, IDEMKIT_REDIS)

WORKLOADS = (
    Workload("first", 64, "first", "a new key with every request", targets=True),
    Workload("first", 1, "first", "one client, so the latency of one request", targets=True),
    Workload("first", 16, "first", "a new key with every request"),
    Workload("first", 256, "first", "a new key with every request"),
    Workload("replay", 64, "replay", "1,000 completed keys, over and over", contestants=ALL, targets=True),
    Workload("mix", 64, "mix", "nine new keys, then a retry of a completed one"),
    Workload("hot", 64, "replay", "all clients on one completed key", keys=1),
    Workload("large", 64, "first", "16 KiB there and back", body=LARGE_BODY),
    Workload("insert", 64, "first", "the handler inserts a row of business", INSERTING, ON_POSTGRES, targets=True),
    Workload("fastapi", 64, "first", "FastAPI instead of Starlette", FASTAPI, (BARE, ONCEKEY_POSTGRES)),
    Workload("wsgi", 64, "first", "WSGI, 16 threads", WSGI, UNDER_WSGI),
    Workload("processes", 64, "first", "4 processes on one store", FOUR_PROCESSES, IN_PROCESSES),
)
TARGET_CONTESTANTS = {
    "first@64": WITHOUT_CACHE,
    "first@1": (BARE, ONCEKEY_POSTGRES),
    "replay@64": (BARE, ONCEKEY_POSTGRES, ONCEKEY_POSTGRES_CACHE, ONCEKEY_REDIS_MEMORY, IDEMKIT_REDIS),
    "insert@64": (BARE, ONCEKEY_POSTGRES, ASYNCPG_BY_HAND, ASYNCPG_BY_HAND_HELD),
}
"""With ``--targets`` only these are needed. Memory too: it costs little and shows what the store costs."""
PARTS = ("store", "outbox", "start")
"""What runs without a web server: the store alone, the outbox against job queues, and the start of a process."""
NAMES = tuple(dict.fromkeys(workload.name for workload in WORKLOADS))


def chosen(only: set[str], *, targets: bool = False) -> list[tuple[Workload, list[Contestant]]]:
    """Which workloads run, each with its contestants, the bare app always among them.

    ``only`` names workloads (``first``, ``first@64``) and contestants (``idemkit``, ``postgres``, ``idemkit redis``);
    with both, those contestants in those workloads.
    """
    by_name = {word for word in only if word in NAMES or "@" in word}
    others = only - by_name - set(PARTS)
    if only and not by_name and not others:
        return []
    found = []
    for workload in WORKLOADS:
        if (targets and not workload.targets) or (by_name and not by_name & {workload.name, workload.id}):
            continue
        contestants: Sequence[Contestant] = TARGET_CONTESTANTS[workload.id] if targets else workload.contestants
        kept = [c for c in contestants if c is BARE or not others or c.matches(others)]
        if len(kept) > 1 or "bare" in others or (by_name and not others):
            found.append((workload, kept))
    return found
