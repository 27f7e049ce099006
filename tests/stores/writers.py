"""What tests of SQLite's writer process share: waiting for it, its processes, and programs that stop at a point."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from oncekey.core.states import State
from oncekey.stores.sqlite import SqliteStore, writer_helper, writer_process, writer_program
from oncekey.stores.sqlite.in_loop import SqliteInLoop
from oncekey.stores.sqlite.writer_process import ProcessWriter

SOON = 20.0

POINTS = {
    "before the batch is read": """
program.BATCH = type("Late", (), {"size": program.BATCH.size, "unpack": lambda self, header: ACT})()
""",
    "inside the statement": """
def commit(connection, statement, parameters):
    connection.set_progress_handler(lambda: ACT, 150)
    connection.execute(statement, parameters)
program.commit = commit
""",
    "after BEGIN and the writes": """
def commit(connection, statement, parameters):
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(statement, parameters)
    ACT
program.commit = commit
""",
    "after the commit": """
committing = program.commit
def commit(*arguments):
    committing(*arguments)
    ACT
program.commit = commit
""",
    "in the middle of the answer": """
answering = program.answer
def answer(number, text):
    if text:
        return answering(number, text)
    os.write(program.SOCKET, program.ANSWER.pack(number, 0)[:3])
    ACT
program.answer = answer
""",
}
COMMITTED = ("after the commit", "in the middle of the answer")
"""The points after which the batch is in the file."""


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.002)


async def ready(fast: SqliteInLoop) -> SqliteInLoop:
    """With its writer process up, if it has one."""
    await until(fast._can_write)
    return fast


def process_of(fast: SqliteInLoop) -> int:
    """The id of its writer process."""
    writer = fast._writer
    assert isinstance(writer, ProcessWriter)
    assert writer.pid is not None
    return writer.pid


def alive(pid: int) -> bool:
    """Whether it runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stopped(pid: int) -> bool:
    """Whether a SIGSTOP has reached it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    """The writer processes that this one has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid and b"writer_program" in command:
                found.append(int(entry.name))
    return found


def open_files(pid: int, path: Path) -> int:
    """How many descriptors of this process are of this file."""
    folder = Path(f"/proc/{pid}/fd")
    links = [os.readlink(each) for each in folder.iterdir()]  # noqa: PTH115 - a Path would cut " (deleted)"
    return sum(link == str(path) for link in links)


def at_point(point: str, number: signal.Signals) -> str:
    """Lines for a program that sends this signal to itself at one of ``POINTS``."""
    return POINTS[point].replace("ACT", f"os.kill(os.getpid(), {int(number)})")


def written_program(folder: Path, lines: str) -> Path:
    """The real program, with these lines before its ``main()``. ``program`` is its module."""
    changed = folder / "changed_writer_program.py"
    changed.write_text(
        "import importlib.util, os, signal, sys\n"
        f"spec = importlib.util.spec_from_file_location('writer_program', {writer_program.__file__!r})\n"
        "program = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(program)\n"
        f"{lines}\n"
        "program.main()\n"
    )
    return changed


def changed_program(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str) -> None:
    """Have the next process of this app run a changed program."""
    monkeypatch.setattr(writer_helper, "PROGRAM", str(written_program(folder, lines)))


def store_at(path: Path, **settings: float) -> SqliteStore:
    store = SqliteStore(path, writer="process", **settings)  # type: ignore[arg-type]
    store.check()
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(store_at(tmp_path / "keys.db")) as made:
        yield made


@pytest.fixture
async def fast(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqliteInLoop]:
    monkeypatch.setattr(writer_process, "AGAIN_SECONDS", 0.0)
    made = SqliteInLoop(store)
    yield made
    made.abandon()
    await until(lambda: children_of(os.getpid()) == [])


def state_of(store: SqliteStore, key: str) -> State | None:
    (row,) = store.read([("tenant-1", key)])
    return None if row is None else row.state
