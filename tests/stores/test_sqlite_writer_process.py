"""SQLite's writer process: kill -9 at every point, no late write, no orphan, no second process, and the gate.

Real processes and real signals. What the process answers is in ``test_sqlite_in_loop.py``, beside the thread's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from oncekey.core.record import StoredResponse
from oncekey.core.states import State
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.api import LostRace
from oncekey.stores.registry import open_store
from oncekey.stores.sqlite import SqliteStore, batch, writer_helper, writer_process
from oncekey.stores.sqlite.in_loop import SqliteInLoop, ThreadWriter
from oncekey.stores.sqlite.writer_process import ProcessWriter
from tests.engine.doubles import reservation
from tests.stores.begun_keys import completion, reserved
from tests.stores.writers import (
    COMMITTED,
    POINTS,
    SOON,
    alive,
    at_point,
    changed_program,
    children_of,
    open_files,
    process_of,
    ready,
    store_at,
    until,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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


@contextmanager
def turn(store: SqliteStore) -> Iterator[None]:
    """The gate, as a user's transaction takes it."""
    assert store.gate.acquire(SOON, lane=False), "the gate was never given back"
    yield
    store.gate.release()


@pytest.mark.parametrize("point", POINTS)
async def test_batch_is_unknown_if_the_process_is_killed(
    store: SqliteStore, fast: SqliteInLoop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: str
) -> None:
    """All of the batch or nothing; the callers are told neither; the lane that asks again gets the one truth."""
    done, new = completion(reserved(store, "old")), reservation("new")
    with monkeypatch.context() as changed:
        changed_program(changed, tmp_path, at_point(point, signal.SIGKILL))
        await ready(fast)
    killed = process_of(fast)

    with pytest.raises(StoreUnavailable, match="may have committed") as raised:
        await fast.both([new], [done])
    assert not isinstance(raised.value, LostRace)
    with turn(store):
        assert not alive(killed)
    committed = point in COMMITTED
    assert state_of(store, "new") is (State.IN_PROGRESS if committed else None)
    assert state_of(store, "old") is (State.COMPLETED if committed else State.IN_PROGRESS)
    (found,), (moved,) = store.both([new], [done])
    assert found.record is not None
    assert found.record.owner == new.owner
    assert (moved is None) is committed  # the row says that this owner has completed it

    await ready(fast)
    assert process_of(fast) != killed
    assert all(await fast.reserve([reservation("next")]))


async def test_process_that_hangs_is_killed_before_the_gate_is_given_back(
    store: SqliteStore, fast: SqliteInLoop
) -> None:
    """A lane reads the rows after the time-out. The batch must not be written after that."""
    await ready(fast)
    store.timeout = 0.3
    stopped = process_of(fast)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match=r"took over 0\.3 s"):
        await fast.both([reservation("late")], [])
    with turn(store):
        assert not alive(stopped)
    assert state_of(store, "late") is None
    store.timeout = 5.0
    await ready(fast)
    assert all(await fast.reserve([reservation("next")]))


async def test_gate_stays_taken_until_the_process_is_dead(
    store: SqliteStore, fast: SqliteInLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for a hung disk does not die at once, and may still write."""
    await ready(fast)
    store.timeout = 0.2
    helper = fast._writer._helper  # type: ignore[union-attr]
    assert helper is not None
    dies, wait = threading.Event(), helper.process.wait
    monkeypatch.setattr(helper.process, "wait", lambda: (dies.wait(SOON), wait())[1])
    os.kill(helper.process.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        await fast.both([reservation("late")], [])
    assert not store.gate.acquire(0.1, lane=True)
    assert not fast._can_write()
    assert fast._writer._helper is helper, "no second process before the first one is dead"  # type: ignore[union-attr]
    dies.set()
    with turn(store):
        pass
    store.timeout = 5.0
    await ready(fast)


async def test_gate_is_given_back_if_no_thread_can_be_started(
    store: SqliteStore, fast: SqliteInLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready(fast)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        os.kill(process_of(fast), signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            await fast.both([reservation("new")], [])
    assert store.gate.acquire(0.0, lane=True)
    store.gate.release()


@pytest.mark.parametrize("missing", [1, 100, 5_000])
def test_part_of_a_batch_is_not_written(store: SqliteStore, missing: int) -> None:
    """The app was killed, or gave up, while it sent. A response without its end would be replayed for ever."""
    done = replace(completion(reserved(store, "old")), response=StoredResponse(200, (), b"x" * 4_000))
    whole = writer_helper.message(store.clock(), batch.pack([reservation("new")], [done]))
    connection, process = writer_helper.start(store, 0.05)
    with connection, process:
        connection.settimeout(SOON)
        assert connection.recv(1_000)
        connection.sendall(whole[:-missing])
        connection.shutdown(socket.SHUT_WR)
        assert process.wait(SOON) == 0
    assert state_of(store, "old") is State.IN_PROGRESS
    assert state_of(store, "new") is None


async def test_cancelled_batch_ends_the_process_and_frees_the_gate(store: SqliteStore, fast: SqliteInLoop) -> None:
    """No loop may be there to read the answer."""
    await ready(fast)
    stopped = process_of(fast)
    os.kill(stopped, signal.SIGSTOP)
    asking = asyncio.create_task(fast.both([reservation("left")], []))
    await asyncio.sleep(0)  # the batch is sent
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with turn(store):
        assert not alive(stopped)
    assert state_of(store, "left") is None


async def test_loop_that_ended_during_a_batch_leaves_the_gate_free(tmp_path: Path) -> None:
    """The answer is never read: close() kills the process, and gives the gate back."""
    store = store_at(tmp_path / "other.db")
    loop = asyncio.new_event_loop()
    fast = SqliteInLoop(store)

    async def ask() -> None:
        await ready(fast)
        os.kill(process_of(fast), signal.SIGSTOP)
        asking = asyncio.create_task(fast.both([reservation("left")], []))
        left.append(asking)
        await asyncio.sleep(0)  # the batch is sent

    left: list[asyncio.Task[object]] = []
    await asyncio.to_thread(loop.run_until_complete, ask())
    pid = process_of(fast)
    loop.close()
    fast.abandon()
    with turn(store):
        assert not alive(pid)
    store.close()


async def test_users_transaction_and_batch_take_turns(store: SqliteStore, fast: SqliteInLoop) -> None:
    """The gate orders the two processes: while one has it, the other does not ask SQLite."""
    await ready(fast)
    with turn(store):
        assert (await fast.reserve([reservation("new")])) == [None]
        with pytest.raises(LostRace):
            await fast.both([reservation("new")], [])
    pid = process_of(fast)
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(fast.reserve([reservation("new")]))
    await asyncio.sleep(0)
    assert not store.gate.acquire(0.05, lane=False), "a batch is under way"
    os.kill(pid, signal.SIGCONT)
    assert all(await asking)
    with turn(store):
        pass


async def test_batch_waits_its_turn_behind_a_lane(store: SqliteStore, fast: SqliteInLoop) -> None:
    await ready(fast)
    assert store.gate.acquire(0.0, lane=True)
    asking = asyncio.create_task(fast.reserve([reservation("new")]))
    await until(lambda: store.gate.waiting == 1)
    assert state_of(store, "new") is None
    store.gate.release()
    assert all(await asking)


async def test_batch_larger_than_the_sockets_buffer_is_written(store: SqliteStore, fast: SqliteInLoop) -> None:
    await ready(fast)
    batch = [reservation(f"k-{number}", scope="t" * 4_000) for number in range(500)]
    assert all(await fast.reserve(batch))
    assert len(store.listing(None, None, None, None, 1_000)) == 500


async def test_error_of_sqlite_ends_the_process_and_a_lock_does_not(
    store: SqliteStore, fast: SqliteInLoop, tmp_path: Path
) -> None:
    await ready(fast)
    first = process_of(fast)
    with closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"locked by another writer for over 0\.05 s"):
            await fast.both([reservation("new")], [])
        other.execute("ROLLBACK")
        assert process_of(fast) == first
        other.execute(
            "CREATE TRIGGER refuses BEFORE INSERT ON idempotency_keys WHEN NEW.key = 'bad' "
            "BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        )
    with pytest.raises(StoreUnavailable, match="not this one"):
        await fast.both([reservation("good"), reservation("bad")], [])
    assert state_of(store, "good") is None
    await until(lambda: not alive(first))
    await ready(fast)
    assert all(await fast.reserve([reservation("good")]))


async def test_read_only_file_is_named_as_such(
    fast: SqliteInLoop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The words of the store, and not a number of SQLite: the folder was remounted, or its owner was changed."""
    lines = """
opening = program.opened
program.opened = lambda settings: opening({**settings, "uri": settings["uri"].replace("mode=rw", "mode=ro")})
"""
    changed_program(monkeypatch, tmp_path, lines)
    await ready(fast)
    with pytest.raises(StoreUnavailable, match="the file or its folder is read-only"):
        await fast.both([reservation("new")], [])


async def test_death_of_an_idle_process_is_noticed_and_logged(
    fast: SqliteInLoop, caplog: pytest.LogCaptureFixture
) -> None:
    await ready(fast)
    os.kill(process_of(fast), signal.SIGKILL)
    await until(lambda: bool(caplog.records))
    assert "signal SIGKILL" in caplog.text
    await ready(fast)


async def test_signals_that_are_for_the_app_do_not_end_the_process(fast: SqliteInLoop) -> None:
    """Ctrl-C and a service manager's SIGTERM reach all processes; the app still has responses to store."""
    await ready(fast)
    pid = process_of(fast)
    assert os.getsid(pid) == pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert all(await fast.reserve([reservation("new")]))
    assert process_of(fast) == pid


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
