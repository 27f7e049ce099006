"""A Redis server for tests."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from oncekey.testing.servers.binaries import find_redis
from oncekey.testing.servers.folders import Folder
from oncekey.testing.servers.processes import HOST, ServerFailed
from oncekey.testing.servers.server import Server


class RedisServer(Server):
    """A Redis server that evicts nothing. ``durable=True``: each command is on disk before its answer."""

    kind = "Redis"
    _stop_signal = signal.SIGTERM

    def __init__(self, *, durable: bool = False, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._binary: Path | None = None
        self._settings = {
            "bind": HOST,
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if durable else "no",
            "appendfsync": "always",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def flush(self) -> None:
        """Delete every key."""
        self._ask("FLUSHALL")

    def _ask(self, command: str) -> str:
        with socket.create_connection((HOST, self.port), 5.0) as sock, sock.makefile("rb") as answers:
            sock.sendall(command.encode() + b"\r\n")
            answer = answers.readline().decode(errors="replace").strip()
        if not answer.startswith("+"):
            raise ServerFailed(f"Redis answered {command} with {answer or 'nothing'}")
        return answer

    def _prepare(self) -> None:
        self._binary = find_redis()
        self._folder = Folder("redis", None)

    def _command(self) -> list[str]:
        settings = [word for name, value in self._settings.items() for word in (f"--{name}", value)]
        return [str(self._binary), "--port", str(self.port), "--dir", str(self._home), *settings]

    def _answers(self) -> bool:
        try:
            return self._ask("PING") == "+PONG"
        except (OSError, ServerFailed):
            return False
