"""Real servers: uvicorn in a thread of this process, raw bytes to it, and uvicorn in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from oncekey.testing.servers import free_port
from tests.web.apps import SECONDS

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- in this process


@contextmanager
def served(app: Any, http: str = "h11") -> Iterator[int]:
    """Serve an app with uvicorn, in a thread; its port."""
    port = free_port()
    config = uvicorn.Config(app, port=port, http=http, loop="asyncio", log_config=None, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="served")
    thread.start()
    try:
        deadline = time.monotonic() + SECONDS
        while not server.started:
            assert thread.is_alive(), "uvicorn did not start"
            assert time.monotonic() < deadline, "uvicorn did not start in time"
            time.sleep(0.005)
        yield port
    finally:
        server.should_exit = True
        thread.join(SECONDS)


def talk(port: int, *pieces: bytes, seconds: float = SECONDS) -> bytes:
    """Send raw bytes to a server and return all that it says until it closes.

    A server that answers before it has read everything, and closes, has the rest of our bytes answered with a reset:
    what it said before that counts.
    """
    said = b""
    with socket.create_connection(("127.0.0.1", port), seconds) as sock:
        with suppress(ConnectionError):
            for piece in pieces:
                sock.sendall(piece)
        with suppress(ConnectionError):
            while piece := sock.recv(65536):
                said += piece
    return said


# ---------------------------------------------------------------- in a process of its own


class Process:
    """One uvicorn process that serves :func:`tests.web.served_apps.create`."""

    def __init__(self, store: str, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "uvicorn", "--factory", "tests.web.served_apps:create", "--app-dir", str(ROOT)]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port), "--log-level", "warning", "--timeout-graceful-shutdown", "2"],
            env=os.environ | {"ONCEKEY_TEST_STORE": store, "ONCEKEY_TEST_FOLDER": str(folder)},
            cwd=ROOT,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def answers(self) -> bool:
        assert self._process.poll() is None, "the process has ended"
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """As ``kill -9`` does."""
        self._process.kill()
        self._process.wait(SECONDS)

    def stop(self) -> None:
        """As an operator does, and by force if that is not enough."""
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
