"""Who runs against whom: the bare app, oncekey on its stores, the peers on theirs, and what people write by hand.

Owns names and order; ``workloads.py`` says what they are asked, ``peers.py`` how the peers are set up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import by_hand, peers
from benchmarks.places import Places

FRAMEWORKS = ("starlette", "fastapi")
STORES = ("memory", "sqlite", "sqlite-process", "postgres", "mysql", "redis-durable", "redis")
"""Those of oncekey that are measured."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One guard on one store."""

    guard: str
    store: str | None
    """None: bare."""
    marks_replays: bool = True
    """Its replays carry a header that says so."""
    cached: bool = False
    """A Redis is the cache in front of its store."""

    @property
    def name(self) -> str:
        cache = "+cache" if self.cached else ""
        return self.guard if self.store is None else f"{self.guard} {self.store}{cache}"

    @property
    def servers(self) -> tuple[str, ...]:
        """The stores that have to be there (``places.py``)."""
        return (*([self.store] if self.store else []), *(["redis"] if self.cached else []))

    @property
    def is_peer(self) -> bool:
        return self.guard in peers.PACKAGES

    @property
    def place(self) -> str | None:
        """Where in :class:`Places` its store is: a database of its own."""
        if self.cached:
            return f"{self.store}-cache"
        own = self.is_peer or self.guard in by_hand.GUARDS
        return f"{self.store}-{self.guard}" if self.store and own else self.store

    def matches(self, words: set[str]) -> bool:
        """Whether ``--only`` names it: by its name, or by its guard or its store."""
        return bool(words & {self.name, self.guard, self.store})


BARE = Contestant("bare", None)
ONCEKEY_POSTGRES = Contestant("oncekey", "postgres")
ONCEKEY_POSTGRES_CACHE = Contestant("oncekey", "postgres", cached=True)
"""Only for replays: a first request cannot be in the cache."""
ONCEKEY_SQLITE = Contestant("oncekey", "sqlite")
ONCEKEY_SQLITE_PROCESS = Contestant("oncekey", "sqlite-process")
ONCEKEY_MEMORY = Contestant("oncekey", "memory")
ONCEKEY_MYSQL = Contestant("oncekey", "mysql")
ONCEKEY_REDIS = Contestant("oncekey", "redis-durable")
"""Each command is on disk before its answer, unlike in the Redis of the peers."""
ONCEKEY_REDIS_MEMORY = Contestant("oncekey", "redis")
"""On the same Redis as the peers."""
IDEMKIT_POSTGRES = Contestant("idemkit", "postgres")
IDEMKIT_REDIS = Contestant("idemkit", "redis")
ASGI_HEADER_REDIS = Contestant("asgi-idempotency-header", "redis")
DBOS_POSTGRES = Contestant("dbos", "postgres", marks_replays=False)
ASYNCPG_BY_HAND = Contestant(by_hand.ASYNCPG, "postgres")
ASYNCPG_BY_HAND_HELD = Contestant(by_hand.ASYNCPG_HELD, "postgres")
SQLALCHEMY_BY_HAND = Contestant(by_hand.SQLALCHEMY, "postgres")
BY_HAND = (ASYNCPG_BY_HAND, ASYNCPG_BY_HAND_HELD, SQLALCHEMY_BY_HAND)

ALL = (
    BARE,
    ONCEKEY_POSTGRES,
    ONCEKEY_SQLITE,
    ONCEKEY_SQLITE_PROCESS,
    ONCEKEY_MEMORY,
    ONCEKEY_MYSQL,
    ONCEKEY_REDIS,
    ONCEKEY_REDIS_MEMORY,
    IDEMKIT_POSTGRES,
    IDEMKIT_REDIS,
    ASGI_HEADER_REDIS,
    DBOS_POSTGRES,
    *BY_HAND,
    ONCEKEY_POSTGRES_CACHE,
)
WITHOUT_CACHE = tuple(contestant for contestant in ALL if not contestant.cached)
PEERS = tuple(contestant for contestant in ALL if contestant.is_peer)


def cannot_run(contestant: Contestant, at: Places) -> str | None:
    """Why it is left out, or None."""
    if contestant.is_peer and peers.version(contestant.guard) is None:
        return "not installed"
    for server in contestant.servers:
        if server in at.missing:
            return at.missing[server]
    if contestant.place is not None and contestant.place not in at.urls:
        return f"no {contestant.store} in this run"
    return None


def order(contestants: Sequence[Contestant], round_number: int) -> list[Contestant]:
    """Another order in every round, with the bare app first and last: what drifts, drifts for all alike."""
    bare = [contestant for contestant in contestants if contestant.store is None]
    others = [contestant for contestant in contestants if contestant.store is not None]
    turn = round_number % len(others) if others else 0
    others = others[turn:] + others[:turn]
    return bare + (others[::-1] if round_number % 2 else others) + (bare if others else [])
