"""Redis's wire protocol, as far as scripts need it. Pure.

``Replies`` reads replies from any cut of the stream. redis-py's own reader has no deadline for a whole reply, and calls
several functions for each field of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Refusal(Exception):
    """An error that the server answered in place of a result. ``code`` is its first word, such as MOVED."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code, _, self.rest = text.partition(" ")


class _Incomplete(Exception):
    """The reply goes on in bytes that have not arrived."""


def pack(commands: Iterable[Sequence[bytes]]) -> bytes:
    """Commands as they are sent."""
    out: list[bytes] = []
    for command in commands:
        out.append(b"*%d\r\n" % len(command))
        out += [b"$%d\r\n%b\r\n" % (len(word), word) for word in command]
    return b"".join(out)


class Replies:
    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._needed = 0

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data
        self._needed -= self._at
        self._at = 0

    def take(self, count: int) -> list[Any] | None:
        """The next ``count`` replies, if all of them have arrived. A refusal is among them as an exception."""
        if len(self._data) < self._needed:
            return None
        replies, at = [], self._at
        try:
            for _ in range(count):
                reply, at = self._parse(at)
                replies.append(reply)
        except _Incomplete:
            return None
        self._at, self._needed = at, 0
        return replies

    def _parse(self, at: int) -> tuple[Any, int]:
        data = self._data
        end = data.find(b"\r\n", at)
        if end < 0:
            raise _Incomplete
        kind = data[at]
        if kind == 36:  # $: bytes
            size = int(data[at + 1 : end])
            if size < 0:
                return None, end + 2
            begin = end + 2
            end = begin + size
            if len(data) < end + 2:
                self._needed = end + 2
                raise _Incomplete
            return data[begin:end], end + 2
        if kind == 42:  # *: a list
            size, at = int(data[at + 1 : end]), end + 2
            if size < 0:
                return None, at
            items = []
            for _ in range(size):
                item, at = self._parse(at)
                items.append(item)
            return items, at
        if kind == 58:  # a number
            return int(data[at + 1 : end]), end + 2
        text = data[at + 1 : end].decode(errors="replace")
        if kind == 45:  # -: a refusal
            return Refusal(text), end + 2
        if kind == 43:
            return text, end + 2
        raise ValueError("the server does not speak Redis's protocol")
