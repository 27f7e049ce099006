"""What starting costs in time, and what a process costs in memory: ``python -m benchmarks.start``, 1 minute.

``make bench`` takes the times too, as the workload ``start``. Memory is the resident set of one uvicorn process with
the app of ``apps.py``: idle, after its first few requests; busy, the most that it had until then, after some seconds
with 64 connections.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import load, report
from benchmarks.contestants import BARE, ONCEKEY_MEMORY, ONCEKEY_POSTGRES, ONCEKEY_SQLITE, cannot_run
from benchmarks.places import Places, places
from benchmarks.proof import prove
from benchmarks.serving import child_environment, serving
from benchmarks.targets import IMPORT, PYTHON, VERSION

PROGRAMS = {
    PYTHON: ("-c", "pass"),
    IMPORT: ("-c", "import oncekey"),
    VERSION: ("-m", "oncekey", "--version"),
    "from oncekey import OnceKey": ("-c", "from oncekey import OnceKey"),
    "oncekey --help": ("-m", "oncekey", "--help"),
}
TIMES, ROUNDS = 9, 3
LOAD_SECONDS = 8.0
MEGABYTE = 1000.0


def seconds(program: str, times: int = TIMES) -> float:
    """The median time that a program takes, after one run that fills the disk's cache."""
    command = [sys.executable, *PROGRAMS[program]]
    took = []
    for number in range(times + 1):
        began = time.perf_counter()
        subprocess.run(command, check=True, env=child_environment(), stdout=subprocess.DEVNULL)
        if number:
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def rate(program: str) -> float:
    """How many starts one after the other fit into a second."""
    return 1 / seconds(program)


def memory(pid: int, field: str) -> float:
    """Megabytes of a process: ``VmRSS`` now, ``VmHWM`` the most until now."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/{pid}/status has no {field}: this needs Linux")
    return int(found[1]) * 1.024 / MEGABYTE


def main() -> None:
    took: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    for _ in range(ROUNDS):
        for program in PROGRAMS:
            took[program].append(seconds(program))
    rows = []
    for program, times in took.items():
        ratios = [mine / bare for mine, bare in zip(times, took[PYTHON], strict=True)]
        spread = f"{min(ratios):.1f}..{max(ratios):.1f}"
        rows.append((program, f"{statistics.median(times):.3f}", f"{statistics.median(ratios):.1f}", spread))
    report.show(("", "seconds", f"of {PYTHON}", "min..max"), rows, f"start: medians of {ROUNDS} rounds of {TIMES}")
    with places({"memory", "sqlite", "postgres"}) as at:
        report.show(("", "idle, MB", "busy, MB"), _memories(at), "memory of one uvicorn process")


def _memories(at: Places) -> list[tuple[str, ...]]:
    generator = load.compile_generator(at.folder)
    rows: list[tuple[str, ...]] = []
    for contestant in (BARE, ONCEKEY_MEMORY, ONCEKEY_SQLITE, ONCEKEY_POSTGRES):
        if reason := cannot_run(contestant, at):
            rows.append((contestant.name, reason, ""))
            continue
        with serving(store=at.urls[contestant.place] if contestant.place else None) as served:
            prove(contestant, served, "uvicorn")
            idle = memory(served.pid, "VmRSS")
            mode: load.Mode = "bare" if contestant is BARE else "first"
            load.run(generator, served.port, mode, seconds=LOAD_SECONDS, warmup=0)
            rows.append((contestant.name, f"{idle:.0f}", f"{memory(served.pid, 'VmHWM'):.0f}"))
    return rows


if __name__ == "__main__":
    main()
