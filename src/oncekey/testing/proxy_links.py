"""One connection through the proxy: its two pipes, what they hold and until when, and the cuts that wait for bytes."""

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
    """One ``cut_on``: how often it has struck, and how many times it still may."""

    direction: Direction
    pattern: bytes | Callable[[bytes], bool]
    when: When
    left: int
    struck: int = 0
    _event: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float) -> bool:
        """Wait until it has struck for the first time; False when it has not in time."""
        return self._event.wait(timeout)

    def cancel(self) -> None:
        """Strike no more."""
        self.left = 0

    def matches(self, before: bytes, chunk: bytes) -> bool:
        """Whether its bytes pass with this chunk, or began in the one before."""
        if callable(self.pattern):
            return self.pattern(chunk)
        overlap = len(self.pattern) - 1
        return self.pattern in (before[-overlap:] if overlap else b"") + chunk

    @contextlib.contextmanager
    def striking(self) -> Iterator[None]:
        """Counted before a client can notice, announced when it is done."""
        self.struck += 1
        yield
        self._event.set()


class Pipe:
    """One direction of one connection: where bytes come from, where they go, and those on the way."""

    def __init__(self, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        self.direction: Direction = direction
        self.source = source
        self.sink = sink
        self.held: deque[tuple[float, bytes]] = deque()  # (when it is due, bytes)
        self.size = 0
        self.tail = b""  # the last bytes seen, for a pattern that falls between two chunks
        self.blocked = False  # the sink takes no more for now
        self.ended = False  # the source will send no more
        self.closed = False  # and the sink has been told so

    def push(self, due: float, chunk: bytes) -> None:
        self.held.append((due, chunk))
        self.size += len(chunk)

    def hurry(self) -> None:
        """Everything held is due now."""
        self.held = deque((0.0, chunk) for _, chunk in self.held)

    def flush(self, now: float) -> None:
        """Pass on what is due, as far as the sink takes it; then the end, if that was the last of it."""
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
    """A client's connection and its twin to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.connected = False
        self.up = Pipe("to_server", client, server)
        self.down = Pipe("to_client", server, client)
        self.doom: Cut | None = None  # matched "after": struck when the bytes are through

    @property
    def pipes(self) -> tuple[Pipe, Pipe]:
        return self.up, self.down
