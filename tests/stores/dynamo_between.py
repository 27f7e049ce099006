"""A server between a store and DynamoDB: it passes requests on, records them, and refuses some of them.

Each request is recorded with its operation and with the access key that signed it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from oncekey.testing.servers import HOST
from tests.stores.dynamo_rows import port_of


class Between:
    """Passes requests on to a server; the next ``refusals`` writes get an error, after or before they are applied."""

    asked: list[tuple[str, str]]
    """The operation of each request (``UpdateItem``), and the access key that signed it."""

    def __init__(self, port: int) -> None:
        self.refusals, self.applied, self.error, self.status = 0, False, "ThrottlingException", 400
        self.seen, self.hot = 0, b""
        self.asked = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.asked.append(
                    (_operation(self.headers["x-amz-target"]), _signer(self.headers.get("authorization", "")))
                )
                refused = outer.refusals > 0 and "Update" in self.headers["x-amz-target"] and outer.hot in body
                answer, status = b"", 0
                if not refused or outer.applied:
                    onward = HTTPConnection(HOST, port)
                    kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                    onward.request("POST", "/", body, kept)
                    got = onward.getresponse()
                    status, answer = got.status, got.read()
                    onward.close()
                if refused:
                    outer.refusals -= 1
                    outer.seen += 1
                    status = outer.status
                    answer = json.dumps({"__type": f"com.amazonaws#{outer.error}", "message": "slow down"}).encode()
                self.send_response(status)
                self.send_header("content-type", "application/x-amz-json-1.0")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self.server = ThreadingHTTPServer((HOST, 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]

    def url_of(self, url: str) -> str:
        """The same table, through this server."""
        return f"{url.partition('&')[0]}&endpoint=http://{HOST}:{self.port}"


@contextmanager
def between(url: str) -> Iterator[Between]:
    shim = Between(port_of(url))
    thread = Thread(target=shim.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield shim
    finally:
        shim.server.shutdown()
        shim.server.server_close()
        thread.join()


def _operation(target: str) -> str:
    return target.rpartition(".")[2]


def _signer(authorization: str) -> str:
    found = re.search(r"Credential=([^/]*)/", authorization)
    return found[1] if found else ""
