"""Counts for a OnceKey: the rate of new keys, the keys that a tenant has, and look-ups that find nothing.

Counts are asked only about keys that are not known (``admission.py``), so a replay costs and counts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from oncekey.core.rates import Rate, Tally
from oncekey.engine.flows import Call, Flow
from oncekey.errors import OperatorError
from oncekey.limits import IN_STORE, Limits, Rates, RatesDown

_log = logging.getLogger("oncekey")

RECOUNT_SECONDS = 1.0
"""How long a count of a tenant's keys is used. In between, this process adds the keys that it lets pass itself."""
MAX_TENANTS = 10_000
"""How many tenants' counts are remembered."""
TELL_EVERY_SECONDS = 60.0

RATES_DOWN = (
    "the storage of limits does not answer (%s): %s. This is said once a minute. See Limits(rates_fail=…) in "
    "docs/limits.md"
)
NOT_COUNTED = (
    "the store cannot count the keys of a tenant (%s), so its new keys are not limited meanwhile, as "
    "Limits(caps_fail='open') says"
)


class _Count:
    """What this process knows of one tenant: ``count`` keys when it asked, and those that it let pass since."""

    __slots__ = ("added", "base", "count", "counted_at", "pending")

    def __init__(self) -> None:
        self.count = 0
        self.counted_at: float | None = None
        self.added = 0
        """Keys that were let pass so far, and that the store was asked to reserve."""
        self.base = 0
        """``added`` when the count was asked for: the store may not have seen later ones."""
        self.pending = 0
        """Keys that were let pass, and that the store has not answered for yet."""

    @property
    def keys(self) -> int:
        """At least as many as there are, as far as this process made them."""
        return self.count + self.added - self.base + self.pending


class Counts:
    """How many keys each tenant has, by asking the store now and then; never fewer than this process has made."""

    def __init__(
        self,
        limit: int,
        newer_than: float | None = None,
        recount_seconds: float = RECOUNT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self._newer_than = newer_than
        self._recount_seconds = recount_seconds
        self._clock = clock
        self._tenants: OrderedDict[str, _Count] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, tenant: str) -> Flow[bool]:
        """Take a place for one more key. False: there is none. True: call ``taken`` when the store has answered."""
        with self._lock:
            known = self._of(tenant)
            now = self._clock()
            asks = known.counted_at is None or now - known.counted_at >= self._recount_seconds
            base = known.added
        if asks:
            count: int = yield Tally(tenant, self.limit, self._newer_than)
            with self._lock:
                known.count, known.base, known.counted_at = count, base, now
        with self._lock:
            if known.keys >= self.limit:
                return False
            known.pending += 1
            return True

    def taken(self, tenant: str) -> None:
        """The store has answered the reservation of a key, or will not."""
        with self._lock:
            known = self._of(tenant)
            known.pending -= 1
            known.added += 1

    def _of(self, tenant: str) -> _Count:
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Count()
            if len(self._tenants) > MAX_TENANTS:
                oldest = next(iter(self._tenants))
                if self._tenants[oldest].pending == 0:
                    del self._tenants[oldest]
        self._tenants.move_to_end(tenant)
        return known


class Limiter:
    """The limits of one OnceKey."""

    def __init__(self, limits: Limits, max_active_keys: int | None) -> None:
        self.limits = limits
        self.lookups = None if limits.lookups is None else Rate.of(limits.lookups, "Limits(lookups")
        self.caps = None if max_active_keys is None else Counts(max_active_keys)
        self._rates: Rates | None = None
        self._in_store: dict[Rate, Counts] = {}
        self._told_at: float | None = None
        if self.lookups is not None:
            self.open()

    def open(self) -> None:
        """A rate is declared: find the library and the storage now, and not at the first request."""
        if self._rates is None and self.limits.storage != IN_STORE:
            self._rates = Rates(self.limits.storage)

    def close(self) -> None:
        if self._rates is not None:
            self._rates.close()

    @property
    def counts_in_store(self) -> bool:
        return self.limits.storage == IN_STORE

    def store_counts(self, rate: Rate) -> Counts | None:
        """The counts of a rate, if they are taken in the store."""
        if not self.counts_in_store:
            return None
        return self._in_store.setdefault(rate, Counts(rate.amount, rate.seconds, 0.0))

    def hit(self, rate: Rate, tenant: str) -> Flow[float | None]:
        """Count a new key. None: it is within the rate. Otherwise the seconds to wait. RatesDown: fail closed."""
        answer: float | None = yield Call(lambda: self._count("keys", rate, tenant))
        return answer

    def lookup(self, tenant: str, *, missed: bool) -> Any:
        """Before a look-up: the seconds to wait, or None. After one that ``missed``: count it. In an event loop, this
        may return an awaitable."""
        assert self.lookups is not None  # noqa: S101 - the caller has looked
        return self._count("lookups", self.lookups, tenant, counts=missed)

    def _count(self, what: str, rate: Rate, tenant: str, *, counts: bool = True) -> Any:
        rates = self._rates
        assert rates is not None  # noqa: S101 - opened when the rate was declared
        verb = rates.hit if counts else rates.full
        if rates.blocks and _in_event_loop():
            return asyncio.to_thread(self._asked, verb, rate, what, tenant)
        return self._asked(verb, rate, what, tenant)

    def _asked(self, verb: Any, rate: Rate, what: str, tenant: str) -> float | None:
        try:
            wait: float | None = verb(rate, what, tenant)
        except RatesDown as error:
            is_open = self.limits.rates_fail == "open"
            self._tell(error, "nothing is limited meanwhile" if is_open else "new keys are refused meanwhile")
            if is_open:
                return None
            raise
        return wait

    def _tell(self, error: RatesDown, meaning: str) -> None:
        now = time.monotonic()
        if self._told_at is None or now - self._told_at >= TELL_EVERY_SECONDS:
            self._told_at = now
            _log.warning(RATES_DOWN, error, meaning)

    def not_counted(self, error: OperatorError) -> bool:
        """The store could not count. Whether the key is taken nevertheless."""
        if self.limits.caps_fail == "closed":
            return False
        _log.warning(NOT_COUNTED, error)
        return True


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
