"""Where the contestants keep their keys: a PostgreSQL with default durability, a Redis, a folder for SQLite.

Owns what is set up before and removed after a run, and the proof that a commit here really reaches the disk. Every
contestant has a database of its own, so that no contestant's tables grow by what another one does.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import by_hand, peers, statements
from benchmarks.apps import BUSINESS_TABLE

FAST_FSYNC_MS = 0.03
"""A disk that answers an fsync faster than this is a memory disk, or lies."""
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
MAX_CONNECTIONS = "400"
"""Room for the pools of every contestant at once: they run side by side, and are loaded in turns."""
DATABASES = {
    "postgres": "bench",
    "postgres-cache": "bench_cache",
    "postgres-store": "bench_store",
    "postgres-pgbench": "bench_pgbench",
    "postgres-bare": "bench_bare",
    "postgres-idemkit": "bench_idemkit",
    "postgres-dbos": "bench_dbos",
    **{f"postgres-{guard}": f"bench_{guard.replace('-', '_')}" for guard in by_hand.GUARDS},
    "postgres-oncekey-outbox": "bench_outbox",
    "postgres-procrastinate": "bench_procrastinate",
    "postgres-pgqueuer": "bench_pgqueuer",
}
CACHE_TIMEOUT = "timeout=1"
"""With the default of 50 ms, an app that waits for a core takes the cache for a hanging one, and asks PostgreSQL."""
READER = "bench_statements"
"""The database from which the statements of ``postgres-cache`` are counted."""
REDIS_DATABASES = {"redis-idemkit": 0, "redis-asgi-idempotency-header": 1, "redis": 2, "cache": 3}
BY_HAND = tuple(f"postgres-{guard}" for guard in by_hand.GUARDS)
WRITTEN_TO = ("postgres", "postgres-bare", "postgres-idemkit", "postgres-dbos", *BY_HAND)
"""The databases with a business table, for the handler that inserts a row."""


@dataclass(frozen=True, slots=True)
class Places:
    folder: Path
    urls: dict[str, str]
    """Store name to URL, for the stores that can run here."""
    missing: dict[str, str]
    """Store name to the reason why it cannot."""
    postgres_bin: Path | None = None
    postgres_pid: int | None = None
    redis_pid: int | None = None
    notes: dict[str, str] = field(default_factory=dict)


@contextmanager
def places(wanted: set[str]) -> Iterator[Places]:
    """Set up what the wanted stores need: those of ``contestants.py``, and ``redis`` for the peers on it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-bench-")))
        found = Places(folder, {}, {}, notes={"fsync": f"{(took := fsync_ms(folder)):.2f} ms"})
        if took < FAST_FSYNC_MS:
            found.notes["warning"] = f"{folder} is no real disk (fsync in {took:.3f} ms): set TMPDIR to one"
        if "memory" in wanted:
            found.urls["memory"] = "memory://"
        if "sqlite" in wanted:
            found.urls["sqlite"] = f"sqlite:///{folder / 'bench.db'}"
        if "sqlite-process" in wanted:
            found.urls["sqlite-process"] = f"sqlite:///{folder / 'bench-process.db'}?writer=process"
        if "postgres" in wanted:
            found = _with_postgres(stack, found)
        if "redis" in wanted:
            found = _with_redis(stack, found)
        _with_other_stores(stack, found, wanted)
        yield found


def protected_is_there() -> str | None:
    """Why the protected app cannot be built, or None."""
    for module in ("oncekey", "oncekey.web.asgi"):
        try:
            if importlib.util.find_spec(module) is None:
                return f"{module} does not exist"
        except ImportError as error:
            return f"{module}: {error}"
    return None


def fsync_ms(folder: Path, tries: int = 40) -> float:
    """The median time of making 8 KiB durable in this folder."""
    took = []
    with (folder / "fsync-probe").open("wb", buffering=0) as probe:
        for _ in range(tries):
            probe.write(os.urandom(8192))
            began = time.perf_counter()
            os.fsync(probe.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def _with_postgres(stack: ExitStack, found: Places) -> Places:
    from oncekey.testing.servers import PostgresServer, ServerUnavailable, find_postgres

    try:
        binaries = find_postgres()
        uncounted = statements.missing(binaries)
        settings = {"max_connections": MAX_CONNECTIONS, **({} if uncounted else statements.SETTINGS)}
        server = stack.enter_context(PostgresServer(bin_dir=binaries, settings=settings))
    except ServerUnavailable as reason:
        found.missing["postgres"] = str(reason)
        return found
    for name, value in DURABLE.items():
        [(actual,)] = server.execute(f"SHOW {name}")
        if actual != value:
            raise SystemExit(f"PostgreSQL has {name}={actual}: this benchmark counts only what is durable")
    [(version,)] = server.execute("SHOW server_version")
    for place, name in DATABASES.items():
        found.urls[place] = server.database(name)
        if place in WRITTEN_TO:
            server.execute(BUSINESS_TABLE, database=name)
        if place in BY_HAND:
            server.execute(by_hand.TABLE, database=name)
    if peers.version("idemkit"):
        asyncio.run(peers.prepare_idemkit(found.urls["postgres-idemkit"]))
    notes = {**found.notes, "postgres": f"{version}, fsync on"}
    if uncounted:
        notes["statements"] = f"not counted: {uncounted}"
    else:
        found.urls["postgres-statements"] = server.database(READER)
        statements.watch(server, DATABASES["postgres-cache"], READER)
    return Places(found.folder, found.urls, found.missing, binaries, server.pid, None, notes)


def _with_redis(stack: ExitStack, found: Places) -> Places:
    """Without persistence, as fast as it can be: what is compared with it is on disk."""
    from oncekey.testing.servers import RedisServer, ServerUnavailable

    try:
        server = stack.enter_context(RedisServer())
    except ServerUnavailable as reason:
        found.missing["redis"] = str(reason)
        return found
    for place, number in REDIS_DATABASES.items():
        found.urls[place] = f"{server.url.rpartition('/')[0]}/{number}"
    found.urls["cache"] += f"?{CACHE_TIMEOUT}"
    _set_up_redis(found.urls["redis"])
    notes = {**found.notes, "redis": "in memory only, nothing is made durable"}
    return Places(found.folder, found.urls, found.missing, found.postgres_bin, found.postgres_pid, server.pid, notes)


def _set_up_redis(url: str) -> None:
    command = [sys.executable, "-m", "oncekey", "migrate", "--init", "--store", url]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _with_other_stores(stack: ExitStack, found: Places, wanted: set[str]) -> None:
    """MySQL and Redis for oncekey itself: as durable as PostgreSQL is here."""
    from oncekey.testing.servers import MysqlServer, RedisServer, ServerUnavailable

    if "mysql" in wanted:
        try:
            settings = {"max-connections": MAX_CONNECTIONS}
            server = stack.enter_context(MysqlServer(settings=settings))
            found.urls["mysql"], found.urls["mysql-store"] = server.database("bench"), server.database("bench_store")
        except (ServerUnavailable, ImportError) as reason:
            found.missing["mysql"] = str(reason)
    if "redis-durable" in wanted:
        try:
            url = stack.enter_context(RedisServer(durable=True)).url
            _set_up_redis(url)
            found.urls["redis-durable"] = url
        except ServerUnavailable as reason:
            found.missing["redis-durable"] = str(reason)
