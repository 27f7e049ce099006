"""SQLite's writer process: when it is started, which file it opens, and what its program does by itself."""

from __future__ import annotations

import io
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.registry import open_store
from oncekey.stores.sqlite import SqliteStore, batch, writer_helper, writer_program
from oncekey.stores.sqlite.in_loop import SqliteInLoop, ThreadWriter
from oncekey.stores.sqlite.writer_process import ProcessWriter
from tests.engine.doubles import reservation
from tests.stores.writers import (
    SOON,
    alive,
    changed_program,
    children_of,
    fast,
    open_files,
    process_of,
    ready,
    state_of,
    store,
    store_at,
    until,
)

__all__ = ["fast", "store"]

pytestmark = [pytest.mark.stores, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


async def test_one_file_has_one_process_per_app_process(store: SqliteStore, fast: SqliteInLoop, tmp_path: Path) -> None:
    """Another loop, or another store of the same file, commits in a thread."""
    await ready(fast)
    (tmp_path / "link.db").symlink_to(tmp_path / "keys.db")
    with closing(store_at(tmp_path / "link.db")) as second:
        for other in (SqliteInLoop(store), SqliteInLoop(second)):
            assert isinstance(other._writer, ThreadWriter)
            other.abandon()
    assert len(children_of(os.getpid())) == 1
    fast.abandon()
    assert children_of(os.getpid()) == []
    after = SqliteInLoop(store)
    assert isinstance(after._writer, ProcessWriter)
    await ready(after)
    after.abandon()


async def test_closed_writer_starts_no_process(fast: SqliteInLoop) -> None:
    fast.abandon()
    assert not fast._can_write()
    assert children_of(os.getpid()) == []


async def test_process_that_cannot_start_is_tried_again_later_each_time(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests go on by the lanes. A start costs a few milliseconds, so it is not tried with each of them."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    fast = SqliteInLoop(store)
    assert not fast._can_write()
    assert not fast._can_write()
    (line,) = caplog.messages
    assert "could not be started" in line
    assert "writer=process" in line
    pauses = []
    for _ in range(9):
        fast._writer._next_start = 0.0  # type: ignore[union-attr]
        fast._can_write()
        pauses.append(round(fast._writer._next_start - time.monotonic()))  # type: ignore[union-attr]
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert await fast.reserve([reservation("new")]) == [None]
    fast.abandon()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("program.serve = lambda *_: None", "ended"),
        ("program.opened = lambda settings: program.sqlite3.connect('/nowhere/at/all.db')", "cannot open the file"),
    ],
)
async def test_start_that_fails_says_why(
    fast: SqliteInLoop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    lines: str,
    said: str,
) -> None:
    with monkeypatch.context() as changed:
        changed_program(changed, tmp_path, lines)
        assert not fast._can_write()
        await until(lambda: bool(caplog.records))
    assert said in caplog.text
    await ready(fast)


async def test_process_that_does_not_open_the_file_in_time_is_killed(
    fast: SqliteInLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with monkeypatch.context() as changed:
        changed_program(changed, tmp_path, "signal.pause()")
        changed.setattr(writer_helper, "START_SECONDS", 0.2)
        assert not fast._can_write()
        (pid,) = children_of(os.getpid())
        await until(lambda: not alive(pid))
    assert "did not open the file within 0.2 s" in caplog.text
    await ready(fast)


@pytest.mark.parametrize("when", ["before the start", "after it"])
async def test_process_writes_to_no_other_file_than_the_stores(
    store: SqliteStore,
    fast: SqliteInLoop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    when: str,
) -> None:
    with closing(SqliteStore(tmp_path / "other.db")) as other:
        other.check()
    if when == "before the start":  # after the app has looked, and before the process opens
        asked, start = [], writer_helper.start

        def swapped(*arguments: object) -> object:
            asked.append(1)
            (tmp_path / "keys.db").rename(tmp_path / "away.db")
            (tmp_path / "other.db").rename(tmp_path / "keys.db")
            return start(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(writer_helper, "start", swapped)
        assert not fast._can_write()
        await until(lambda: bool(caplog.records))
        assert "found another file in its place" in caplog.text
        return
    await ready(fast)
    first = process_of(fast)
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    (tmp_path / "other.db").rename(tmp_path / "keys.db")
    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        await fast.both([reservation("new")], [])
    await until(lambda: not alive(first))


@pytest.mark.parametrize(
    "name", ["a b.db", "100%.db", "what?.db", "#1.db", "é\U0001f600.db", "quo'te\".db", b"\xff.db"]
)
async def test_any_file_name_is_opened_also_a_relative_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    store = store_at(Path(os.fsdecode(name)))
    monkeypatch.chdir("/")
    fast = SqliteInLoop(store)
    await ready(fast)
    assert all(await fast.reserve([reservation("new")]))
    assert open_files(process_of(fast), store.path) == 1
    fast.abandon()
    store.close()


async def test_process_has_the_durability_of_the_store(
    store: SqliteStore, fast: SqliteInLoop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changed_program(
        monkeypatch,
        tmp_path,
        f"""
def answer(number, text):
    connection = last[0]
    asked = [connection.execute(f"PRAGMA {{name}}").fetchone()[0] for name in ("synchronous", "journal_mode")]
    open({str(tmp_path / "said")!r}, "w").write(repr([*asked, connection.execute("PRAGMA foreign_keys").fetchone()[0]]))
    answering(number, text)
last, answering, opening = [], program.answer, program.opened
def opened(settings):
    last.append(opening(settings))
    return last[0]
program.answer, program.opened = answer, opened
""",
    )
    await ready(fast)
    assert (tmp_path / "said").read_text() == "[2, 'wal', 1]"


def test_url_names_the_writer(tmp_path: Path) -> None:
    for options, writer in (("", "thread"), ("?writer=thread", "thread"), ("?writer=process", "process")):
        for scheme in ("sqlite", "sqlite+aiosqlite"):
            store = open_store(f"{scheme}:///{tmp_path / 'keys.db'}{options}")
            assert isinstance(store, SqliteStore)
            assert (store.writer, store.path) == (writer, tmp_path / "keys.db")
    for wrong in ("?writer=fork", "?mode=ro", "?", "?writer=process&x=1", "?writer=process#x"):
        with pytest.raises(ConfigurationError, match="takes one option"):
            open_store(f"sqlite:///{tmp_path / 'keys.db'}{wrong}")
    with pytest.raises(ConfigurationError, match="thread, process"):
        SqliteStore(tmp_path / "keys.db", writer="fork")  # type: ignore[arg-type]
    assert not (tmp_path / "keys.db").exists()


def test_program_of_another_parent_ends_at_once() -> None:
    """The app died before the process could ask the kernel for a signal."""
    ended = subprocess.run([sys.executable, "-I", "-S", writer_helper.PROGRAM, "1"], timeout=SOON, check=False)
    assert ended.returncode == 0


def test_program_imports_nothing_of_oncekey() -> None:
    """It starts with every app, and again after each kill."""
    code = (
        f"import runpy, sys; runpy.run_path({writer_helper.PROGRAM!r}, run_name='looked at');"
        "assert not [name for name in sys.modules if name.startswith(('oncekey', 'asyncio', 'logging'))]"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], timeout=SOON, check=True)


def test_program_answers_after_the_commit_and_goes_on_after_an_error(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's own loop, in this process: what another connection sees when the answer is sent."""
    settings = json.loads(json.dumps(writer_helper.settings(store, 0.05)))
    packed = {key: batch.pack([reservation(key)], []) for key in ("first", "broken", "last")}
    packed["broken"] = replace(packed["broken"], begins="no JSON")
    requests = b"".join(writer_helper.message(store.clock(), each) for each in packed.values())
    seen = []

    def answer(number: int, text: str) -> None:
        seen.append((number, [key for key in packed if state_of(store, key)], text))

    monkeypatch.setattr(writer_program, "answer", answer)
    with pytest.raises(EOFError):
        writer_program.serve(io.BytesIO(requests), settings)
    assert [(number, keys) for number, keys, _ in seen] == [
        (0, []),
        (1, ["first"]),
        (-sqlite3.SQLITE_ERROR, ["first"]),
        (1, ["first", "last"]),
    ]
    assert "malformed JSON" in seen[2][2]
    seen.clear()
    writer_program.serve(io.BytesIO(), {**settings, "uri": "file:///nowhere/at/all.db?mode=rw"})
    assert [number for number, *_ in seen] == [-sqlite3.SQLITE_CANTOPEN]


def test_program_sends_an_answer_that_the_app_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(writer_program, "SOCKET", theirs.fileno())
        writer_program.answer(-7, "é\udcff")
        said = ours.recv(100)
    number, length = writer_program.ANSWER.unpack_from(said)
    assert (number, said[writer_program.ANSWER.size :].decode()) == (-7, "é?")
    assert length == 3
