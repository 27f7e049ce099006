"""SQLite's writer process ends with its app: after kill -9, after a normal exit, and across a fork.

The apps are real processes, and are killed from here.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from oncekey.core.states import State
from oncekey.stores.sqlite.in_loop import SqliteInLoop
from oncekey.testing.company import Child
from tests.engine.doubles import reservation
from tests.stores.begun_keys import reserved
from tests.stores.writers import (
    COMMITTED,
    POINTS,
    SOON,
    alive,
    at_point,
    children_of,
    open_files,
    process_of,
    ready,
    stopped,
    store_at,
    written_program,
)

pytestmark = [pytest.mark.stores, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

APP = """
import asyncio, os, signal, subprocess, sys
from pathlib import Path
from oncekey.stores.sqlite import writer_helper
from oncekey.stores.sqlite.in_loop import SqliteInLoop
from tests.engine.doubles import reservation
from tests.stores.begun_keys import completion
from tests.stores.writers import process_of, ready, store_at

writer_helper.PROGRAM = sys.argv[2]

async def main():
    global fast
    fast = SqliteInLoop(store_at(Path(sys.argv[1])))
    await ready(fast)
    if {first}:
        assert all(await fast.reserve([reservation("first")]))
        {then}
        print(process_of(fast), flush=True)
    {wait}

asyncio.run(main())
"""
FOR_EVER = "await asyncio.sleep(3600)"
NO_SIGNAL = "program.end_with = lambda app: None"
"""For a program that ends by the end of its socket alone."""


def app(folder: Path, *, program: str = "", then: str = "", wait: str = FOR_EVER, first: bool = True) -> list[str]:
    """The command of an app. ``program``: lines that change its writer process; ``then`` runs once that is up.

    ``first``: it writes one batch, and prints the id of its writer process.
    """
    changed = written_program(folder, program)
    text = APP.format(then=then or "pass", wait=wait, first=first)
    return [sys.executable, "-c", text, str(folder / "keys.db"), str(changed)]


@contextmanager
def running(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The app, and the numbers that it printed on its first line: its writer process comes last."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        printed: list[int] = []
        try:
            assert process.stdout is not None
            printed = [int(word) for word in process.stdout.readline().split()]
            yield process, printed
        finally:
            process.kill()
            for pid in printed:  # a test that failed leaves what it was looking for
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


def until_stopped(pid: int) -> None:
    end = time.monotonic() + SOON
    while not stopped(pid):
        assert time.monotonic() < end, "it never came to the point"
        time.sleep(0.005)


def ended(pid: int, *, wake: bool = False) -> bool:
    end = time.monotonic() + SOON
    while alive(pid):
        if wake and stopped(pid):
            os.kill(pid, signal.SIGCONT)
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def test_process_ends_at_the_end_of_the_socket_if_its_app_is_killed(tmp_path: Path) -> None:
    with running(app(tmp_path, program=NO_SIGNAL)) as (process, [helper]):
        assert alive(helper)
        process.kill()
        assert ended(helper)


def test_process_is_killed_with_its_app_if_the_socket_stays_open(tmp_path: Path) -> None:
    """A child that was forked without Python's hooks has a copy of the socket."""
    then = (
        "fd = os.dup(fast._writer._helper.socket.fileno()); os.set_inheritable(fd, True); "
        "print(subprocess.Popen(['sleep', '60'], pass_fds=[fd]).pid, end=' ')"
    )
    with running(app(tmp_path, then=then)) as (process, [sleeper, helper]):
        try:
            assert alive(helper)
            process.kill()
            assert ended(helper)
            assert alive(sleeper)
        finally:
            os.kill(sleeper, signal.SIGKILL)


def test_forked_child_does_not_keep_its_parents_process_alive(tmp_path: Path) -> None:
    then = "child = os.fork(); child or signal.pause(); print(child, end=' ')"
    with running(app(tmp_path, program=NO_SIGNAL, then=then)) as (process, [child, helper]):
        try:
            process.kill()
            assert ended(helper)
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


VICTIMS = ("app", "app by the socket", "app, then process", "process, then app")
SOONER = {("inside the statement", "app"), ("after the commit", "app, then process")}
"""These are part of every run, the others of ``make stores``: each is a Python that starts."""


@pytest.mark.parametrize(
    ("point", "victims"),
    [
        pytest.param(point, victims, marks=() if (point, victims) in SOONER else pytest.mark.stores)
        for point in POINTS
        for victims in VICTIMS
    ],
)
def test_batch_is_whole_or_not_there_if_the_app_is_killed(tmp_path: Path, point: str, victims: str) -> None:
    """The process stops itself at the point; then the app is killed, or both are."""
    lines = at_point(point, signal.SIGSTOP) + "\n" + (NO_SIGNAL if "socket" in victims else "")
    with closing(store_at(tmp_path / "keys.db")) as store:
        old = reserved(store, "old")
    begin = "import pickle; old = pickle.loads(bytes.fromhex(sys.argv[3])); print(process_of(fast), flush=True)"
    wait = f"{begin}; await fast.both([reservation('new'), reservation('newer')], [completion(old)])"
    command = [*app(tmp_path, program=lines, wait=wait, first=False), pickle.dumps(old).hex()]
    with running(command) as (process, [helper]):
        until_stopped(helper)
        for victim in victims.removesuffix(" by the socket").split(", then "):
            if victim == "app":
                process.kill()
            elif alive(helper):
                os.kill(helper, signal.SIGKILL)
        assert ended(helper, wake="socket" in victims)
    with closing(store_at(tmp_path / "keys.db")) as store:
        rows = store.read([("tenant-1", key) for key in ("old", "new", "newer")])
        found = [None if row is None else row.state for row in rows]
        assert found in ([State.IN_PROGRESS, None, None], [State.COMPLETED, State.IN_PROGRESS, State.IN_PROGRESS])
        if point in COMMITTED:
            assert found[0] is State.COMPLETED
        elif "socket" not in victims:  # there the process goes on, and may commit
            assert found[0] is State.IN_PROGRESS
        (after,) = store.reserve([reservation("after")])
        assert after.record is not None


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        ("return", 10.0),
        ("fast.abandon()", 10.0),
        ("os.kill(process_of(fast), signal.SIGSTOP); fast.abandon()", 15.0),
        ("os.kill(process_of(fast), signal.SIGSTOP); asyncio.ensure_future(fast.reserve([reservation('x')]))", 15.0),
        ("sys.exit(0)", 10.0),
    ],
)
def test_app_exits_and_leaves_no_process(tmp_path: Path, wait: str, seconds: float) -> None:
    """Also if the process hangs: it is killed, and the exit does not wait for it for long."""
    with running(app(tmp_path, wait=wait)) as (process, [helper]):
        assert process.wait(seconds) == 0
        assert ended(helper)


async def test_forked_child_has_a_process_of_its_own(tmp_path: Path) -> None:
    """gunicorn --preload: each worker has its own, and the parent's goes on."""
    store = store_at(tmp_path / "keys.db")
    fast = SqliteInLoop(store)
    await ready(fast)
    parents = process_of(fast)
    inode = os.fstat(fast._writer._helper.socket.fileno()).st_ino  # type: ignore[union-attr]

    def work() -> object:
        return asyncio.run(in_child())

    async def in_child() -> object:
        inherited = inode in _open_inodes()
        own = SqliteInLoop(store)
        await ready(own)
        answers = await own.reserve([reservation("of the child")])
        mine = process_of(own)
        own.abandon()
        return [inherited, mine, all(answers), alive(mine)]

    inherited, mine, answered, left = Child(work).result()
    assert (inherited, answered, left) == (False, True, False)
    assert mine != parents
    assert all(await fast.reserve([reservation("of the parent")]))
    assert process_of(fast) == parents
    assert open_files(parents, store.path) == 1
    fast.abandon()
    assert children_of(os.getpid()) == []
    store.close()


def _open_inodes() -> list[int]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            found.append(os.fstat(int(each.name)).st_ino)
    return found


async def test_exit_of_a_forked_child_does_not_end_the_parents_process(tmp_path: Path) -> None:
    """A child that closes everything it inherited must not reach over to its parent."""
    with closing(store_at(tmp_path / "keys.db")) as store:
        fast = SqliteInLoop(store)
        await ready(fast)
        pid = process_of(fast)
        Child(fast.abandon).result()
        assert alive(pid)
        assert all(await fast.reserve([reservation("after")]))
        fast.abandon()
        assert not alive(pid)
