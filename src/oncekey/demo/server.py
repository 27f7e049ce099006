"""Runs the demo: a parent that holds the port, and a child that serves it and may be killed.

The parent opens the listening socket once, so a client that retries while the child starts again waits for it instead
of being refused.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from oncekey.errors import ConfigurationError

_CURL = """\
  curl -i http://127.0.0.1:{port}/payments -H 'Authorization: Bearer tenant-a' -H 'Idempotency-Key: first-1' \\
       -H 'Content-Type: application/json' -d '{{"customerId":"cus-1","amountCents":1200,"currency":"EUR"}}'
  curl -i 'http://127.0.0.1:{port}/payments?simulate=crash' -H 'Authorization: Bearer tenant-a' \\
       -H 'Idempotency-Key: crash-1' -H 'Content-Type: application/json' \\
       -d '{{"customerId":"cus-1","amountCents":900,"currency":"EUR"}}'
  curl http://127.0.0.1:{port}/payments -H 'Authorization: Bearer tenant-a'"""


def run(store: str, port: int, host: str = "127.0.0.1") -> int:
    """Serve until interrupted; start again whenever the child is killed."""
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    print(f"oncekey demo: a payments API on http://{host}:{port}, docs on http://{host}:{port}/docs")
    print(f"keys and payments are kept in {_where(store)}")
    print("try these; send the first one twice, and the second one again after the crash:")
    print(_CURL.format(port=port), flush=True)
    stopping = False
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        if child is not None:
            child.terminate()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    while not stopping:
        command = [sys.executable, "-m", "oncekey.demo.server", str(listener.fileno()), store]
        child = subprocess.Popen(command, pass_fds=[listener.fileno()])
        code = child.wait()
        if code >= 0 and not stopping:
            return code  # it ended by itself: a wrong store, say, and it has said so
        if not stopping:
            print(f"the app was killed (signal {-code}); starting it again", flush=True)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        raise ConfigurationError(f"port {port} cannot be opened ({error.strerror}): try another with --port") from error


def _where(store: str) -> str:
    if store.startswith("sqlite:///"):
        return f"the file {Path(store.removeprefix('sqlite:///')).resolve()}"
    parts = urlsplit(store)
    return f"the database {parts.path.lstrip('/')} at {parts.hostname or 'localhost'}"


def serve(fd: int, store: str) -> None:
    """The child: serve the inherited socket."""
    from oncekey.demo.app import make_app

    with socket.socket(fileno=fd) as listener:
        config = uvicorn.Config(make_app(store), log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
