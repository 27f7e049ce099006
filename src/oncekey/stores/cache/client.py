"""The interface of a cache's client. The store package of its URL has it (``cache_from_url``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Identified(Protocol):
    """A store that can have a cache in front of it."""

    def identity(self) -> str:
        """The same for all processes on this database, and another one for every other database.

        Two databases may share one cache: without it, one would replay the answers of the other.
        """
        ...


class InLoopCache(Protocol):
    """Reads for one event loop."""

    async def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]: ...

    def abandon(self) -> None:
        """Drop the connection, from any thread; the next call opens another."""
        ...


class CacheClient(Protocol):
    """A server that keeps bytes by name. Every call ends within its own time limit, or raises ``CacheDown``."""

    def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]: ...

    def add(self, entries: Mapping[bytes, bytes], seconds: Mapping[bytes, float]) -> None:
        """Write each entry, for so many seconds, where nothing is under its name."""
        ...

    def replace(self, name: bytes, mark: bytes, seconds: float) -> None:
        """Write ``mark`` over whatever is under the name."""
        ...

    def in_loop(self) -> InLoopCache: ...

    def close(self) -> None:
        """Close all connections of this process; the next call opens another."""
        ...


class CacheDown(Exception):
    """The cache did not answer in time, or answered with an error. The store is asked instead."""
