"""One fault on one store as a process of its own, which tells its parent how it goes over a pipe."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from itertools import count
from pathlib import Path
from typing import IO, Any

import psycopg

from oncekey.testing.servers import PostgresServer
from tests.faults.campaign import WITHOUT_OUTBOX, Fault, Run
from tests.faults.table import faults

_TELL_EVERY = 0.2
LIMIT_SECONDS = 1_200.0
"""A fault that takes longer hangs: it is killed, and the others go on."""


class Job:
    """As the parent sees it: a row of the table to be."""

    def __init__(self, fault: Fault, store: str, goal: int, seed: int) -> None:
        self.fault = fault
        self.name = fault.name
        self.store = store
        self.goal = goal
        self.seed = seed
        self.hits = 0
        self.requests = 0
        self.violations: list[str] = []
        self.notes: list[str] = []
        self.broken: str | None = None
        self.seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._pipe: IO[bytes] | None = None
        self._half_line = b""
        self._began = 0.0

    @property
    def unit(self) -> str:
        return self.fault.unit

    @property
    def promises(self) -> tuple[str, ...]:
        return tuple(each for each in self.fault.promises if each != "I8" or self.store not in WITHOUT_OUTBOX)

    @property
    def seconds_expected(self) -> float:
        return self.fault.seconds

    @property
    def failed(self) -> bool:
        return bool(self.violations or self.broken)

    @property
    def progress(self) -> str:
        return f"{self.hits:,}/{self.goal:,} {self.unit}, {self.requests:,} requests, {len(self.violations)} violations"

    def start(self, server: PostgresServer) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="oncekey-fault-"))
        self._folder.chmod(0o755)
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._pipe = os.fdopen(ours, "rb")
        options = {
            "one": self.name, "store": self.store, "count": self.goal, "seed": self.seed,
            "folder": self._folder, "server": server.url, "tell": theirs,
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.faults", *(f"--{name}={value}" for name, value in options.items())]
        self._launch(command, [theirs])
        os.close(theirs)

    def _launch(self, command: list[str], fds: list[int]) -> None:
        assert self._folder is not None
        with (self._folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._began = time.monotonic()

    def going_on(self) -> bool:
        """Hear what it has to say. False: it is over."""
        assert self._process is not None
        over = self._process.poll() is not None
        self.seconds = time.monotonic() - self._began
        if self._pipe is not None and (told := self._pipe.read()):
            *lines, self._half_line = (self._half_line + told).split(b"\n")  # a history is longer than a pipe
            for line in lines:
                self._heard(json.loads(line))
        if over:
            self._ended(self._process.returncode)
        elif self.seconds > LIMIT_SECONDS:
            self.broken = f"it took longer than {LIMIT_SECONDS:g} s: {self._last_words(1_000)}"
            self.kill()
            over = True
        return not over

    def _heard(self, told: dict[str, Any]) -> None:
        self.hits, self.requests = told["hits"], told["requests"]
        self.violations += told["violations"]
        self.notes += told["notes"]
        self.broken = told.get("broken")

    def _ended(self, code: int) -> None:
        if self.broken is None and code != 0:
            self.broken = f"its process ended with {code}: {self._last_words(1_000)}"
        if self.broken is None and self.hits < self.goal:
            self.broken = f"only {self.hits} of {self.goal} {self.unit} were hit"
        self._clear()

    def _last_words(self, size: int) -> str:
        assert self._folder is not None
        return (self._folder / "output").read_text(errors="replace")[-size:].strip()

    def _clear(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """With all that it has started: it leads a process group of its own."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._clear()


class Rest(Job):
    """The other long tests: whatever is marked ``faults`` and is no fault of the table."""

    def __init__(self) -> None:
        super().__init__(Fault("other long tests", lambda run: None, {}, 0, (), unit="tests"), "-", 0, 0)

    @property
    def progress(self) -> str:
        return "pytest -m faults"

    def start(self, server: PostgresServer) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="oncekey-fault-"))
        self._launch([sys.executable, "-m", "pytest", "-m", "faults", "-n", "2", "--timeout", "0", "-q"], [])

    def _ended(self, code: int) -> None:
        words = self._last_words(4_000)
        passed = re.findall(r"(\d+) passed", words)
        self.hits = self.goal = int(passed[-1]) if passed else 0
        if code != 0:
            self.broken = words
        self._clear()


# -- in the process of its own -----------------------------------------------------------------------------------------


def run_one(options: argparse.Namespace) -> int:
    fault = next(each for each in faults() if each.name == options.one)
    pipe = os.fdopen(int(options.tell), "wb", buffering=0)
    numbers = count(1)
    state = {"at": 0.0, "violations": 0}

    def database() -> str:
        name = f"fault_{os.getpid()}_{next(numbers)}"
        with psycopg.connect(options.server, autocommit=True) as server:
            server.execute(f"CREATE DATABASE {name} TEMPLATE template0".encode())
        return f"{options.server.rpartition('/')[0]}/{name}"

    def tell(run: Run, *, last: bool = False, broken: str | None = None) -> None:
        if not last and time.monotonic() - state["at"] < _TELL_EVERY:
            return
        new = run.violations[int(state["violations"]) :]
        state.update(at=time.monotonic(), violations=len(run.violations))
        told: dict[str, Any] = {"hits": run.hits, "requests": run.requests, "violations": new}
        told |= {"notes": run.notes if last else [], "broken": broken}
        pipe.write(json.dumps(told).encode() + b"\n")

    run = Run(options.store, int(options.count), options.seed, Path(options.folder) / "work", database, tell)
    run.folder.mkdir(mode=0o755)
    with pipe:
        try:
            fault.run(run)
        except BaseException as error:  # whatever it is, it is a row of the table
            tell(run, last=True, broken=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            return 1
        finally:
            run.close()
        tell(run, last=True)
    return 0
