"""What a process runs out of: a file system that can be written, connections, files. 503, or one clear sentence at the
start; and when it is back, nothing was lost.

``read-only``    SQLite: its file system is mounted read-only. PostgreSQL: the server comes back as a standby, as after
                 a failover, and is promoted later
``connections``  all that PostgreSQL allows are taken, just when the app has lost its own
``files``        the app's process may not open one more, just when the app has lost its connections
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.errors import OperatorError
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.company import Child
from tests.faults.campaign import Fault, Run
from tests.faults.disks import SQLITE_MEGABYTES, SmallDisk, small_disk
from tests.faults.local_app import PATIENCE_SECONDS, LocalApp, gather
from tests.faults.local_app_check import checked, prepare

WAVE = 10
SECONDS = 0.4

Want = Callable[[], contextlib.AbstractContextManager[None]]
"""While inside, there is none of it."""


async def _waves(run: Run, local: LocalApp, url: str, want: Want, *, certain: bool = True) -> None:
    """Keys in flight and new ones meet the want. ``certain``: nothing can be reserved while it lasts."""
    wants = 0
    async with local.open():
        while run.wanting:
            await _wave(run, local, url, want, wants if certain else None)
            wants += 1
    await checked(run, local, url)


async def _wave(run: Run, local: LocalApp, url: str, want: Want, number: int | None) -> None:
    local.gate, local.waiting = asyncio.Event(), 0
    done = [local.story(), local.story("external")]
    await gather([local.pay(story) for story in done])
    for story in done:
        del story.answers[1:]
    held = [local.story("external", waits=True) for _ in range(WAVE // 2)]
    asking: list[Any] = [asyncio.create_task(local.pay(story)) for story in held]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while local.waiting < len(held):
            await asyncio.sleep(0.005)
    was = local.statuses[503]
    once = OnceKey(url, scope=SINGLE_TENANT)
    with want():
        local.outage = lambda: number
        _starts(run, once)
        local.gate.set()
        new = [local.story() for _ in range(WAVE - len(held))]
        asking += [asyncio.create_task(local.pay(story)) for story in [*new, *done]]
        await asyncio.sleep(SECONDS)
        local.outage = lambda: None
    if local.statuses[503] == was:
        raise RuntimeError("the resource was used up, and no request was refused")
    await gather(asking)
    run.hit(WAVE)
    run.asked(sum(local.statuses.values()) - run.requests)


def _starts(run: Run, once: OnceKey) -> None:
    """An app that starts now says in one sentence what is wrong."""
    try:
        once.start()
    except OperatorError as error:
        said = str(error)
        if "\n" in said or len(said) < 20:
            run.violated("I7", f"not a sentence to start with: {error!r}")
        if (told := re.sub(r"/\S+", "…", said)) not in run.notes:
            run.notes.append(told)
    except Exception as error:
        run.violated("I7", f"an app that starts now ends with {error!r}")
    finally:
        once.close()


# -- read-only ---------------------------------------------------------------------------------------------------------


def read_only(run: Run) -> None:
    if run.store == "sqlite":
        with small_disk(SQLITE_MEGABYTES) as disk:
            path = disk.path / "local_app.db"
            prepare(f"sqlite:///{path}")
            asyncio.run(_remounted(run, disk, path))
        return
    with run.own_postgres(fsync=False) as server:
        url = server.database("local_app")
        prepare(url)

        @contextmanager
        def standby() -> Iterator[None]:
            signal = server._data / "standby.signal"
            signal.touch()
            server.restart("immediate")
            try:
                yield
            finally:
                server.execute("SELECT pg_promote(true, 30)")

        local = LocalApp(PostgresStore(url, timeout=1.0), url=url, begin_timeout=0.5, works=True)
        asyncio.run(_waves(run, local, url, standby))


async def _remounted(run: Run, disk: SmallDisk, path: Path) -> None:
    """A file system with open files cannot be made read-only, so nothing is in flight: each app is started on it."""
    url = f"sqlite:///{path}"
    first = local = LocalApp(SqliteStore(path, timeout=0.3), url=url)
    while run.wanting:
        first = LocalApp(SqliteStore(path, timeout=0.3), url=url)
        first.go_on_from(local)
        async with first.open():
            done = [first.story() for _ in range(WAVE // 2)]
            await gather([first.pay(story) for story in done])
        disk.remount("ro")
        local = LocalApp(SqliteStore(path, timeout=0.3), url=url, begin_timeout=0.3)
        local.go_on_from(first)
        local.outage = lambda: "read-only"
        try:
            _starts(run, OnceKey(url, scope=SINGLE_TENANT))
            async with local.open():
                new = [local.story() for _ in range(WAVE - len(done))]
                for story in done:
                    del story.answers[1:]
                asking = [asyncio.create_task(local.pay(story)) for story in [*done, *new]]
                await asyncio.sleep(SECONDS)
                if local.served:
                    run.violated("I7", f"{local.served} requests were served on a file system that is read-only")
                local.outage = lambda: None
                disk.remount("rw")
                await gather(asking)
        finally:
            disk.remount("rw")
        run.hit(WAVE)
        run.asked(sum(local.statuses.values()))
    await checked(run, local, url)


# -- connections -------------------------------------------------------------------------------------------------------


def connections(run: Run) -> None:
    with run.own_postgres(fsync=False, settings={"max_connections": "24"}) as server:
        url = server.database("local_app")
        prepare(url)

        @contextmanager
        def taken() -> Iterator[None]:
            with ExitStack() as stack:
                first = stack.enter_context(psycopg.connect(server.url, autocommit=True))
                mine = {first.info.backend_pid}
                free = True
                while free:  # end those of the app, and be faster than it is
                    _end_others(first, mine)
                    try:
                        for _ in range(100):
                            mine.add(stack.enter_context(psycopg.connect(server.url)).info.backend_pid)
                    except psycopg.OperationalError:
                        free = _others(first, mine) > 0
                yield

        local = LocalApp(PostgresStore(url, timeout=1.0), url=url, begin_timeout=0.5)
        asyncio.run(_waves(run, local, url, taken))


_OTHERS = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> ALL (%s)"


def _end_others(ours: psycopg.Connection, mine: set[int]) -> None:
    ours.execute(f"SELECT pg_terminate_backend(pid) {_OTHERS}".encode(), [list(mine)])


def _others(ours: psycopg.Connection, mine: set[int]) -> int:
    found = ours.execute(f"SELECT count(*) {_OTHERS}".encode(), [list(mine)]).fetchone()
    return int(found[0]) if found else 0


# -- files -------------------------------------------------------------------------------------------------------------


def files(run: Run) -> None:
    """In a forked process: the limit is its own."""
    url = run.url()
    prepare(url)

    def work() -> dict[str, Any]:
        server = psycopg.connect(url, autocommit=True) if run.store == "postgres" else None
        store: Any = SqliteStore(url.removeprefix("sqlite:///"), timeout=0.3)
        if server:
            store = PostgresStore(url, timeout=1.0)
        limit = sum(1 for _ in Path("/proc/self/fd").iterdir()) + 64
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        def left() -> int:
            """How many connections the app still has."""
            if server:
                return _others(server, {server.info.backend_pid})
            return sum(handle.connection is not None for handle in store.connections._handles.values())

        def take(stack: ExitStack) -> None:
            """What the app loses it must not get back: a file that it closes is ours."""
            _take_all(stack)
            if left() and server:
                _end_others(server, {server.info.backend_pid})
            elif left():
                store.close()
            _take_all(stack)

        @contextmanager
        def none_left() -> Iterator[None]:
            over = threading.Event()

            def go_on_taking(stack: ExitStack) -> None:
                while not over.wait(0.001):
                    take(stack)

            with ExitStack() as stack:
                take(stack)
                thread = threading.Thread(target=go_on_taking, args=[stack])
                thread.start()
                try:
                    yield
                finally:
                    over.set()
                    thread.join()

        local = LocalApp(store, url=url, begin_timeout=0.5)
        asyncio.run(_waves(run, local, url, none_left, certain=False))  # a lane may be faster than we are
        return {"hits": run.hits, "requests": run.requests, "violations": run.violations, "notes": run.notes}

    told = Child(work).result()
    run.hit(told["hits"])
    run.asked(told["requests"])
    run.violations += told["violations"]
    run.notes += told["notes"]


def _take_all(stack: ExitStack) -> None:
    with contextlib.suppress(OSError):
        while True:
            stack.enter_context(Path(os.devnull).open())  # noqa: SIM115 - the stack closes it


_PROMISES = ("I1", "I2", "I4", "I7")
FAULTS = (
    Fault("read-only file system or server", read_only, {"sqlite": 20, "postgres": 20}, WAVE, _PROMISES),
    Fault("out of connections", connections, {"postgres": 20}, WAVE, _PROMISES),
    Fault("too many open files", files, {"sqlite": 20, "postgres": 20}, WAVE, _PROMISES),
)
