"""The payments API under a real server: a process of its own, over HTTP, on a real store.

``Server`` starts the process, which serves ``serving.py``. ``ServedStack`` is an app in it, with the interface of
``Stack``: a test does not see where its app runs. What a test asks of the app (``stack.payments.runs``,
``stack.store.down``) is asked of the process, through ``Remote``.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, cast

import httpx

from oncekey.core.record import Record
from oncekey.errors import ConfigurationError
from oncekey.stores.registry import open_store
from oncekey.testing.http.flaky import ONE
from oncekey.testing.http.protected import Framework, Protected
from oncekey.testing.http.stack import SECONDS, Stack, until
from oncekey.testing.servers.processes import HOST, ServerFailed, die_with_parent, free_port

CONTROL = "ONCEKEY_SUITE_CONTROL"
"""The environment variable that has the path of the process's Unix socket."""
START_SECONDS = 30.0
SERVERS = {
    "gunicorn": (
        *("gunicorn", "--bind", "{address}", "--worker-class", "gthread", "--threads", "64"),
        *("--graceful-timeout", "2", "oncekey.testing.http.serving:wsgi()"),
    ),
    "uvicorn": (
        *("uvicorn", "--host", "{host}", "--port", "{port}", "--log-level", "warning"),
        *("--timeout-graceful-shutdown", "2", "oncekey.testing.http.serving:asgi"),
    ),
}
"""Name -> the arguments of ``python -m``. Every server has one worker: the control is that of one process."""
OF_SERVER = ("date", "server", "connection")
"""Headers that a server adds to every response."""
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Given to each client, which would otherwise load all certificates of this machine."""


@dataclass(frozen=True)
class Answer:
    """What the process says to one question. ``is_object``: what is there is no data, so it stays there."""

    value: Any = None
    is_object: bool = False
    error: str | None = None


class Server:
    """A server process. ``command``: a name in SERVERS, or the arguments of ``python -m``."""

    def __init__(self, command: str | Sequence[str]) -> None:
        words = SERVERS.get(command, ()) if isinstance(command, str) else command
        if not words:
            raise ConfigurationError(
                f"the suite knows {' and '.join(SERVERS)}, not {command!r}: give the arguments of `python -m` instead"
            )
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="oncekey-suite-"))
        self._log = self._folder / "log"
        self._lock = threading.Lock()
        self._control: Connection | None = None
        places = {"host": HOST, "port": str(self.port), "address": f"{HOST}:{self.port}"}
        environ = os.environ | {
            CONTROL: str(self._folder / "control"),
            "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *(word.format(**places) for word in words)],
                env=environ, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
            )  # fmt: skip
        try:
            until(self._answers, f"the server starts: {words}", START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise ServerFailed(f"the server has ended:\n{self.log()}")
        try:
            self._control = self._control or Client(str(self._folder / "control"), "AF_UNIX")
            socket.create_connection((HOST, self.port), 1.0).close()
        except OSError:
            return False
        return True

    def ask(self, verb: str, path: str, *given: Any) -> Any:
        """``get``, ``set`` or ``call`` what is at this path of the process's Host."""
        assert self._control is not None
        with self._lock:
            self._control.send((verb, path, given))
            answer: Answer = self._control.recv()
        if answer.error is not None:
            raise ServerFailed(f"{path}: {answer.error}\n{self.log()}")
        return Remote(self, path) if answer.is_object else answer.value

    def log(self) -> str:
        """The last lines that the process wrote."""
        return self._log.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        if self._control is not None:
            self._control.close()
        self.process.terminate()
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)


class Remote:
    """An object in the process, by its path. Data is copied to the test; everything else is a Remote, too."""

    def __init__(self, server: Server, path: str) -> None:
        object.__setattr__(self, "_at", (server, path))

    def __getattr__(self, name: str) -> Any:
        server, path = self._at
        return server.ask("get", f"{path}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        server, path = self._at
        server.ask("set", f"{path}.{name}", value)

    def __call__(self, *given: Any) -> Any:
        server, path = self._at
        return server.ask("call", path, *given)


class ServedStack(Stack):
    """The protected app of one framework in a server process. Its store is read from this process."""

    def __init__(self, server: Server, store_url: str, framework: Framework, **options: Any) -> None:
        self.server = server
        self._store_url = store_url
        super().__init__(framework, **options)

    def _open(self, options: dict[str, Any]) -> None:
        self._reader = open_store(self._store_url)
        if not self._reader.capabilities.shared:
            raise ConfigurationError(f"two processes cannot share {self._store_url}: give the suite another store_url")
        self._reader.migrate()
        try:
            self.server.ask("call", "make", self.framework, self._store_url, options)
        except BaseException as error:
            self._reader.close()
            if not isinstance(error, pickle.PicklingError | AttributeError):
                raise
            raise ConfigurationError(
                "the server process imports make_app and functions among the options, so they must be functions of a "
                f"module, or a functools.partial of one: {error}"
            ) from error
        self.inside = cast("Protected", Remote(self.server, "inside"))

    def together(self, requests: list[dict[str, Any]]) -> list[httpx.Response]:
        """One request after the other, on one connection."""
        with httpx.Client(
            base_url=f"http://{HOST}:{self.server.port}", timeout=30.0, trust_env=False, verify=_NO_TLS
        ) as client:
            answers: list[httpx.Response] = []
            for asked in requests:
                try:
                    answer = client.request(**asked)
                except httpx.TransportError:
                    if not answers:
                        raise
                    # uvicorn closes a connection after an exception of the app, though the response was sent
                    answer = client.request(**asked)
                answers.append(without_headers_of_server(answer))
            return answers

    def record(self, key: str = "k-1", scope: str = ONE) -> Record | None:
        return self._reader.read([(scope, key)])[0]

    def rows(self) -> list[Record]:
        return self._reader.listing()

    def close(self) -> None:
        try:
            self.server.ask("call", "close")
        finally:
            self._threads.shutdown()
            self._reader.close()


def without_headers_of_server(response: httpx.Response) -> httpx.Response:
    """The response as the app made it. A second Date would be one that the app replays."""
    assert len(response.headers.get_list("date")) <= 1, response.headers.raw  # gunicorn's own 500 has none
    for name in OF_SERVER:
        response.headers.pop(name, None)
    return response
