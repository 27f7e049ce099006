"""The ratios that this project has set itself to reach, and whether one run did.

Owns the numbers; each is a ratio of two figures of the same round, and its median over the rounds decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.contestants import (
    ASYNCPG_BY_HAND,
    ASYNCPG_BY_HAND_HELD,
    BARE,
    IDEMKIT_POSTGRES,
    IDEMKIT_REDIS,
    ONCEKEY_POSTGRES,
    ONCEKEY_POSTGRES_CACHE,
    ONCEKEY_REDIS_MEMORY,
    ONCEKEY_SQLITE,
    ONCEKEY_SQLITE_PROCESS,
    PEERS,
)
from benchmarks.report import Sample, number

STORE = "store alone"
PGBENCH = "pgbench, 32 clients"
LANES = "oncekey postgres, 128 callers"
RAW = "oncekey postgres, one thread, batches of 64"
SQLITE_LANES = "oncekey sqlite, 128 callers"
MYSQL_LANES = "oncekey mysql, 128 callers"
MYSQL_ROWS = "PyMySQL, 32 connections, a row each"
ROUND_TRIPS = "raw round trips"
TWO_COMMITS = "two statements, two commits"
ENQUEUE, EXECUTE = "outbox enqueue", "outbox execute"
QUEUES = ("procrastinate", "pgqueuer")
FIRST, FIRST_ALONE, REPLAY, INSERT = "first@64", "first@1", "replay@64", "insert@64"
START, PYTHON, IMPORT, VERSION = "start", "python -c pass", "import oncekey", "oncekey --version"


class Rounds:
    """The samples of one run, by workload, contestant and round."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)

    def rates(self, workload: str, contestant: str) -> dict[int, float]:
        return self._by_round(workload, contestant, lambda sample: sample.rate)

    def p50s(self, workload: str, contestant: str) -> dict[int, float]:
        return self._by_round(workload, contestant, lambda sample: sample.p50_ms)

    def statements(self, workload: str, contestant: str) -> list[float]:
        """How many of them there were in all rounds together; empty: they were not counted."""
        counted = [
            sample.statements
            for sample in self._samples
            if (sample.workload, sample.contestant) == (workload, contestant) and sample.statements is not None
        ]
        return [float(sum(counted))] if counted else []

    def _by_round(self, workload: str, contestant: str, value: Callable[[Sample], float | None]) -> dict[int, float]:
        found: dict[int, list[float]] = {}
        for sample in self._samples:
            if (sample.workload, sample.contestant) == (workload, contestant) and (one := value(sample)) is not None:
                found.setdefault(sample.round, []).append(one)
        return {number: statistics.mean(values) for number, values in found.items()}


def divided(above: dict[int, float], below: dict[int, float]) -> list[float]:
    return [above[number] / below[number] for number in above if below.get(number)]


def best(several: Sequence[dict[int, float]]) -> dict[int, float]:
    """The best of several in each round."""
    rounds = {number for rates in several for number in rates}
    return {number: max(rates[number] for rates in several if number in rates) for number in rounds}


def _added_latency(rounds: Rounds) -> list[float]:
    bare, ours = (rounds.p50s(FIRST_ALONE, c.name) for c in (BARE, ONCEKEY_POSTGRES))
    added = {number: ours[number] - bare[number] for number in ours if number in bare}
    return divided(added, rounds.p50s(ROUND_TRIPS, TWO_COMMITS))


def _statements(rounds: Rounds) -> list[float]:
    return rounds.statements(REPLAY, ONCEKEY_POSTGRES_CACHE.name)


def _start_time(rounds: Rounds) -> list[float]:
    return divided(rounds.rates(START, PYTHON), rounds.rates(START, VERSION))


@dataclass(frozen=True, slots=True)
class Target:
    title: str
    wanted: float
    ratios: Callable[[Rounds], list[float]] | None
    """None: another command measures it."""
    at_most: bool = False
    by: str = ""


def _to(workload: str, above: str, *below: str) -> Callable[[Rounds], list[float]]:
    return lambda rounds: divided(rounds.rates(workload, above), best([rounds.rates(workload, one) for one in below]))


BY_INSTRUCTIONS = "make bench ARGS=--instructions"
OURS = ONCEKEY_POSTGRES.name

TARGETS = (
    Target("instructions, bare / first request", 0.58, None, by=BY_INSTRUCTIONS),
    Target("instructions, bare / replay", 1.04, None, by=BY_INSTRUCTIONS),
    Target("first request, PostgreSQL / bare app", 0.58, _to(FIRST, OURS, BARE.name)),
    Target("replay, PostgreSQL / bare app", 1.04, _to(REPLAY, OURS, BARE.name)),
    Target("replays from a cache: statements of PostgreSQL, in all", 0, _statements, at_most=True),
    Target("first request / asyncpg by hand", 3, _to(FIRST, OURS, ASYNCPG_BY_HAND.name, ASYNCPG_BY_HAND_HELD.name)),
    Target("first request / idemkit on PostgreSQL", 7.5, _to(FIRST, OURS, IDEMKIT_POSTGRES.name)),
    Target("first request / idemkit on Redis", 3.5, _to(FIRST, OURS, IDEMKIT_REDIS.name)),
    Target("first request, Redis / idemkit on it", 3, _to(FIRST, ONCEKEY_REDIS_MEMORY.name, IDEMKIT_REDIS.name)),
    Target("replay, Redis / idemkit on it", 3, _to(REPLAY, ONCEKEY_REDIS_MEMORY.name, IDEMKIT_REDIS.name)),
    Target("first request / best peer on any store", 3.5, _to(FIRST, OURS, *(peer.name for peer in PEERS))),
    Target(
        "one connection: added median latency / two raw round trips with commit", 1.25, _added_latency, at_most=True
    ),
    Target("first request, SQLite / bare app", 0.45, _to(FIRST, ONCEKEY_SQLITE.name, BARE.name)),
    Target("first request, SQLite, writer=process / bare app", 0.5, _to(FIRST, ONCEKEY_SQLITE_PROCESS.name, BARE.name)),
    Target("transactional handler with one insert / the plain insert", 0.42, _to(INSERT, OURS, BARE.name)),
    Target(
        "transactional handler with one insert / by hand in two transactions",
        0.9,
        _to(INSERT, OURS, ASYNCPG_BY_HAND.name, ASYNCPG_BY_HAND_HELD.name),
    ),
    Target("outbox execute, no-op tasks / best of procrastinate and pgqueuer", 2, _to(EXECUTE, "oncekey", *QUEUES)),
    Target("store alone at 128 callers / pgbench one row per transaction", 4, _to(STORE, LANES, PGBENCH)),
    Target("store alone on MariaDB / PyMySQL, one row per transaction", 3, _to(STORE, MYSQL_LANES, MYSQL_ROWS)),
    Target("time of `oncekey --version` / of `python -c pass`", 5, _start_time, at_most=True),
    Target("first request at 10 million keys / at 10 thousand", 0.9, None, by="python -m benchmarks.growth"),
    Target(
        "sweep and reap of a fixed batch at 10 million / at 10 thousand",
        1.2,
        None,
        at_most=True,
        by="python -m benchmarks.growth",
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one target."""

    title: str
    wanted: str
    ratio: float | None
    least: float | None
    most: float | None
    reached: str
    """yes, no, or the name of the benchmark that measures it."""

    def cells(self) -> tuple[str, ...]:
        spread = "" if self.least is None else f"{self.least:.2f}..{self.most:.2f}"
        return (self.title, number(self.ratio), spread, self.wanted, self.reached)


HEADINGS = ("must show", "ratio", "min..max", "wanted", "reached")


def outcomes(samples: Iterable[Sample]) -> list[Outcome]:
    rounds = Rounds(samples)
    return [_outcome(target, rounds) for target in TARGETS]


def _outcome(target: Target, rounds: Rounds) -> Outcome:
    wanted = f"{'≤' if target.at_most else '≥'} {target.wanted:g}"
    ratios = target.ratios(rounds) if target.ratios else []
    if not ratios:
        return Outcome(target.title, wanted, None, None, None, target.by or "not measured")
    ratio = statistics.median(ratios)
    good = ratio <= target.wanted if target.at_most else ratio >= target.wanted
    return Outcome(target.title, wanted, ratio, min(ratios), max(ratios), "yes" if good else "no")
