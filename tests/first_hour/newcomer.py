"""A newcomer's terminal: an app in a folder, a real server, the command line, and the log that it all leaves."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx

from oncekey.testing.servers import free_port

APPS = Path(__file__).parent / "apps"
PATIENCE_SECONDS = 30.0

_T = TypeVar("_T")


class Terminal:
    """``folder`` is the newcomer's project: the app's file (one of ``apps``, or ``source``) and its databases."""

    def __init__(self, folder: Path, app: str, store: str, source: str | None = None) -> None:
        self.folder = folder
        self.app = app
        self.store = store
        self.log_file = folder / "server.log"
        self.http = httpx.Client(timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))
        self.environment = os.environ | {"ONCEKEY_STORE": store}
        (folder / f"{app}.py").write_text(source or (APPS / f"{app}.py").read_text("utf-8"), "utf-8")

    # -- the server ----------------------------------------------------------------------------------------------------

    @contextmanager
    def server(self, *command: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
        """Serve ``app:app`` with uvicorn, or with ``command``, until the block ends."""
        port = free_port()
        self.http.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        words = command or ("uvicorn", f"{self.app}:app", "--log-level", "warning")
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words, *(() if command else ("--port", str(port)))],
                cwd=self.folder,
                env=self.environment | {"PORT": str(port)} | settings,
                stdout=log,
                stderr=log,
            )
        try:
            self.until(lambda: self._answers(process), "the server did not start")
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.log
        try:
            self.http.get("/")
        except httpx.TransportError:
            return False
        return True

    @property
    def log(self) -> str:
        return self.log_file.read_text("utf-8") if self.log_file.exists() else ""

    # -- what the newcomer does ----------------------------------------------------------------------------------------

    def post(self, path: str, key: str | None, body: Any = None, **headers: str) -> httpx.Response:
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.http.post(path, json={} if body is None else body, headers=headers)

    @contextmanager
    def under_way(self, path: str, key: str, body: Any = None, *, begun: Callable[[], object]) -> Iterator[None]:
        """Send a request that does not end, and run the block when its handler has ``begun``. The block must kill the
        server, which ends the request."""

        def send() -> None:
            with suppress(httpx.TransportError):
                self.post(path, key, body)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        self.until(begun, f"the handler of {path} did not begin")
        yield
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "the server was not killed"

    def oncekey(self, *words: str) -> tuple[int, str]:
        """Run ``oncekey …`` in the folder: its exit code, and what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "oncekey", *words],
            cwd=self.folder,
            env=self.environment | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS * 2,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def command_in_log(self, pattern: str) -> list[str]:
        """The words of a command that the log tells to run, without ``oncekey``."""
        (found, *_) = re.findall(rf"`oncekey ({pattern}[^`]*)`", self.log)
        return shlex.split(found)

    def until(self, holds: Callable[[], _T | None], what: str) -> _T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := holds()):
            assert time.monotonic() < deadline, f"{what}: {self.log[-3000:]}"
            time.sleep(0.05)
        return found

    def lines(self, name: str) -> list[str]:
        """What the app has written to a file of its own: its charges, for one."""
        path = self.folder / name
        return path.read_text("utf-8").splitlines() if path.exists() else []


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
