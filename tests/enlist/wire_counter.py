"""A proxy that counts what goes over a connection to PostgreSQL: statements, and round trips."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

_NO_TLS = (80877103, 80877104)
"""The codes by which a client asks for TLS or GSSAPI before it begins."""


class WireCounter:
    """Listens on a loopback port. A message that the server ends with ReadyForQuery is a round trip."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._lock = threading.Lock()
        self.statements = 0
        self.round_trips = 0
        self._pump(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def count(self) -> tuple[int, int]:
        """The statements and the round trips since the last call."""
        with self._lock:
            counted = self.statements, self.round_trips
            self.statements = self.round_trips = 0
        return counted

    @staticmethod
    def _pump(run: object, *args: object) -> None:
        threading.Thread(target=run, args=args, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                self._begin(client, server)
                self._pump(self._forward, client, server)
                self._pump(self._read, server, client)

    @staticmethod
    def _begin(client: socket.socket, server: socket.socket) -> None:
        """Pass the first packet on. Refuse TLS: the proxy could not read it."""
        while True:
            first = client.recv(65536)
            if int.from_bytes(first[4:8], "big") not in _NO_TLS:
                break
            client.sendall(b"N")
        server.sendall(first)

    @staticmethod
    def _forward(client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _read(self, server: socket.socket, client: socket.socket) -> None:
        """Count before passing on, so that a client that has its answer has been counted."""
        rest = b""
        with suppress(OSError):
            while data := server.recv(65536):
                rest += data
                while len(rest) >= 5 and len(rest) > (length := int.from_bytes(rest[1:5], "big")):
                    with self._lock:
                        self.statements += rest[:1] == b"C"  # CommandComplete
                        self.round_trips += rest[:1] == b"Z"  # ReadyForQuery
                    rest = rest[length + 1 :]
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)
