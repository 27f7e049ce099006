"""One connection through the proxy: its two pipes with the bytes that they hold, and the cuts that wait for bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["to_server", "to_client"]
When = Literal["before", "after"]


@dataclass(eq=False)
class Cut:
    """One ``cut_on``: how often it has cut a connection (``struck``), and how often it still may (``left``)."""

    direction: Direction
    pattern: bytes | Callable[[bytes], bool]
    when: When
    left: int
    struck: int = 0
    _event: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float) -> bool:
        """Wait for the first cut. False: there was none in time."""
        return self._event.wait(timeout)

    def cancel(self) -> None:
        """Cut no more connections."""
        self.left = 0

    def matches(self, before: bytes, chunk: bytes) -> bool:
        """Whether this chunk has the bytes of the pattern, or the rest of them after ``before``."""
        if callable(self.pattern):
            return self.pattern(chunk)
        overlap = len(self.pattern) - 1
        return self.pattern in (before[-overlap:] if overlap else b"") + chunk

    @contextlib.contextmanager
    def striking(self) -> Iterator[None]:
        """Count the cut before a client can notice it, and wake :meth:`wait` when it is done."""
        self.struck += 1
        yield
        self._event.set()


class Pipe:
    """One direction of one connection: where bytes come from, where they go, and the bytes that it holds."""

    def __init__(self, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        self.direction: Direction = direction
        self.source = source
        self.sink = sink
        self.held: deque[tuple[float, bytes]] = deque()  # (when it is due, bytes)
        self.size = 0
        self.tail = b""  # the last bytes seen, for a pattern that falls between two chunks
        self.blocked = False  # the sink takes no more bytes for now
        self.ended = False  # the source sends no more bytes
        self.closed = False  # the sink was shut down for writing

    def push(self, due: float, chunk: bytes) -> None:
        self.held.append((due, chunk))
        self.size += len(chunk)

    def hurry(self) -> None:
        """Make all held bytes due now."""
        self.held = deque((0.0, chunk) for _, chunk in self.held)

    def flush(self, now: float) -> None:
        """Send the bytes that are due, as far as the sink takes them. After the last bytes, shut the sink down."""
        self.blocked = False
        while self.held and self.held[0][0] <= now:
            due, chunk = self.held.popleft()
            sent = 0
            with contextlib.suppress(BlockingIOError):
                sent = self.sink.send(chunk)
            self.size -= sent
            if sent < len(chunk):
                self.held.appendleft((due, chunk[sent:]))
                self.blocked = True
                return
        if self.ended and not self.held and not self.closed:
            self.closed = True
            self.sink.shutdown(socket.SHUT_WR)


class Link:
    """A client's connection, and the proxy's connection to the server for it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.connected = False
        self.up = Pipe("to_server", client, server)
        self.down = Pipe("to_client", server, client)
        self.doom: Cut | None = None  # a cut with "after" that has matched: it cuts when the bytes have passed

    @property
    def pipes(self) -> tuple[Pipe, Pipe]:
        return self.up, self.down
