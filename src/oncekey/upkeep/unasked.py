"""Logs which unknown keys have no resolver. Such keys end as dead letters, and their clients get 409.

It logs each operation once, then once an hour, and again if its keys have become many more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oncekey.core.health import UnknownsOf
from oncekey.core.states import State
from oncekey.core.values import value
from oncekey.core.verdicts import Resolvers
from oncekey.stores.api import Duty, Store

_log = logging.getLogger("oncekey")

AGAIN_SECONDS = 3_600.0
GROWN = 5
"""Within the hour, an operation is logged again if it has this many times as many keys."""
LATE_SECONDS = 60.0
"""How long a key may be due before an upkeep without the app logs that no other upkeep asks about it."""


def no_resolver(operation: str, number: int) -> str:
    """The sentence for ``oncekey upkeep`` and ``oncekey doctor``; the log has the same."""
    return f"{counted_keys(number)} unknown and no resolver is registered for {shown_operation(operation)}"


def counted_keys(number: int) -> str:
    return "1 key is" if number == 1 else f"{number:,} keys are"


def shown_operation(operation: str) -> str:
    return operation if operation.isprintable() else repr(operation)  # a client's path must not forge log lines


def advice(operation: str) -> str:
    return (
        f"register one with @once.resolver({operation!r}) (docs/reconciliation.md), or settle each key with "
        "`oncekey keys resolve`; after its last try a key is a dead letter, and its client still gets 409"
    )


class News:
    """Remembers which operations the log has named, with how many keys, and when. ``route_of`` gives the route of an
    operation, so that the log has no paths of clients."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, route_of: Callable[[str], str] = str) -> None:
        self._clock = clock
        self._route_of = route_of
        self._logged: dict[str, tuple[int, float]] = {}

    def among(self, operations: Mapping[str, int]) -> dict[str, int]:
        """The routes that the log should name now, with the keys of each. A route without such keys is forgotten."""
        found: Counter[str] = Counter()
        for operation, number in operations.items():
            found[self._route_of(operation)] += number
        self._logged = {operation: last for operation, last in self._logged.items() if operation in found}
        return {operation: number for operation, number in found.items() if self._is_news(operation, number)}

    def _is_news(self, what: str, number: int) -> bool:
        now = self._clock()
        before, at = self._logged.get(what, (0, 0.0))
        if before and number < GROWN * before and now - at < AGAIN_SECONDS:
            return False
        self._logged[what] = (number, now)
        return True


class ResolverWatch:
    """Logs the operations whose unknown keys have no resolver."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, route_of: Callable[[str], str] = str) -> None:
        self._news = News(clock, route_of)

    def look(self, unknowns: Sequence[UnknownsOf], resolvers: Resolvers | None) -> int:
        """How many keys have no resolver. ``resolvers``: the app's; None: use what the app's own upkeep wrote."""
        found: dict[str, int] = {}
        for each in unknowns:
            number = each.unasked if resolvers is None else 0 if resolvers.of(each.operation) else each.keys
            if number:
                found[each.operation] = number
        for operation, number in self._news.among(found).items():
            shown = (counted_keys(number), shown_operation(operation), advice(operation))
            _log.warning("%s unknown and no resolver is registered for %s: %s", *shown)
        return sum(found.values())


@value
class Reported:
    """What an upkeep without the app found among the unknown keys that a health check counts."""

    unknown: int = 0
    without_resolver: int = 0

    def as_json(self) -> dict[str, Any]:
        return {"unknown": self.unknown, "without_resolver": self.without_resolver}


class Reporter:
    """Takes the place of the reconciler in an upkeep that has a store and no app.

    It asks no resolver and counts no try. It does not know the app's resolvers, and a key whose resolver runs in
    another process must not become a dead letter here.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._watch = ResolverWatch(clock)
        self._clock = clock
        self._logged_at: float | None = None

    def run(self, stop: threading.Event | None = None, *, dry_run: bool = False) -> Reported:
        del stop, dry_run  # it changes nothing
        oldest = self._store.due(Duty.UNKNOWNS, 1)
        seen = self._store.counts()
        unknown, without = seen.counts[State.UNKNOWN], self._watch.look(seen.unknowns, None)
        late = max((row.now - row.reconcile_at for row in oldest if row.reconcile_at is not None), default=0.0)
        if late > LATE_SECONDS and (self._logged_at is None or self._clock() - self._logged_at >= AGAIN_SECONDS):
            self._logged_at = self._clock()
            _log.warning(
                "%d keys are unknown, the oldest has been due for %.0f s, and no upkeep with the app's resolvers asks "
                "about them. This one runs without the app: run `oncekey upkeep MODULE:ONCE`, or upkeep inside the app",
                unknown,
                late,
            )
        return Reported(unknown, without)
