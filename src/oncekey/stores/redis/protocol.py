"""Redis's wire protocol, as far as scripts need it; ``hiredis`` reads the replies. Pure.

redis-py's own connections have no deadline for a whole reply, so oncekey reads the socket itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hiredis import Reader


class Refusal(Exception):
    """An error that the server answered in place of a result. ``code`` is its first word, such as MOVED."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code, _, self.rest = text.partition(" ")


_LENGTHS = [b"\r\n$%d\r\n" % length for length in range(1024)]
"""What stands before an argument of each length: the end of the last line, and the length."""


def pack(commands: Iterable[Sequence[bytes]]) -> bytes:
    """Commands as they are sent. hiredis takes nearly three times the instructions for it (docs/performance.md)."""
    return b"".join([_packed(command) for command in commands])


def _packed(command: Sequence[bytes]) -> bytes:
    parts = [b""] * (2 * len(command))
    try:
        parts[::2] = [_LENGTHS[len(argument)] for argument in command]
    except IndexError:
        parts[::2] = [b"\r\n$%d\r\n" % len(argument) for argument in command]
    parts[1::2] = command
    return b"*%d%b\r\n" % (len(command), b"".join(parts))


class Replies:
    """Reads replies from any cut of the stream. Words and texts are bytes."""

    def __init__(self) -> None:
        self._reader = Reader(protocolError=ValueError, replyError=Refusal)
        self._read: list[Any] = []

    def feed(self, data: bytes) -> None:
        self._reader.feed(data)

    def take(self, count: int) -> list[Any] | None:
        """The next ``count`` replies, if all of them have arrived. A refusal is among them as an exception."""
        replies, next_reply = self._read, self._reader.gets
        while len(replies) < count:
            reply = next_reply()
            if reply is False:  # it goes on in bytes that have not arrived; the protocol has no other False
                return None
            replies.append(reply)
        self._read = replies[count:]
        return replies[:count]
