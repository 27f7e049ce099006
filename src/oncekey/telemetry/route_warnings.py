"""Which warnings about an operation are still to be logged, and by which name they call the operation.

Clients choose paths, and paths have personal data. So a warning names the route, where the app's routes can be read,
and a process names at most ``NAMED`` operations. All others share one: ``another operation``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from oncekey.core.record import ENDPOINT_MARK
from oncekey.core.values import value
from oncekey.telemetry.bounds import OTHER, FirstSeen

NAMED = 100
"""How many operations the warnings of one process name."""
PAUSE_SECONDS = 60.0
"""How long a warning that may repeat is silent after each line."""
UNNAMED = "another operation"
MORE_FOLLOW = (
    f". More may follow and are not logged: warnings name the first {NAMED} operations of a process, and no path that "
    "matches no route"
)
"""The end of a warning about ``another operation``."""


@value
class Due:
    """A warning that is to be logged now."""

    operation: str
    """The name to print."""
    times: int = 1
    """How often it happened since the last line."""

    @property
    def requests(self) -> str:
        return "a request" if self.times == 1 else f"{self.times:,} requests since the last such line"

    @property
    def end(self) -> str:
        return MORE_FOLLOW if self.operation == UNNAMED else ""


class Warnings:
    """``know`` the routes; then ask :meth:`once` or :meth:`paced` before a line is logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._operations = FirstSeen(NAMED)
        self._unread: list[Callable[[], Sequence[str]]] = []
        self._said: set[tuple[str, ...]] = set()
        self._paced: dict[tuple[str, ...], tuple[float, int]] = {}

    def know(self, operations: Callable[[], Sequence[str]]) -> None:
        """All routes of an app. They are read at the first line that names an operation."""
        self._unread.append(operations)

    def once(self, operation: str, *what: str) -> Due | None:
        """None: this was said about the operation's route before."""
        with self._lock:
            named = self._name(operation)
            if (named, *what) in self._said:
                return None
            self._said.add((named, *what))
            return Due(named)

    def paced(self, operation: str, *what: str) -> Due | None:
        """None: this was said about the operation's route less than ``PAUSE_SECONDS`` ago. It is counted."""
        with self._lock:
            named = self._name(operation)
            now = self._clock()
            silent_until, times = self._paced.get((named, *what), (now, 0))
            if now < silent_until:
                self._paced[named, *what] = (silent_until, times + 1)
                return None
            self._paced[named, *what] = (now + PAUSE_SECONDS, 0)
            return Due(named, times + 1)

    def route_of(self, operation: str) -> str:
        """The route of the operation, for a line of an event; the operation itself if its route cannot be read."""
        with self._lock:
            self._read_routes()
            return self._operations.route_of(operation) or operation

    def pasteable(self, scope: str) -> tuple[str, str | None]:
        """Tenant and endpoint of a scope, as the commands take them. No endpoint if it has parameters of a path: the
        commands find a masked key by its tenant alone."""
        tenant, mark, endpoint = scope.partition(ENDPOINT_MARK)
        return tenant, endpoint if mark and self.route_of(endpoint) == endpoint else None

    def _name(self, operation: str) -> str:
        self._read_routes()
        label = self._operations.label(operation)
        return UNNAMED if label == OTHER else label

    def _read_routes(self) -> None:
        while self._unread:
            read = self._unread.pop()
            with suppress(Exception):  # a request is being answered: an app that cannot be read keeps its paths
                self._operations.know(read())
