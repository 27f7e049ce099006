"""The disk is full, again and again, while keys are in flight and new ones come: 503, and nothing is lost.

A small tmpfs, filled to its last byte and emptied. PostgreSQL is hit where it extends a table, and, harder, where it
needs the next piece of its log: it gives up (PANIC) and cannot come back before there is room. What is charged is
written down elsewhere, as a provider does.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.servers import PostgresServer, temporary_root
from tests.faults.campaign import Fault, NotHere, Run
from tests.faults.local_app import PATIENCE_SECONDS, LocalApp, Story, gather
from tests.faults.local_app_check import checked, prepare

SQLITE_MEGABYTES = 8
POSTGRES_MEGABYTES = 192
IN_FLIGHT = 6
NEW = 6
FULL_SECONDS = 0.4


class SmallDisk:
    """A file system of its own, in memory. Use :func:`small_disk`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Leave not a byte. What others freed meanwhile is taken as well."""
        with self._filler.open("ab", buffering=0) as filler:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(size))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def remount(self, how: str) -> None:
        _run("mount", "-o", f"remount,{how}", str(self.path))


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that the user of a server can reach, which pytest's cannot be."""
    with TemporaryDirectory(prefix="oncekey-fault-", dir=temporary_root()) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def small_disk(megabytes: int) -> Iterator[SmallDisk]:
    with open_folder() as path:
        try:
            _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0777", "oncekey", str(path))
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotHere(f"a small file system cannot be mounted here, which takes root: {error}") from error
        try:
            yield SmallDisk(path)
        finally:
            _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class OnDisk(PostgresServer):
    """A server whose data is on a given disk."""

    def __init__(self, disk: Path, **settings: str) -> None:
        super().__init__(fsync=False, settings=settings)
        self._disk = disk

    @property
    def _data(self) -> Path:
        return self._disk / "data"


def full(run: Run) -> None:
    if run.store == "sqlite":
        with small_disk(SQLITE_MEGABYTES) as disk:
            url = f"sqlite:///{disk.path / 'local_app.db'}"
            prepare(url)
            store = SqliteStore(url.removeprefix("sqlite:///"), timeout=0.3)
            local = LocalApp(store, url=url, begin_timeout=0.3, works=True)
            asyncio.run(_fill_and_empty(run, local, url, disk, partial(_no_log, url), _nothing))
        return
    # No old pieces of the log are kept for later: the next one needs room.
    settings = {"wal_recycle": "off", "max_wal_size": "32MB", "min_wal_size": "32MB", "autovacuum": "off"}
    with small_disk(POSTGRES_MEGABYTES) as disk, OnDisk(disk.path, **settings) as server:
        url = server.database("local_app")
        prepare(url)
        local = LocalApp(PostgresStore(url, timeout=1.0), url=url, begin_timeout=0.5, works=True)
        local.pad = 1500

        async def panic() -> None:
            """Every second time it is the log that finds no room."""
            if run.random.random() < 0.5:
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(server.execute, "SELECT pg_switch_wal()", timeout=2.0)

        async def up_again() -> None:
            if not server.running or not await asyncio.to_thread(server._answers):
                run.notes.append("PANIC")
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

        asyncio.run(_fill_and_empty(run, local, url, disk, panic, up_again))
    panics = run.notes.count("PANIC")
    run.notes = [note for note in run.notes if note != "PANIC"] + [f"{panics} times PostgreSQL gave up"]


async def _nothing() -> None:
    return None


async def _no_log(url: str) -> None:
    """SQLite writes over its old log where it can: without one it needs room."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=1.0)) as own:
        own.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


async def _fill_and_empty(
    run: Run,
    local: LocalApp,
    url: str,
    disk: SmallDisk,
    before: Callable[[], Awaitable[None]],
    after: Callable[[], Awaitable[None]],
) -> None:
    refused = 0
    async with local.open():
        while run.wanting:
            local.gate, local.waiting = asyncio.Event(), 0
            held = [local.story(kind, waits=True) for kind in ("external", "repeatable") * (IN_FLIGHT // 2)]
            asking: list[Any] = [asyncio.create_task(local.pay(story)) for story in held]
            async with asyncio.timeout(PATIENCE_SECONDS):
                while local.waiting < len(held):
                    await asyncio.sleep(0.005)
            was = local.statuses[503]
            if run.store == "sqlite":
                await before()
            disk.fill()
            if run.store == "postgres":
                await before()
            local.gate.set()
            new: list[Story] = [local.story() for _ in range(NEW)]
            asking += [asyncio.create_task(local.pay(story)) for story in new]
            until = asyncio.get_running_loop().time() + FULL_SECONDS
            while asyncio.get_running_loop().time() < until or local.statuses[503] == was:
                disk.fill()
                await asyncio.sleep(0.02)
                if asyncio.get_running_loop().time() > until + PATIENCE_SECONDS:
                    raise RuntimeError("the disk is full, and no write failed")
            refused += local.statuses[503] - was
            disk.empty()
            await after()
            await gather(asking)
            run.hit(len(held) + len(new))
            run.asked(sum(local.statuses.values()) - run.requests)
    await checked(run, local, url)
    run.notes.append(f"{refused} refused")


FAULTS = (
    Fault(
        "disk full",
        full,
        {"sqlite": 100, "postgres": 100},
        short=IN_FLIGHT + NEW,
        promises=("I1", "I2", "I4", "I7", "I8"),
    ),
)
