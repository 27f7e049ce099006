"""Requests of this process with the same new key count once for limits.

A client that sends one key eight times at once has one new key. Each of the eight reads the row before any of them has
written it. So they share an :class:`Arrival`: the first one is counted, and the others reserve the key without being
counted, as the key gets one row at most. A sprayer of new keys gains nothing, since each of its keys is an arrival of
its own.
"""

from __future__ import annotations

import threading


class Arrival:
    """The requests for one key between their look at its row and the store's answer to their reservation."""

    __slots__ = ("asking", "counted", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.asking = False
        """One of the requests asks the limits for all of them."""
        self.counted = False
        """The limits let the key pass."""


class Arrivals:
    """The arrivals of one OnceKey: as many as keys that are being reserved."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Arrival] = {}
        self._lock = threading.Lock()

    def enter(self, at: tuple[str, str]) -> Arrival:
        """Before the row is read: a request that enters later sees the row in the store."""
        with self._lock:
            arrival = self._by_key.setdefault(at, Arrival())
            arrival.requests += 1
            return arrival

    def leave(self, at: tuple[str, str], arrival: Arrival) -> None:
        with self._lock:
            arrival.requests -= 1
            if arrival.requests == 0:
                del self._by_key[at]

    def may_ask(self, arrival: Arrival) -> bool:
        """Whether this request asks the limits, and then calls ``answered``. False: it is counted, or another request
        asks at this moment."""
        with self._lock:
            if arrival.counted or arrival.asking:
                return False
            arrival.asking = True
            return True

    def answered(self, arrival: Arrival, *, counted: bool) -> None:
        with self._lock:
            arrival.asking, arrival.counted = False, counted

    def used_again(self, arrival: Arrival) -> None:
        """A request that was not counted made the row: the counted one has discarded its own, or could not write. The
        next request is counted, so that a chain of requests with one key is not free."""
        with self._lock:
            arrival.counted = False
