"""From measured constants to machines: ``python -m benchmarks.capacity``.

Simulates the one thing that cannot be multiplied: batches. Requests arrive at random at each app process; what comes
while a batch is under way is the next one (``engine/batching/thread_lane.py``), so batches grow with the load, and a
request costs the database less the more of them there are. The database is a number of cores that work on batches in
turn, and a disk that makes one commit durable after the other, all that wait together. Everything else is the product
of a rate and a constant. A step of the table ends where the first limit is reached, and says which.

What is measured and what is assumed stands in ``Constants`` and ``Machine``.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, fields

STEPS = (1_000, 3_000, 10_000, 30_000, 100_000)
BUSY = 0.7
"""Of a core or a process: above this, waiting grows faster than the load."""
ROOM = 1.5
"""Of the disk, for what waits for a vacuum and for the log."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Measured: ``python -m benchmarks.growth`` (costs, bytes) and ``make bench`` (the app's CPU)."""

    app_us: float = 220.0
    """CPU of the app's process for one protected first request, the framework included."""
    batch_us: float = 820.0
    """CPU of the server for a pair of statements, however many rows they carry."""
    row_us: float = 75.0
    """And for each row of the pair, at 10 million keys (50 at 10 thousand)."""
    wal_bytes: float = 1_200.0
    image_bytes: float = 9_500.0
    """Page images of one request: right after a checkpoint, at 10 million keys."""
    key_bytes: float = 690.0
    index_bytes: float = 88.0
    """Of the primary key: random keys touch all of it, so it has to be in memory."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Assumed: one database server. Not measured here."""

    cores: int = 32
    fsync_ms: float = 0.5
    wal_mb: float = 500.0
    """What its disk and its standbys take in, a second."""
    connections: int = 1_000
    memory_gb: float = 256.0
    disk_gb: float = 4_000.0


@dataclass(frozen=True, slots=True)
class Load:
    """What the simulation found for one server."""

    batch: float
    cores: float
    commits: float
    wait_ms: float
    """Median of one verb: waiting for its turn, the statement, the commit."""
    wait_p99_ms: float


def simulate(rate: float, processes: int, machine: Machine, constants: Constants, requests: int = 20_000) -> Load:
    """``requests`` verbs (two for each request) at this rate of requests per second, over so many processes."""
    chance = random.Random(7)
    queues: list[deque[float]] = [deque() for _ in range(2 * processes)]  # one lane reserves, one finishes
    working = [False] * len(queues)
    free = [0.0] * machine.cores
    heapq.heapify(free)
    flush, flush_at = machine.fsync_ms / 1000, -1.0
    now, came = 0.0, 0
    events: list[tuple[float, int, int]] = []  # when, 0 a verb comes or 1 a batch ends, lane
    heapq.heappush(events, (0.0, 0, chance.randrange(len(queues))))
    waits: list[float] = []
    batches, spent = 0, 0.0

    def start(lane: int) -> None:
        nonlocal flush_at, batches, spent
        count = len(queues[lane])
        work = (constants.batch_us / 2 + count * constants.row_us / 2) / 1e6
        done = max(heapq.heappop(free), now) + work
        heapq.heappush(free, done)
        # One flush at a time. Requests that are done before the next flush begins are in it.
        if done > flush_at:
            flush_at = max(done, flush_at + flush)
        ended = flush_at + flush
        waits.extend(ended - at for at in queues[lane])
        queues[lane].clear()
        working[lane] = True
        batches += 1
        spent += work
        heapq.heappush(events, (ended, 1, lane))

    while came < requests or any(working):
        now, kind, lane = heapq.heappop(events)
        if kind == 0:
            if came >= requests:
                continue
            came += 1
            queues[lane].append(now)
            heapq.heappush(events, (now + chance.expovariate(2 * rate), 0, chance.randrange(len(queues))))
        else:
            working[lane] = False
        if queues[lane] and not working[lane]:
            start(lane)
    ordered = sorted(waits)
    return Load(
        batch=came / batches,
        cores=spent / now,
        commits=batches / now,
        wait_ms=statistics.median(ordered) * 1000,
        wait_p99_ms=ordered[int(len(ordered) * 0.99)] * 1000,
    )


@dataclass(frozen=True, slots=True)
class Step:
    rate: int
    processes: int
    servers: int
    load: Load
    """Of one of the servers."""
    wal_mb: float
    disk_gb: float
    index_gb: float
    connections: int
    tightest: str
    """Which limit of a server is nearest, and how near."""


def plan(rate: int, constants: Constants, machine: Machine, retention_hours: float) -> Step:
    """The fewest servers on which no limit is passed. Each has the tenants, and so the app processes, of its share."""
    processes = math.ceil(rate * constants.app_us / 1e6 / BUSY)
    servers = 0
    while True:
        servers += 1
        share, apps = rate / servers, math.ceil(processes / servers)
        load = simulate(share, apps, machine, constants)
        wal = share * (constants.wal_bytes + constants.image_bytes) / 1e6
        keys = share * retention_hours * 3600
        disk = keys * constants.key_bytes * ROOM / 1e9
        index = keys * constants.index_bytes / 1e9
        connections = processes * 4  # any process may serve any tenant
        used = {
            "cores": load.cores / (machine.cores * BUSY),
            "WAL": wal / machine.wal_mb,
            "disk": disk / machine.disk_gb,
            "index in memory": index / (machine.memory_gb * BUSY),
            "connections": connections / machine.connections,
        }
        name = max(used, key=lambda each: used[each])
        if used[name] <= 1 or servers >= 64:
            return Step(rate, processes, servers, load, wal, disk, index, connections, f"{name} {used[name]:.0%}")


def table(constants: Constants, machine: Machine, retention_hours: float, steps: tuple[int, ...] = STEPS) -> list[Step]:
    return [plan(rate, constants, machine, retention_hours) for rate in steps]


HEAD = (
    "requests/s",
    "app processes",
    "servers",
    "rows a batch",
    "commits/s",
    "server cores busy",
    "WAL MB/s",
    "disk GB",
    "index GB",
    "connections",
    "a verb, ms: median, p99",
    "nearest limit",
)


def show(found: list[Step]) -> str:
    """As docs/scaling.md has it."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for step in found:
        load = step.load
        numbers = (
            step.rate,
            step.processes,
            step.servers,
            round(load.batch, 1),
            round(load.commits),
            round(load.cores, 1),
        )
        sizes = (round(step.wal_mb), round(step.disk_gb), round(step.index_gb), step.connections)
        words = (f"{load.wait_ms:.1f}, {load.wait_p99_ms:.1f}", step.tightest)
        rows.append((*(f"{number:,}" for number in (*numbers, *sizes)), *words))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    standard = Machine()
    for field in fields(Machine):
        value = getattr(standard, field.name)
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help=f"of one database server ({value:g})")
    parser.add_argument("--retention-hours", type=float, default=24.0)
    options = parser.parse_args(arguments)
    machine = Machine(**{field.name: getattr(options, field.name) for field in fields(Machine)})
    print(f"{Constants()}\n{machine}\nper server, where there are several:\n")
    print(show(table(Constants(), machine, options.retention_hours)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
