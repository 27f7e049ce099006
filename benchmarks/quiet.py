"""Tells our CPU time from that of other processes, such as a compile job, which must not count as our overhead.

On two cores a neighbour hits the contestants unequally: the bare app needs one core, a protected one needs
a database beside it. So every measurement carries how many cores *others* used meanwhile, and a noisy one
is repeated, within a budget of seconds for the whole run. Reads ``/proc``; where there is none, every
moment counts as quiet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
NOISE = 0.25
"""Cores used by others above which a measurement is repeated. The kernel's work for our fsyncs is in it."""
LOOK_SECONDS = 0.3
LONGEST_WAIT_SECONDS = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Patience:
    """Waits for quiet and repeats what was not, until its seconds are used up."""

    def __init__(self, seconds: float, say: Callable[[str], None] = print) -> None:
        self.left = seconds
        self._say = say

    def measure(self, measurement: Callable[[], Result]) -> tuple[Result, float]:
        """The quietest result that patience got, and the cores that others used meanwhile."""
        self._wait_for_quiet()
        best: tuple[Result, float] | None = None
        while True:
            began, before = time.monotonic(), others_seconds()
            result = measurement()
            took = time.monotonic() - began
            others = max(0.0, (others_seconds() - before) / took)
            if best is None or others < best[1]:
                best = (result, others)
            if others <= NOISE or self.left < took:
                return best
            self.left -= took
            self._say(f"          others used {others:.2f} cores: once more ({self.left:.0f} s of patience left)")
            self._wait_for_quiet()

    def _wait_for_quiet(self) -> None:
        """Wait until no other process is at work, but not for ever: one wait must not eat the whole budget."""
        began = time.monotonic()
        longest = min(LONGEST_WAIT_SECONDS, self.left)
        told = False
        while (waited := time.monotonic() - began) < longest:
            before = others_seconds()
            time.sleep(LOOK_SECONDS)
            if (others_seconds() - before) / LOOK_SECONDS <= NOISE:
                break
            if not told and waited > 2 * LOOK_SECONDS:
                told = True
                self._say(f"          something else runs here: waiting up to {longest:.0f} s")
        if told:
            self.left -= time.monotonic() - began


def others_seconds() -> float:
    """CPU seconds used since boot by everything but this process and those it has started."""
    try:
        spent = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, spent)
        return (user + nice + system + irq + softirq + steal) / _TICKS - tree_seconds(os.getpid())
    except (OSError, ValueError):
        return 0.0


def tree_seconds(pid: int) -> float:
    """CPU seconds of a process and its descendants, those that have ended and were waited for included."""
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # "pid (any name) state ppid …": utime, stime, cutime, cstime are the fields 14 to 17.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        number = int(entry.name)
        parents[number] = int(fields[1])
        spent[number] = sum(map(int, fields[11:15]))
    tree = {pid}
    while more := {number for number, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(spent.get(number, 0) for number in tree) / _TICKS
