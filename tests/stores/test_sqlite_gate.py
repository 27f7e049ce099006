"""The write gate: the next waiter, a waiter that gives up, and that no turn is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oncekey.stores.sqlite.gate import OVERTAKES, Gate, gate_of
from oncekey.testing.company import Child

SOON = 10.0


def until(holds: Callable[[], bool]) -> None:
    """Wait for another thread to get somewhere."""
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end, "it never happened"
        threading.Event().wait(0.001)


class Line:
    """Threads that queue at a gate one after the other, and note the order in which they pass."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.passed: list[str] = []
        self._threads: list[threading.Thread] = []

    def join_as(self, name: str, *, lane: bool) -> None:
        def wait() -> None:
            assert self.gate.acquire(SOON, lane=lane)
            self.passed.append(name)
            self.gate.release()

        before = self.gate.waiting
        self._threads.append(threading.Thread(target=wait))
        self._threads[-1].start()
        until(lambda: self.gate.waiting == before + 1)

    def end(self) -> list[str]:
        for thread in self._threads:
            thread.join(SOON)
        return self.passed


@contextmanager
def held(gate: Gate) -> Iterator[Line]:
    assert gate.acquire(0, lane=True)
    line = Line(gate)
    try:
        yield line
    finally:
        gate.release()
        line.end()


def test_the_gate_is_first_come_first_served() -> None:
    """Ten writers pass in the order in which they came."""
    with held(Gate()) as line:
        for number in range(10):
            line.join_as(str(number), lane=True)
    assert line.passed == [str(number) for number in range(10)]


def test_lane_passes_before_earlier_users() -> None:
    """Group commits go first, each kind in its own order."""
    with held(Gate()) as line:
        for name in ("user-1", "user-2", "lane-1", "lane-2"):
            line.join_as(name, lane=name.startswith("lane"))
    assert line.passed == ["lane-1", "lane-2", "user-1", "user-2"]


def test_a_user_is_overtaken_only_so_often() -> None:
    """However many lanes queue up, a waiting user passes after at most OVERTAKES of them."""
    with held(Gate()) as line:
        line.join_as("user", lane=False)
        for number in range(OVERTAKES + 3):
            line.join_as(f"lane-{number}", lane=True)
    assert line.passed.index("user") == OVERTAKES


def test_waiter_that_times_out_leaves_the_queue() -> None:
    """A wait that times out says so, and the turn goes to the next one."""
    gate = Gate()
    with held(gate) as line:
        assert not gate.acquire(0.01, lane=True)
        assert gate.waiting == 0
        line.join_as("next", lane=False)
    assert line.passed == ["next"]
    assert gate.acquire(0, lane=True)


def test_a_turn_that_comes_while_giving_up_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate handed over just as the wait timed out belongs to the waiter: otherwise it would never be released."""
    gate = Gate()
    assert gate.acquire(0, lane=True)

    class LateLock:
        """A lock whose wait times out just after it was given."""

        def __init__(self) -> None:
            self._asked = False

        def acquire(self, timeout: float = -1) -> bool:
            if not self._asked:
                self._asked = True
                return True
            gate.release()
            return False

        def release(self) -> None: ...

    monkeypatch.setattr("oncekey.stores.sqlite.gate.threading.Lock", LateLock)
    assert gate.acquire(0, lane=True)
    monkeypatch.undo()
    assert not gate.acquire(0, lane=True)
    gate.release()
    assert gate.acquire(0, lane=True)


def test_a_file_has_one_gate_by_whatever_name(tmp_path: Path) -> None:
    """Two paths to one file, one of them through a link, queue at the same gate; another file has its own."""
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    gate = gate_of(tmp_path / "keys.db")
    assert gate_of(tmp_path / "link" / "keys.db") is gate
    assert gate_of(tmp_path / "other.db") is not gate


def test_a_forked_child_finds_the_gate_open() -> None:
    """The holder and the line stay in the parent: in the child they do not exist, and would never release."""
    gate = Gate()
    with held(gate) as line:
        line.join_as("parent", lane=True)
        assert Child(lambda: [gate.waiting, gate.acquire(0, lane=True)]).result() == [0, True]
    assert line.passed == ["parent"]
