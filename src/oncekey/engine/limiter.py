"""Counts for a OnceKey: the rate of new keys, the keys that a tenant has, and look-ups that find nothing.

Counts are asked only about keys that are not known (``admission.py``), so a replay costs and counts nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from oncekey.core.rates import Rate, Tally
from oncekey.engine.arrivals import Arrivals
from oncekey.engine.flows import Call, Flow
from oncekey.errors import OperatorError
from oncekey.limits import IN_STORE, Limits, Rates, RatesDown

_log = logging.getLogger("oncekey")

RECOUNT_SECONDS = 1.0
"""How long a count of a tenant's keys is used. In between, this process adds the keys that it lets pass itself."""
CAP_RETRY_SECONDS = 60.0
"""A tenant that has all its keys gets a new one when an old one expires, which takes long."""
SEARCHES = 8
"""How many questions find the age of the key that must leave a window: to 1/256 of the window."""
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

    __slots__ = ("added", "asking", "base", "count", "counted_at", "discarded", "fits_at", "pending")

    def __init__(self) -> None:
        self.count = 0
        self.counted_at: float | None = None
        self.added = 0
        """Keys that were let pass so far, and that the store was asked to reserve."""
        self.base = 0
        """``added`` when the count was asked for: the store may not have seen later ones."""
        self.asking = 0
        """Requests that ask the store for a count at this moment."""
        self.pending = 0
        """Keys that were let pass, and that the store has not answered for yet."""
        self.discarded = False
        """A key was deleted again since the count was asked for."""
        self.fits_at = 0.0
        """When a key fits into the window again, as far as this process knows."""

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

    def take(self, tenant: str) -> Flow[float | None]:
        """Take a place for one more key. None: call ``taken`` when the store has answered. Otherwise there is none, and
        this is how many seconds to wait."""
        with self._lock:
            known = self._of(tenant)
            known.asking += 1
        try:
            if (wait := (yield from self._taken(known, tenant))) is not None and known.discarded:
                wait = yield from self._taken(known, tenant, again=True)
            if wait is None or self._newer_than is None:
                return wait
            return (yield from self._until_one_fits(known, tenant, self._newer_than))
        finally:
            with self._lock:
                known.asking -= 1

    def _taken(self, known: _Count, tenant: str, *, again: bool = False) -> Flow[float | None]:
        with self._lock:
            now, base = self._clock(), known.added
            asks = again or known.counted_at is None or now - known.counted_at >= self._recount_seconds
            known.discarded &= not asks
        if asks:
            count: int = yield Tally(tenant, self.limit, self._newer_than)
            with self._lock:
                known.count, known.base, known.counted_at = count, base, now
        with self._lock:
            if known.keys >= self.limit:
                # A key on its way may be counted twice, and may be discarded: the next count tells.
                return self._recount_seconds if known.pending else CAP_RETRY_SECONDS
            known.pending += 1
            return None

    def _until_one_fits(self, known: _Count, tenant: str, window: float) -> Flow[float]:
        """The seconds until enough keys have left the window. Found by a search once, and then remembered until they
        have left: a tenant at its limit costs no more questions."""
        now = self._clock()
        if known.fits_at <= now:
            most = self.limit - known.pending
            young, old = 0.0, window if most > 0 else 0.0
            for _ in range(SEARCHES if most > 0 else 0):
                age = (young + old) / 2
                count: int = yield Tally(tenant, most, age)
                young, old = (young, age) if count >= most else (age, old)
            known.fits_at = now + window - young
        return known.fits_at - now

    def taken(self, tenant: str, *, made: bool = True) -> None:
        """The store has answered the reservation of a key, or will not. ``made``: there is one key more, or may be."""
        with self._lock:
            known = self._of(tenant)
            known.pending -= 1
            known.added += made

    def discarded(self, tenant: str) -> None:
        """A key that this process had made is deleted again. The store is asked anew before a key is refused."""
        with self._lock:
            self._of(tenant).discarded = True

    def _of(self, tenant: str) -> _Count:
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Count()
            while len(self._tenants) > MAX_TENANTS:
                oldest = next(iter(self._tenants))
                if self._tenants[oldest].asking or self._tenants[oldest].pending:
                    break
                del self._tenants[oldest]
        self._tenants.move_to_end(tenant)
        return known


class InFlight:
    """How many look-ups of each tenant this process makes at this moment.

    A look-up is counted for its limit only after it has found nothing. Until then it may yet be counted, so it takes a
    place: otherwise a tenant that guesses 1,000 keys at once would get 1,000 answers before the first one is counted.
    """

    def __init__(self) -> None:
        self._tenants: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def entered(self, tenant: str) -> Iterator[int]:
        """How many others were in flight. Leave after the look-up is counted: then each one is seen here or there."""
        with self._lock:
            others = self._tenants[tenant]
            self._tenants[tenant] = others + 1
        try:
            yield others
        finally:
            with self._lock:
                self._tenants[tenant] -= 1
                if self._tenants[tenant] == 0:
                    del self._tenants[tenant]


class Limiter:
    """The limits of one OnceKey."""

    def __init__(self, limits: Limits, max_active_keys: int | None) -> None:
        self.limits = limits
        self.lookups = None if limits.lookups is None else Rate.of(limits.lookups, "Limits(lookups")
        self.caps = None if max_active_keys is None else Counts(max_active_keys)
        self.arrivals = Arrivals()
        self.in_flight = InFlight()
        """Look-ups of the status endpoint, if they are limited."""
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
        answer: float | None = yield Call(lambda: self._count("keys", rate, tenant, self._opened.hit))
        return answer

    def lookup(self, tenant: str, others: int) -> Any:
        """Before a look-up: the seconds to wait, or None. ``others`` of the tenant are in flight. In an event loop this
        may return an awaitable."""
        return self._count("lookups", self._lookup_rate, tenant, partial(self._opened.full, others=others))

    def missed(self, tenant: str) -> Any:
        """After a look-up that found nothing: count it. In an event loop, this may return an awaitable."""
        return self._count("lookups", self._lookup_rate, tenant, self._opened.hit)

    @property
    def _lookup_rate(self) -> Rate:
        assert self.lookups is not None  # noqa: S101 - the caller has looked
        return self.lookups

    @property
    def _opened(self) -> Rates:
        assert self._rates is not None  # noqa: S101 - opened when the rate was declared
        return self._rates

    def _count(self, what: str, rate: Rate, tenant: str, verb: Any) -> Any:
        if self._opened.blocks and _in_event_loop():
            return asyncio.to_thread(self._asked, verb, rate, what, tenant)
        return self._asked(verb, rate, what, tenant)

    def _asked(self, verb: Any, rate: Rate, what: str, tenant: str) -> float | None:
        try:
            wait: float | None = verb(rate, what, tenant)
        except RatesDown as error:
            if self.rate_not_counted(error):
                return None
            raise
        return wait

    def rate_not_counted(self, error: Exception) -> bool:
        """Rates cannot be counted, wherever that is. Whether the key is taken nevertheless."""
        is_open = self.limits.rates_fail == "open"
        now = time.monotonic()
        if self._told_at is None or now - self._told_at >= TELL_EVERY_SECONDS:
            self._told_at = now
            _log.warning(
                RATES_DOWN, error, "nothing is limited meanwhile" if is_open else "new keys are refused meanwhile"
            )
        return is_open

    def cap_not_counted(self, error: OperatorError) -> bool:
        """The store could not count for the cap. Whether the key is taken nevertheless."""
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
