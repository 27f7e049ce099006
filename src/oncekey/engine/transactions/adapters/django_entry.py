"""Django's connections as they were when a view, or a protected function, was entered.

``enlist()`` asks three things that only the beginning of the view can tell: whether the view has written on SQLite
since, which blocks of ``transaction.atomic()`` are the view's own, and whether Django's block of ``ATOMIC_REQUESTS`` is
around *this* view. The setting does not tell the last one: ``@transaction.non_atomic_requests`` takes a view out, and
middleware may call a view itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from django.db import connections


class Entered(NamedTuple):
    """One connection when the view was entered."""

    raw: Any = None
    """The driver's connection; None: Django was not connected yet."""
    changes: int = 0
    """SQLite: how many rows it had changed."""
    blocks: int = 0
    """How many blocks of ``atomic()`` were open around the view, without Django's own for it."""
    atomic_requests: bool = False
    """Django has opened a block for this view, and rolls it back if the view raises."""

    def has_written(self, raw: Any) -> bool:
        """SQLite: whether this connection changed rows since. A connection that is newer than the entry counts from
        zero."""
        return bool(raw.total_changes != (self.changes if self.raw is raw else 0))

    def own_blocks(self, wrapper: Any) -> int:
        """How many blocks the view itself has open."""
        return len(wrapper.atomic_blocks) - self.blocks - self.atomic_requests


_NOT_CONNECTED = Entered()
_entered: ContextVar[Mapping[str, Entered] | None] = ContextVar("oncekey_django_entered", default=None)


def entered(alias: str) -> Entered | None:
    """The connection of this alias when the view was entered; None: that was not noted."""
    seen = _entered.get()
    return None if seen is None else seen.get(alias, _NOT_CONNECTED)


def own_blocks(wrapper: Any) -> int:
    """How many blocks of this connection are the view's own."""
    return (entered(wrapper.alias) or _NOT_CONNECTED).own_blocks(wrapper)


def seen_now() -> dict[str, Entered]:
    """All connections of this thread. The thread must be the one that the view's connections belong to."""
    return {
        each.alias: Entered(each.connection, getattr(each.connection, "total_changes", 0), len(each.atomic_blocks))
        for each in connections.all(initialized_only=True)
    }


@contextmanager
def noted(seen: Mapping[str, Entered] | None) -> Iterator[None]:
    """For as long as the view or function runs. Not by a token: it may end in another context than it began."""
    before = _entered.get()
    _entered.set(seen)
    try:
        yield
    finally:
        _entered.set(before)


def note_atomic_requests() -> None:
    """Call it in the view, after Django has opened its blocks. A block that is open now, and was not when the view was
    entered, is that of ``ATOMIC_REQUESTS``."""
    before = _entered.get()
    if before is None:
        return
    _entered.set(
        {
            alias: now._replace(blocks=was.blocks, atomic_requests=now.blocks > was.blocks)
            for alias, now in seen_now().items()
            for was in (before.get(alias, _NOT_CONNECTED),)
        }
    )


def note_handler() -> None:
    """Call it when a view of REST framework has authenticated its caller. What that committed is not the handler's:
    every request writes it."""
    before = _entered.get()
    if before is None:
        return
    seen = dict(before)
    for wrapper in connections.all(initialized_only=True):
        if not wrapper.in_atomic_block:
            was, raw = before.get(wrapper.alias, _NOT_CONNECTED), wrapper.connection
            seen[wrapper.alias] = was._replace(raw=raw, changes=getattr(raw, "total_changes", 0))
    _entered.set(seen)
