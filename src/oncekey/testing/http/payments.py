"""What the small payments API of the tests does, without its framework.

``Payments`` counts its effects, and the mode of a request (``?m=``) says how it ends. Nothing here asserts.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from oncekey import NotExecuted, OutcomeUnknown, Refused, current
from oncekey.errors import NoOperation

MAX_RESPONSE = 4096
"""The ``max_response_bytes`` of every Stack: above it stand the modes "large" and "stream-large"."""


@dataclass(frozen=True)
class Reply:
    """A response that is not yet one of the framework. ``streamed``: it is sent in these pieces, without a length."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str | None = "application/json"
    streamed: tuple[bytes, ...] | None = None
    breaks: bool = False
    """Whether the stream raises in the place of its end."""

    @property
    def header_list(self) -> list[tuple[str, str]]:
        """The headers, with the content type first."""
        return ([("content-type", self.content_type)] if self.content_type else []) + list(self.headers)


class Abort(Exception):
    """Each framework turns it into its own HTTP exception."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True)
class Run:
    """One effect: what a handler saw of itself."""

    key: str
    attempt: int
    downstream_key: str | None
    in_loop: bool
    """Whether it ran in an event loop; otherwise in a thread without one."""


@dataclass
class Payments:
    """The API without its framework: ``handle`` and its async twin are all that a handler calls."""

    runs: list[Run] = field(default_factory=list)
    healed: bool = False
    """From now on every mode is "ok"."""
    raising: bool = False
    """From now on every mode is "raise"."""
    entered: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    """The mode "slow" says ``entered`` and waits for ``go``."""

    def handle(self, mode: str) -> Reply:
        run = self._ran(mode)
        if mode == "slow":
            self.entered.set()
            self.go.wait(30.0)
        return self._end(mode, run)

    async def handle_async(self, mode: str) -> Reply:
        run = self._ran(mode)
        if mode == "slow":
            self.entered.set()
            await asyncio.to_thread(self.go.wait, 30.0)
        return self._end(mode, run)

    def _ran(self, mode: str) -> int:
        operation = current()
        # `downstream_key` counts as the begin of the operation, and "refused" ends before it.
        downstream = None if mode == "refused" else operation.downstream_key("charge")
        self.runs.append(Run(operation.key, operation.attempt, downstream, _in_loop()))
        return len(self.runs)

    def _end(self, mode: str, run: int) -> Reply:
        if self.healed:
            mode = "ok"
        if self.raising:
            mode = "raise"
        verb, _, status = mode.partition("-")
        match verb:
            case "return":
                return Reply(int(status), b'{"error":"returned"}')
            case "abort":
                raise Abort(int(status))
            case "raise":
                raise RuntimeError("the handler broke")
            case "not":
                raise NotExecuted("the bank is closed")
            case "unknown":
                raise OutcomeUnknown("the bank did not answer")
            case "refused":
                raise Refused("not today", status=int(status or 400))
            case "204":
                return Reply(204, content_type=None)
            case "large":
                return Reply(201, b"x" * (MAX_RESPONSE + 1), (("location", f"/payments/pay_{run}"),))
            case "stream":
                pieces: tuple[bytes, ...] = (b'{"id":', b'"pay_%d"' % run, b"}")
                if status == "large":
                    pieces = tuple(b"x" * 1000 for _ in range(10))
                where = (("location", f"/payments/pay_{run}"),)
                return Reply(201, headers=where, streamed=pieces, breaks=status == "broken")
            case "events":
                # With a charset, which Litestar adds to all text and the others do not.
                kind = "text/event-stream; charset=utf-8"
                return Reply(200, content_type=kind, streamed=(b"data: 1\n\n", b"data: 2\n\n"))
        return Reply(
            201,
            b'{"id":"pay_%d","status":"paid"}' % run,
            (
                ("location", f"/payments/pay_{run}"),
                ("etag", f'"{run}"'),
                ("cache-control", "no-store"),
                ("x-trace", f"of this run, {run}"),
                ("set-cookie", "session=secret"),
            ),
        )


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def unprotected() -> Reply:
    """The answer of GET and exempt routes. It shows whether ``current()`` finds an operation, which it must not."""
    try:
        return Reply(200, json.dumps({"operation": current().key}).encode())
    except NoOperation:
        return Reply(200, b'{"operation":null}')


def pieces_of(reply: Reply) -> Iterator[bytes]:
    yield from reply.streamed or ()
    if reply.breaks:
        raise RuntimeError("the stream broke")


async def async_pieces_of(reply: Reply) -> AsyncIterator[bytes]:
    for piece in pieces_of(reply):
        yield piece
