"""A server that answers as it is told, over a real socket, and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")


@dataclass
class Reply:
    status: int = 200
    body: bytes = b"{}"
    headers: tuple[tuple[str, str], ...] = ()
    cut: str = ""
    """``before`` the answer, or ``inside`` it."""


Script = Callable[[Asked], Reply]


class Server:
    """``replies`` are given in turn; the last one for ever."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def keys(self) -> list[str | None]:
        return [asked.key for asked in self.asked]

    def answer(self, asked: Asked) -> Reply:
        with self.lock:
            self.asked.append(asked)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


def problem(status: int, kind: str, **headers: str) -> Reply:
    """An error document as oncekey's server sends it."""
    lines = [("Content-Type", "application/problem+json"), *((n.replace("_", "-"), t) for n, t in headers.items())]
    body = json.dumps({"type": f"urn:oncekey:problem:{kind}", "reference": "550e~0f1e2d3c"}).encode()
    return Reply(status, body, tuple(lines))


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Serve anything with ``answer(asked)`` on a loopback port, in threads."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = self.rfile.read(length)
            if len(body) < length:  # the client was killed before it had sent the whole request
                self.close_connection = True
                return
            headers = {name.lower(): text for name, text in self.headers.items()}
            reply = server.answer(Asked(self.command, self.path, headers, body))
            if reply.cut == "before":
                self._reset()
                return
            self.send_response_only(reply.status)
            for name, text in reply.headers:
                self.send_header(name, text)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if reply.cut == "inside":
                self.wfile.write(reply.body[: len(reply.body) // 2])
                self.wfile.flush()
                self._reset()
                return
            if self.command != "HEAD":
                self.wfile.write(reply.body)

        def _reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any  # noqa: N815

        def handle(self) -> None:
            try:
                super().handle()
            except (OSError, ValueError):
                self.close_connection = True

        def finish(self) -> None:
            with suppress(OSError, ValueError):
                super().finish()

        def log_message(self, *args: object) -> None: ...

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def shutdown_request(self, request: Any) -> None:
            with suppress(OSError):
                super().shutdown_request(request)

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server.port = listener.server_port
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join(10)
