"""moto's server behind one lock, in a process of its own: ``python moto_app.py PORT``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

HOST = "127.0.0.1"


class OneAtATime:
    """A WSGI app that serves one request at a time: moto's conditional writes are not atomic."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with self._lock:
            return list(self._app(environ, start_response))


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as Amazon's do
    disable_nagle_algorithm = True  # head and body are two writes: without this, the second waits 40 ms

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        del code, size


def main(port: int) -> None:
    app = OneAtATime(DomainDispatcherApplication(create_backend_app))
    run_simple(HOST, port, app, threaded=True, request_handler=Quiet)


if __name__ == "__main__":
    main(int(sys.argv[1]))
