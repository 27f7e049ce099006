"""Loads one contestant behind its web server once, and says what its processes and its store spent.

A contestant with a cache gets its keys into the cache first. Then PostgreSQL's statements are counted, too.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import load, statements
from benchmarks.contestants import BARE, Contestant
from benchmarks.places import DATABASES, Places
from benchmarks.quiet import tree_seconds
from benchmarks.serving import Served
from benchmarks.workloads import Workload

FILL_SECONDS = 0.5
"""How long replays fill a cache, and how long its last writes may take after that."""


@dataclass(frozen=True, slots=True)
class Loaded:
    measured: load.Measured
    app_us: float
    """CPU time of the web server's processes per request."""
    store_us: float | None
    """The same of the store's servers, if it has any here."""
    statements: int | None
    """How many PostgreSQL executed, in all; None: they were not counted."""


def one_load(
    at: Places,
    generator: Path,
    workload: Workload,
    contestant: Contestant,
    served: Served,
    *,
    seconds: float,
    warmup: float,
) -> Loaded:
    servers = {"postgres": at.postgres_pid, "redis": at.redis_pid}
    pids = [served.pid, *(pid for name in contestant.servers if (pid := servers.get(name)))]
    ask = partial(
        load.run,
        generator,
        served.port,
        "bare" if contestant is BARE else workload.mode,
        connections=workload.connections,
        keys=workload.keys,
        body=workload.body,
        marked=contestant.marks_replays,
        run=secrets.token_hex(6),
    )
    counted = _fill_cache(at, ask) if contestant.cached else None
    before = [tree_seconds(pid) for pid in pids]
    measured = ask(seconds=seconds, warmup=warmup)
    app, *stores = [(tree_seconds(pid) - was) / measured.answered * 1e6 for pid, was in zip(pids, before, strict=True)]
    executed = None if counted is None else _statements(at) - counted
    return Loaded(measured, app, sum(stores) if stores else None, executed)


def _fill_cache(at: Places, ask: Callable[..., load.Measured]) -> int | None:
    """Get the keys of this load into the cache; how many statements there were until then."""
    before = _statements(at)
    ask(seconds=FILL_SECONDS, warmup=0)
    time.sleep(FILL_SECONDS)
    if "postgres-statements" not in at.urls:
        return None
    counted = _statements(at)
    if counted == before:
        raise load.LoadFailed("no statement was counted while the keys were new, so the count says nothing")
    return counted


def _statements(at: Places) -> int:
    reader = at.urls.get("postgres-statements")
    return 0 if reader is None else statements.count(reader, DATABASES["postgres-cache"])
