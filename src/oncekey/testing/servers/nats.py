"""A NATS server with JetStream, for tests."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from oncekey.testing.servers.binaries import find_nats
from oncekey.testing.servers.folders import Folder
from oncekey.testing.servers.processes import HOST
from oncekey.testing.servers.server import Server


class NatsServer(Server):
    """One NATS server. Its streams are files, and survive a kill."""

    kind = "NATS"
    _stop_signal = signal.SIGTERM

    def __init__(self) -> None:
        super().__init__()
        self._binary: Path | None = None

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    def _prepare(self) -> None:
        self._binary = find_nats()
        self._folder = Folder("nats", None)

    def _command(self) -> list[str]:
        streams = self._home / "streams"
        return [str(self._binary), "--addr", HOST, "--port", str(self.port), "--jetstream", "--store_dir", str(streams)]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), 2.0) as sock:
                return sock.recv(4) == b"INFO"
        except OSError:
            return False
