"""Where the contestants keep their keys: a PostgreSQL with default durability, a folder for SQLite.

Owns what is set up before and removed after a run, and the proof that a commit here really reaches the disk.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FAST_FSYNC_MS = 0.03
"""A disk that answers an fsync faster than this is a memory disk, or lies."""
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


@dataclass(frozen=True, slots=True)
class Places:
    folder: Path
    urls: dict[str, str]
    """Store name to URL, for the stores that can run here."""
    missing: dict[str, str]
    """Store name to the reason why it cannot."""
    postgres_bin: Path | None = None
    postgres_pid: int | None = None
    notes: dict[str, str] = field(default_factory=dict)


@contextmanager
def places(wanted: set[str]) -> Iterator[Places]:
    """Set up what the wanted stores need."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-bench-")))
        found = Places(folder, {}, {}, notes={"fsync": f"{(took := fsync_ms(folder)):.2f} ms"})
        if took < FAST_FSYNC_MS:
            found.notes["warning"] = f"{folder} is no real disk (fsync in {took:.3f} ms): set TMPDIR to one"
        if "memory" in wanted:
            found.urls["memory"] = "memory://"
        if "sqlite" in wanted:
            found.urls["sqlite"] = f"sqlite:///{folder / 'bench.db'}"
        if "postgres" in wanted:
            found = _with_postgres(stack, found)
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
        server = stack.enter_context(PostgresServer(bin_dir=binaries))
    except ServerUnavailable as reason:
        found.missing["postgres"] = str(reason)
        return found
    for name, value in DURABLE.items():
        [(actual,)] = server.execute(f"SHOW {name}")
        if actual != value:
            raise SystemExit(f"PostgreSQL has {name}={actual}: this benchmark counts only what is durable")
    [(version,)] = server.execute("SHOW server_version")
    found.urls["postgres"] = server.database("bench")
    found.urls["postgres-store"] = server.database("bench_store")
    found.urls["postgres-pgbench"] = server.database("bench_pgbench")
    notes = {**found.notes, "postgres": f"{version}, fsync on"}
    return Places(found.folder, found.urls, found.missing, binaries, server.pid, notes)
