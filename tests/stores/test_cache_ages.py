"""How old an entry of the cache can be if the process is stopped between the store's answer and the write.

The clocks stand still until a test moves them. A stop is a move of the clocks right after the store has answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from oncekey.core.audit import Audit
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import End, Swap, swap
from oncekey.stores.cache import front
from oncekey.stores.cache.client import CacheDown
from oncekey.stores.cache.entries import Entries, secret_of
from oncekey.stores.cache.front import MARK_SECONDS, MAX_AGE_SECONDS, Cache, CachedInLoop, reserve_behind, swap_behind
from tests.engine.doubles import RESPONSE, record_of, reservation

TTL = 60.0
WANTED = reservation("k")
OPEN = record_of(WANTED)
DONE = record_of(WANTED, State.COMPLETED, response=RESPONSE, finished_at=1_000.0)
COMPLETE = swap(OPEN, Event.COMPLETE, Actor.OWNER, to_state=State.COMPLETED, response=RESPONSE)


class Clocks:
    """Stands for the module ``time``. Both clocks stand still until ``forward`` moves them."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return 500.0 + self.passed

    def time(self) -> float:
        return 1_800_000_000.0 + self.passed

    def forward(self, seconds: float) -> None:
        self.passed += seconds


class Redis:
    """A cache that drops each entry at the end of its time, by the test's clocks."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.entries: dict[bytes, tuple[float, bytes]] = {}
        self.late = 0.0
        """For how many seconds the writer's process is stopped just before its write arrives."""
        self.down = False

    def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        until_and_entry = [self.entries.get(name, (0.0, b"")) for name in names]
        return [entry if until > self.clocks.passed else None for until, entry in until_and_entry]

    def add(self, entries: Mapping[bytes, bytes], seconds: Mapping[bytes, float]) -> None:
        self.clocks.forward(self.late)
        for name, entry in entries.items():
            if self.get([name]) == [None]:
                self.entries[name] = (self.clocks.passed + seconds[name], entry)

    def replace(self, name: bytes, mark: bytes, seconds: float) -> None:
        if self.down:
            raise CacheDown("refused")
        self.entries[name] = (self.clocks.passed + seconds, mark)

    def in_loop(self) -> RedisInLoop:
        return RedisInLoop(self)

    def close(self) -> None: ...


@dataclass
class RedisInLoop:
    server: Redis

    async def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        return self.server.get(names)

    def abandon(self) -> None: ...


class Database:
    """Answers with one final row. ``answered`` is called between the answer and its arrival in the caller."""

    def __init__(self) -> None:
        self.answered: Callable[[], None] = lambda: None

    def identity(self) -> str:
        return "one"

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        self.answered()
        return [Found(DONE) for _ in batch]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        self.answered()
        return [DONE for _ in batch]


@dataclass
class DatabaseInLoop:
    database: Database

    async def reserve(self, batch: Sequence[Reservation]) -> Sequence[float | Record | None]:
        return [found.record for found in self.database.reserve(batch)]

    async def swap(self, batch: Sequence[End | Swap]) -> Sequence[float | None]:
        self.database.answered()
        return [1_000.0 for _ in batch]

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[Sequence[float | Record | None], Sequence[float | None]]:
        return [None for _ in begins], await self.swap(ends)

    def abandon(self) -> None: ...


class Setup:
    """A cache in front of a database."""

    def __init__(self, clocks: Clocks, ttl: float = TTL) -> None:
        self.clocks, self.redis, self.database = clocks, Redis(clocks), Database()
        self.cache = Cache(self.redis, Entries(secret_of("0123456789abcdef"), ttl), self.database)
        self.cache.look_up([WANTED])  # it learns the identity of the database

    def in_loop(self) -> CachedInLoop:
        return CachedInLoop(DatabaseInLoop(self.database), self.cache)

    def replayed(self) -> bool:
        return self.cache.look_up([WANTED]) != [None]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Setup]]:
    clocks = Clocks()
    monkeypatch.setattr(front, "time", clocks)
    made: list[Setup] = []

    def make(ttl: float = TTL) -> Setup:
        made.append(Setup(clocks, ttl))
        return made[-1]

    yield make
    for each in made:
        each.cache.close()


Make = Callable[..., Setup]


def run(coroutine: Awaitable[object]) -> None:
    async def awaited() -> None:
        await coroutine

    asyncio.run(awaited())


PATHS: dict[str, Callable[[Setup], object]] = {
    "reserve": lambda at: reserve_behind(at.cache, at.database.reserve)([WANTED]),
    "swap": lambda at: swap_behind(at.cache, at.database.swap)([COMPLETE]),
    "reserve in the loop": lambda at: run(at.in_loop().reserve([WANTED])),
    "swap in the loop": lambda at: run(at.in_loop().swap([COMPLETE])),
    "both in the loop": lambda at: run(at.in_loop().both([reservation("other")], [COMPLETE])),
}
each_path = pytest.mark.parametrize("path", PATHS.values(), ids=list(PATHS))


@each_path
def test_row_is_written_if_the_process_was_not_stopped(setup: Make, path: Callable[[Setup], object]) -> None:
    at = setup()
    path(at)
    at.cache.flush()
    assert at.replayed()


@each_path
def test_forgotten_answer_is_not_replayed_if_its_reader_was_stopped_for_longer_than_the_mark(
    setup: Make, path: Callable[[Setup], object]
) -> None:
    at = setup(ttl=600.0)

    def forgotten_and_stopped() -> None:
        assert at.cache.forget(WANTED.scope, WANTED.key)
        at.clocks.forward(MARK_SECONDS + 10)

    at.database.answered = forgotten_and_stopped
    path(at)
    at.cache.flush()
    assert not at.replayed()


@each_path
def test_time_to_live_counts_from_before_the_store_was_asked(setup: Make, path: Callable[[Setup], object]) -> None:
    at = setup()
    stopped = MAX_AGE_SECONDS - 1
    at.database.answered = lambda: at.clocks.forward(stopped)
    path(at)
    at.cache.flush()
    at.clocks.forward(TTL - stopped - 0.5)
    assert at.replayed()
    ((until, _),) = at.redis.entries.values()
    assert until == pytest.approx(TTL), "Redis drops it then, too"
    at.redis.entries = {name: (1e9, entry) for name, (_, entry) in at.redis.entries.items()}
    at.clocks.forward(1.0)
    assert not at.replayed(), "and if Redis did not, the entry would not open"


def test_entry_that_arrives_late_opens_for_no_longer(setup: Make) -> None:
    """The writer's process is stopped when the row's age was looked at already."""
    at = setup()
    at.redis.late = TTL - 1
    PATHS["reserve"](at)
    at.cache.flush()
    assert at.replayed()
    at.clocks.forward(1.5)
    assert not at.replayed()


def test_row_that_is_older_than_the_time_to_live_is_not_written(setup: Make) -> None:
    at = setup(ttl=2.0)
    at.database.answered = lambda: at.clocks.forward(3.0)
    PATHS["reserve"](at)
    at.cache.flush()
    assert at.redis.entries == {}


def test_row_that_was_deleted_is_not_written_if_the_mark_could_not_be(setup: Make) -> None:
    at = setup()
    at.redis.down = True
    forget = swap(DONE, Event.FORGET, Actor.OPERATOR, audit=Audit("ops", "a test"))
    assert swap_behind(at.cache, at.database.swap)([forget]) == [DONE]
    at.cache.flush()
    assert at.redis.entries == {}
