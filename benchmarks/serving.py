"""One web server for the time of a ``with`` block, on a free port, without access log.

uvicorn with uvloop and httptools, in one process or in four; gunicorn with one process of 16 threads. Owns starting,
waiting for and ending them; what they serve is ``apps.py``.
"""

from __future__ import annotations

import importlib.util
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
from typing import Literal

from benchmarks import apps

Server = Literal["uvicorn", "uvicorn x 4", "gunicorn"]
ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 30.0
STOP_SECONDS = 15.0
THREADS = 16


class ServerFailed(Exception):
    """The server did not come up; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Served:
    port: int
    pid: int


@contextmanager
def serving(
    framework: str = "starlette",
    store: str | None = None,
    *,
    guard: str | None = None,
    insert: str | None = None,
    cache: str | None = None,
    server: Server = "uvicorn",
) -> Iterator[Served]:
    """Serve the app of ``apps.py`` with this framework, store and guard (neither: bare)."""
    port = _free_port()
    asked = {
        apps.FRAMEWORK: framework,
        apps.STORE: store,
        apps.GUARD: guard,
        apps.INSERT: insert,
        apps.CACHE: cache,
    }
    environment = {name: value for name, value in child_environment().items() if name not in asked}
    environment |= {name: value for name, value in asked.items() if value is not None}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command(server, port), cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            problem = _wait_until_up(process, port)
            if problem:
                said.seek(0)
                raise ServerFailed(f"{problem}\n{said.read()[-4000:]}")
            yield Served(port, process.pid)
        finally:
            _stop(process)


def command(server: Server, port: int) -> list[str]:
    """How this kind of server is started."""
    if server == "gunicorn":
        return [
            *(sys.executable, "-m", "gunicorn", "benchmarks.apps:create_wsgi()", "--bind", f"127.0.0.1:{port}"),
            *("--worker-class", "gthread", "--workers", "1", "--threads", str(THREADS)),
            *("--keep-alive", "30", "--log-level", "warning", "--worker-connections", "1000"),
        ]
    return [
        *(sys.executable, "-m", "uvicorn", "benchmarks.apps:create", "--factory"),
        *("--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--http", "httptools"),
        *("--no-access-log", "--log-level", "warning"),
        *(("--workers", "4") if server == "uvicorn x 4" else ()),
    ]


def missing(server: Server) -> str | None:
    """Why this kind of server cannot run here, or None."""
    name = server.split()[0]
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def child_environment() -> dict[str, str]:
    """For child processes: this checkout first on the path, whether or not it is installed."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_up(process: subprocess.Popen[bytes], port: int) -> str | None:
    """Wait for an answer, not only for the port: gunicorn listens before its app is loaded."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"the server ended with status {process.returncode}"
        if _answers(port):
            return None
        time.sleep(0.05)
    return f"the server did not answer within {START_SECONDS:.0f} s"


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0) as probe:
            probe.settimeout(5.0)
            probe.sendall(b"GET /executions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
            return probe.recv(12).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
