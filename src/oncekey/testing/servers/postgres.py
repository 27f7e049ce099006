"""A PostgreSQL server for tests, and enough of its wire protocol to set it up without a driver."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

from oncekey.testing.servers.binaries import find_postgres, usable
from oncekey.testing.servers.folders import Folder, unprivileged_user
from oncekey.testing.servers.processes import HOST, ServerFailed
from oncekey.testing.servers.server import Server


class PostgresServer(Server):
    """A PostgreSQL server. It is as durable as one in production, unless ``fsync=False``.

    ``settings`` go on the command line (``{"lock_timeout": "1s"}``). Without ``fsync`` a killed *server* loses
    nothing, but a machine that loses power does: good for tests of behaviour, wrong for benchmarks.
    """

    kind = "PostgreSQL"
    _stop_signal = signal.SIGQUIT

    def __init__(
        self, *, fsync: bool = True, settings: Mapping[str, str] | None = None, bin_dir: Path | None = None
    ) -> None:
        super().__init__()
        self._bin = bin_dir
        self._settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "on" if fsync else "off",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, name: str) -> str:
        """The address of one database, whether it exists or not."""
        return f"postgresql://postgres@{HOST}:{self.port}/{name}"

    def database(self, name: str, *, template: str = "template0") -> str:
        """Create a new database and return its address. A database of that name is dropped first."""
        self.drop_database(name)
        self.execute(f"CREATE DATABASE {_quoted(name)} TEMPLATE {_quoted(template)}")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, also if clients are connected to it."""
        self.execute(f"DROP DATABASE IF EXISTS {_quoted(name)} WITH (FORCE)")

    def execute(self, sql: str, *, database: str = "postgres", timeout: float = 30.0) -> list[tuple[str | None, ...]]:
        """Run one statement over a connection of its own, without a driver, and return its rows as text."""
        return query(self.port, database, sql, timeout)

    def _prepare(self) -> None:
        self._user = unprivileged_user()
        self._folder = Folder("pg", self._user)
        self._bin = usable(self._bin or find_postgres(), self._folder.path, self._user)
        flags = ["--no-sync", "--no-instructions", "--auth=trust", "--username=postgres"]
        done = self._run_to_end(
            [str(self._bin / "initdb"), *flags, "--encoding=UTF8", "--locale=C", "-D", str(self._data)],
            cwd=self._home,
            environment=self._environment(),
        )
        if done.returncode != 0:
            raise ServerFailed(f"initdb failed: {done.stderr.decode(errors='replace').strip()}")

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        return [
            str(cast("Path", self._bin) / "postgres"),
            "-D",
            str(self._data),
            f"--port={self.port}",
            *settings,
        ]

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1", timeout=2.0)
        except (OSError, ServerFailed):
            return False
        return True

    @property
    def _clean_signal(self) -> signal.Signals:
        return signal.SIGINT


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def query(port: int, database: str, sql: str, timeout: float) -> list[tuple[str | None, ...]]:
    """Run one simple query in PostgreSQL's wire protocol. It needs no driver."""
    settings = b"".join(part.encode() + b"\0" for part in ("user", "postgres", "database", database))
    hello = struct.pack("!i", 196608) + settings + b"\0"
    with socket.create_connection((HOST, port), timeout) as sock, sock.makefile("rb") as answers:
        sock.sendall(struct.pack("!i", len(hello) + 4) + hello)
        _read_until_ready(answers)
        text = sql.encode() + b"\0"
        sock.sendall(b"Q" + struct.pack("!i", len(text) + 4) + text)
        rows = _read_until_ready(answers)
        sock.sendall(b"X" + struct.pack("!i", 4))
    return rows


def _read_until_ready(answers: IO[bytes]) -> list[tuple[str | None, ...]]:
    rows = []
    while True:
        head = answers.read(5)
        if len(head) < 5:
            raise ServerFailed("PostgreSQL closed the connection before it answered")
        body = answers.read(int.from_bytes(head[1:]) - 4)
        match head[:1]:
            case b"D":
                rows.append(_row(body))
            case b"E":
                fields = {part[:1]: part[1:].decode(errors="replace") for part in body.split(b"\0")}
                raise ServerFailed(f"PostgreSQL: {fields.get(b'M')} ({fields.get(b'C')})")
            case b"Z":
                return rows


def _row(body: bytes) -> tuple[str | None, ...]:
    values: list[str | None] = []
    at = 2
    for _ in range(int.from_bytes(body[:2])):
        size = int.from_bytes(body[at : at + 4], signed=True)
        at += 4
        values.append(None if size < 0 else body[at : at + size].decode())
        at += max(size, 0)
    return tuple(values)
