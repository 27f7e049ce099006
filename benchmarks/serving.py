"""One uvicorn process for the time of a ``with`` block: uvloop, httptools, no access log, on a free port.

Owns starting, waiting for and ending that process; what it serves is ``apps.py``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import apps

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 30.0
STOP_SECONDS = 15.0


class ServerFailed(Exception):
    """uvicorn did not come up; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Served:
    port: int
    pid: int


@contextmanager
def serving(framework: str = "starlette", store: str | None = None) -> Iterator[Served]:
    """Serve the app of ``apps.create`` with this framework and store (None: bare)."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "uvicorn", "benchmarks.apps:create", "--factory"),
        *("--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--http", "httptools"),
        *("--no-access-log", "--log-level", "warning"),
    ]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(framework, store), stdout=said, stderr=subprocess.STDOUT
        )
        try:
            problem = _wait_until_up(process, port)
            if problem:
                said.seek(0)
                raise ServerFailed(f"{problem}\n{said.read()[-4000:]}")
            yield Served(port, process.pid)
        finally:
            _stop(process)


def child_environment() -> dict[str, str]:
    """For child processes: this checkout first on the path, whether or not it is installed."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep)}


def _environment(framework: str, store: str | None) -> dict[str, str]:
    environment = {**child_environment(), apps.FRAMEWORK: framework}
    environment.pop(apps.STORE, None)
    if store is not None:
        environment[apps.STORE] = store
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_up(process: subprocess.Popen[bytes], port: int) -> str | None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"uvicorn ended with status {process.returncode}"
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return None
        time.sleep(0.05)
    return f"uvicorn did not answer within {START_SECONDS:.0f} s"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
