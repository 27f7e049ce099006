"""The part of the interfaces for stores that serve an event loop without a thread.

``api.py`` has the other interfaces. Import these from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from oncekey.core.record import Record, Reservation
from oncekey.core.swaps import End, Swap


class InLoop(Protocol):
    """Reserve and swap for an event loop. After any exception the lanes ask the Store instead.

    The answers are as short as they can be, because every request waits for them. A time is of the store's clock.
    """

    async def reserve(self, batch: Sequence[Reservation]) -> Sequence[float | Record | None]:
        """For each key the time at which it was inserted, or the row that was there. None: this verb did not find the
        key, so the caller asks a lane."""
        ...

    async def swap(self, batch: Sequence[End | Swap]) -> Sequence[float | None]:
        """For each key the time at which its row was moved; None: it was not. Takes only swaps with ``ends``; the lanes
        do every other move."""
        ...

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[Sequence[float | Record | None], Sequence[float | None]]:
        """``swap`` and then ``reserve``, in one commit."""
        ...

    def abandon(self) -> None:
        """Drop the connection, from any thread; the next verb opens another."""
        ...


@runtime_checkable
class EventLoops(Protocol):
    """The store serves event loops without a thread."""

    def in_loop(self) -> InLoop | None:
        """A connection for one event loop; None: the installed driver cannot do it."""
        ...
