"""SQLite's writer process: kill -9 at every point, no late write, no orphan, no second process, and the gate.

Real processes and real signals. What the process answers is in ``test_sqlite_in_loop.py``, beside the thread's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from oncekey.core.record import StoredResponse
from oncekey.core.states import State
from oncekey.errors import StoreUnavailable
from oncekey.stores.api import LostRace
from oncekey.stores.sqlite import SqliteStore, batch, writer_helper
from oncekey.stores.sqlite.in_loop import SqliteInLoop
from tests.engine.doubles import reservation
from tests.stores.begun_keys import completion, reserved
from tests.stores.writers import (
    COMMITTED,
    POINTS,
    SOON,
    alive,
    at_point,
    changed_program,
    fast,
    process_of,
    ready,
    state_of,
    store,
    store_at,
    until,
)

__all__ = ["fast", "store"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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
    store: SqliteStore, fast: SqliteInLoop, caplog: pytest.LogCaptureFixture
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
    assert "did not answer within 0.3 s, and was killed" in caplog.text
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


async def test_batch_whose_process_died_before_its_turn_is_left_to_the_lanes(
    store: SqliteStore, fast: SqliteInLoop
) -> None:
    """Nothing was sent, and the turn that comes is passed on."""
    await ready(fast)
    pid = process_of(fast)
    fast._writer._lock_seconds = SOON  # type: ignore[union-attr]
    assert store.gate.acquire(0.0, lane=True)
    asking = asyncio.create_task(fast.both([reservation("new")], []))
    await until(lambda: store.gate.waiting == 1)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(pid) and fast._writer.pid is None)  # type: ignore[union-attr]
    store.gate.release()
    with pytest.raises(LostRace):
        await asking
    with turn(store):
        assert state_of(store, "new") is None
