"""Ports and processes: finds a free port, pauses processes, and ends a child together with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
_POLL_SECONDS: Final = 0.01
_PROC: Final = Path("/proc/self/stat").exists()


class ServerUnavailable(RuntimeError):
    """No binary of this server can be found or used here; the message says what would help."""


class ServerFailed(RuntimeError):
    """A server was found but did not start or answer; the message ends with the last lines of its log."""


def free_port() -> int:
    """A free loopback port, outside the range from which the kernel gives ports to clients.

    Inside that range, a client that keeps trying the port of a stopped server can get this port as its own, and
    then connects to itself. And the server may find its port taken when it starts again.
    """
    for _ in range(200):
        port = random.randrange(15000, 32000)  # noqa: S311 - a port is no secret
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise ServerFailed("no free loopback port between 15000 and 32000: end what holds them, and try again")


def children(pid: int) -> list[int]:
    """The direct children of a process, living or dead."""
    if _PROC:
        pairs = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # "pid (any name) state parent ...": the name may hold spaces and brackets.
                    pairs.append((int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])))
    else:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        pairs = [(int(a), int(b)) for a, b in (line.split() for line in listed.stdout.splitlines())]
    return [child for child, parent in pairs if parent == pid]


def send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def pause_all(pids: list[int]) -> None:
    """Stop processes, and return when they have stopped: a signal takes effect a little later."""
    for pid in pids:
        send_signal(pid, signal.SIGSTOP)
    if not wait_until(lambda: all(_state(pid) in "TtZX" for pid in pids), 5.0):
        raise ServerFailed(f"these processes did not stop within 5 s of SIGSTOP: {pids}")


def _state(pid: int) -> str:
    """One letter, as ps shows it: R running, S sleeping, T stopped, Z a zombie, X gone."""
    if _PROC:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"
    shown = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()[:1] or "X"


def die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """A function that the child runs before exec. After it, the kernel ends the child when its parent thread ends."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: nothing is loaded in the child
    pr_set_pdeathsig = 1

    def arm() -> None:
        prctl(pr_set_pdeathsig, int(number))

    return arm


def wait_until(ready: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
