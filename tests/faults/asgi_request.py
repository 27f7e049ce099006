"""A request sent in ASGI by hand, so that a fault can come at any message of it, and thousands cost little."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oncekey.core.problems import Situation
from tests.faults.linearizable import Saw

App = Callable[[Any, Any, Any], Awaitable[None]]
JSON = (b"content-type", b"application/json")
UNMEASURED = "/unmeasured"
"""The path of requests whose body has no announced length: they leave the flat way at the head."""
MARKER = b"idempotency-replayed"
_TYPE = b"urn:oncekey:problem:"

_PROBLEMS = {
    Situation.IN_FLIGHT: Saw.BUSY,
    Situation.UNKNOWN: Saw.UNKNOWN,
    Situation.MISMATCH: Saw.MISMATCH,
    Situation.NOT_EXECUTED: Saw.RELEASED,
    Situation.NOT_FINISHED: Saw.RELEASED,
    Situation.REFUSED: Saw.LOST,  # the key is unused: as if nothing had been said
}


class AsgiRequest:
    """One request under a key: its messages, and what came back. The client is there until it leaves."""

    def __init__(self, path: str, key: str, *pieces: bytes) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"idempotency-key", key.encode()), JSON, *_length(path, pieces)],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self._pieces = list(pieces)
        self._gone = asyncio.Event()
        self.status = 0
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.body = b""
        self.ended = False
        """The client has the whole answer."""
        self.began = self.ended_at = 0.0

    def leave(self) -> None:
        """The client is gone: ``receive`` says so from now on, and ``send`` raises, as servers of ASGI 2.4 do."""
        self._gone.set()

    @property
    def gone(self) -> bool:
        return self._gone.is_set()

    async def receive(self) -> dict[str, Any]:
        if not self._pieces or self.gone:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def send(self, message: Any) -> None:
        if self.gone:
            raise OSError("the client has gone")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = tuple(message["headers"])
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)
            self.ended_at = time.monotonic()

    def start(self, app: App) -> asyncio.Task[None]:
        self.began = time.monotonic()
        task: asyncio.Task[None] = asyncio.ensure_future(app(self.scope, self.receive, self.send))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a server would log it
        return task

    @property
    def saw(self) -> Saw:
        """What this client knows now."""
        if not self.ended:
            return Saw.LOST
        if self.replayed:
            return Saw.REPLAYED
        for situation, saw in _PROBLEMS.items():
            if _TYPE + situation.value.encode() in self.body:
                return saw
        if self.status == 500:
            return Saw.DOUBTED
        return Saw.LOST if self.status >= 500 else Saw.EXECUTED

    @property
    def replayed(self) -> bool:
        return any(name == MARKER for name, _ in self.headers)

    @property
    def result(self) -> str | None:
        """Status and bytes, of an answer that is the handler's."""
        if self.saw not in (Saw.EXECUTED, Saw.REPLAYED):
            return None
        return f"{self.status} {self.body.decode('latin-1')}"


def _length(path: str, pieces: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    return [] if path == UNMEASURED else [(b"content-length", b"%d" % sum(map(len, pieces)))]


@contextmanager
def quiet() -> Iterator[None]:
    """Without oncekey's log: it tells of every fault, and here they are thousands."""
    log = logging.getLogger("oncekey")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
