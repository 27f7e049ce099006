"""Servers that speak DynamoDB's API, for tests: dynalite, and moto behind a lock.

dynalite is atomic, validates requests as Amazon does, and does not return the old item with a refusal. moto returns it,
and by itself lets two conditional writes win: so here it serves one request at a time. Neither knows throttling, nor
indexes that lag behind their table.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from itertools import count
from pathlib import Path
from typing import cast

from oncekey.testing.servers.binaries import find_dynalite
from oncekey.testing.servers.folders import Folder
from oncekey.testing.servers.processes import HOST, ServerUnavailable
from oncekey.testing.servers.server import Server

REGION = "eu-central-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
"""The servers take any; the SDK insists on some. Set them in the environment of the store's process."""


_LOST_CLIENTS = """
process.on('uncaughtException', function (error) {
  if (error.code === 'ECONNRESET' || error.code === 'EPIPE') return
  console.error(error)
  process.exit(1)
})
"""
"""dynalite ends if a client is killed in the middle of a request; Amazon's servers do not."""


class DynamoServer(Server):
    """What both have in common."""

    _stop_signal = signal.SIGTERM
    _tables = count(1)

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return self.url_of("oncekey")

    def url_of(self, table: str) -> str:
        """The address of one table, whether it exists or not."""
        return f"dynamodb://{table}?region={REGION}&endpoint={self.endpoint}"

    def new_url(self) -> str:
        """The address of a table that does not exist yet."""
        return self.url_of(f"test_{os.getpid()}_{next(self._tables)}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), 2.0):
                pass
            with urllib.request.urlopen(self.endpoint, timeout=2.0):  # noqa: S310 - our own address
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False


class DynaliteServer(DynamoServer):
    """dynalite, which needs Node.js. ``durable=True``: its tables survive a kill."""

    kind = "dynalite"

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__()
        self._durable = durable
        self._binaries: tuple[Path, Path] | None = None

    def _prepare(self) -> None:
        self._binaries = find_dynalite()
        self._folder = Folder("dynalite", None)
        (self._home / "lost_clients.js").write_text(_LOST_CLIENTS)

    def _command(self) -> list[str]:
        instantly = [word for verb in ("create", "delete", "update") for word in (f"--{verb}TableMs", "0")]
        kept = ["--path", str(self._home / "tables")] if self._durable else []
        node, script = cast("tuple[Path, Path]", self._binaries)
        run = [str(node), "--require", str(self._home / "lost_clients.js"), str(script)]
        return [*run, "--host", HOST, "--port", str(self.port), *instantly, *kept]


class MotoServer(DynamoServer):
    """moto, one request at a time. It keeps its tables in memory."""

    kind = "moto"

    def _prepare(self) -> None:
        if importlib.util.find_spec("moto") is None:
            raise ServerUnavailable("moto is not installed: pip install 'moto[dynamodb,server]'")
        self._folder = Folder("moto", None)

    def _command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("moto_app.py")), str(self.port)]

    def _environment(self) -> dict[str, str]:
        return super()._environment() | CREDENTIALS
