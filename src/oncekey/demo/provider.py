"""The demo's payment provider: a process of its own, with a ledger of its own on disk.

It plays the part of a real payment provider. A charge in its ledger has happened: the line is on disk before the answer
is sent, and a crash of the app does not undo it. What the app can promise depends on whether the provider **honours**
idempotency keys. If it does, a charge that is sent again under its key returns the first charge. If it does not, it
makes a second charge.

``POST /charges`` with ``Idempotency-Key``, ``GET /charges``.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from oncekey.demo.family import follow_parent

Charge = dict[str, Any]
_MEMBERS = ("customerId", "amountCents", "currency")


class Ledger:
    """Charges, one per line. ``charges()`` returns only charges that are on disk."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        written = path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        if whole != written:  # it was killed in the middle of a line, and had not answered that request
            os.ftruncate(self._file, len(whole))
        self._charges: list[Charge] = [json.loads(line) for line in whole.splitlines()]
        self._by_key = {charge["downstreamKey"]: charge for charge in reversed(self._charges)}

    def charges(self) -> list[Charge]:
        with self._lock:
            return list(self._charges)

    def charge(self, asked: Charge, key: str | None, *, honours: bool) -> Charge:
        """Make a charge. If keys are honoured and this key is known, return the charge that it made before."""
        with self._lock:
            if honours and key is not None and (known := self._by_key.get(key)) is not None:
                return known
            charge = {"id": f"ch_{uuid4().hex[:16]}", **asked, "downstreamKey": key}
            os.write(self._file, json.dumps(charge).encode() + b"\n")
            os.fsync(self._file)
            self._charges.append(charge)
            self._by_key.setdefault(key, charge)
            return charge

    def close(self) -> None:
        os.close(self._file)


def make_server(
    listener: socket.socket, ledger: Ledger, *, honours: bool, charged: Callable[[Charge], None] | None = None
) -> ThreadingHTTPServer:
    """The provider on an open socket. ``charged`` is called after a charge is on disk and before it is answered."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked = {name: body[name] for name in _MEMBERS}
            charge = ledger.charge(asked, self.headers["idempotency-key"], honours=honours)
            if charged is not None:
                charged(charge)
            self._answer(201, charge)

        def do_GET(self) -> None:
            self._answer(200, ledger.charges())

        def _answer(self, status: int, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal is for the demo's user."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore it: an app that was killed cannot read its answer, and the demo kills the app on purpose."""

    server = Server(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    return server


class Provider:
    """The app's client of the provider: one connection for each call, with the standard library alone."""

    def __init__(self, url: str, *, honours: bool, timeout: float = 20.0) -> None:
        parts = urlsplit(url)
        self.honours = honours
        self._place = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._timeout = timeout

    def charge(self, key: str, customer_id: str, amount_cents: int, currency: str) -> Charge:
        """OSError: the provider did not answer, and it is unknown whether it has charged."""
        body = dict(zip(_MEMBERS, (customer_id, amount_cents, currency), strict=True))
        charge: Charge = self._ask("POST", body, {"Idempotency-Key": key, "Content-Type": "application/json"})
        return charge

    def charges(self) -> list[Charge]:
        charges: list[Charge] = self._ask("GET", None, {})
        return charges

    def _ask(self, method: str, body: object, headers: dict[str, str]) -> Any:
        connection = http.client.HTTPConnection(*self._place, timeout=self._timeout)
        try:
            connection.request(method, "/charges", json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            if answer.status >= 300:
                raise OSError(f"the provider answered {answer.status}")
            return json.loads(answer.read())
        except http.client.HTTPException as error:
            raise OSError("the provider hung up") from error
        finally:
            connection.close()


def main(place: str, path: str, honours: str = "yes") -> None:
    """``python -m oncekey.demo.provider 127.0.0.1:9100 charges.jsonl``; the demo passes an open socket as ``place``."""
    host, colon, port = place.rpartition(":")
    listener = socket.create_server((host, int(port)), backlog=512) if colon else socket.socket(fileno=int(port))
    follow_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL if colon else signal.SIG_IGN)  # in the demo the parent stops it
    make_server(listener, Ledger(Path(path)), honours=honours == "yes").serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
