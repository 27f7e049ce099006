"""A server for a fixture: skipped where there is none, and stopped at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import pytest

from oncekey.testing.servers import ServerUnavailable


class Server(Protocol):
    def start(self) -> object: ...

    def stop(self) -> object: ...


_Server = TypeVar("_Server", bound=Server)


@contextmanager
def running(server: _Server) -> Iterator[_Server]:
    """Start the server, or skip the test with the sentence that says what to install."""
    try:
        server.start()
    except ServerUnavailable as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        server.stop()
