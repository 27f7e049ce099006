"""Limits of a OnceKey: where rates are counted, and what happens if they cannot be counted (docs/limits.md).

``Policy(limit="100/minute")`` bounds the new keys of a tenant, ``OnceKey(max_active_keys=…)`` the keys that it has, and
``Limits(lookups="60/minute")`` the questions for keys that it does not have. :class:`Rates` counts with the library
``limits``, which is imported when the first limit is declared.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from oncekey.core.rates import Rate
from oncekey.errors import ConfigurationError

Fails = Literal["open", "closed"]

IN_STORE = "store"
ELSEWHERE = "count rates elsewhere, with storage='memory://' or a redis:// address"
"""The advice for a store that cannot count."""
STORAGE_TIMEOUT_SECONDS = 1.0
"""How long a request waits for a Redis with counters. Rates are not worth more than that."""
OTHERS_SECONDS = 1.0
"""``Retry-After`` if only other questions in flight take the places. They end within the time that a store takes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How a OnceKey counts: ``OnceKey(limits=Limits(storage="redis://…"))``."""

    storage: str = "memory://"
    """Where rates are counted. ``memory://``: in each process by itself, so four workers let four times as many pass.
    ``redis://…`` (or another storage of the library ``limits``): for all processes. ``store``: by the keys in the store
    of the OnceKey, for all processes and without another server; a count reads the tenant's keys."""

    lookups: str | None = None
    """How many questions for keys that do not exist a tenant may ask the status endpoint: ``60/minute``. All callers of
    a tenant count together."""

    rates_fail: Fails = "open"
    """What happens if the storage of rates does not answer. ``open``: new keys are not limited meanwhile, since a limit
    that is down must not stop payments. ``closed``: 503."""

    caps_fail: Fails = "closed"
    """What happens if the store cannot count the keys of a tenant. ``closed``: 503, since a store that cannot count is
    about to fail anyway, and a cap protects it. ``open``: the key is taken."""

    def __post_init__(self) -> None:
        for name in ("rates_fail", "caps_fail"):
            if getattr(self, name) not in ("open", "closed"):
                raise ConfigurationError(f"Limits({name}={getattr(self, name)!r}): it takes 'open' or 'closed'")
        if self.lookups is not None:
            Rate.of(self.lookups, "Limits(lookups")
        text: Any = self.storage
        if not isinstance(text, str) or (text != IN_STORE and "://" not in text):
            raise ConfigurationError(
                f"Limits(storage={text!r}): it takes 'memory://', a redis:// address, or 'store', the keys' own store"
            )
        if text == IN_STORE and self.lookups is not None:
            raise ConfigurationError(
                "Limits(storage='store', lookups=…): questions for keys that do not exist leave nothing to count in "
                "the store; take storage='memory://' or a redis:// address"
            )


class RatesDown(Exception):
    """The storage of rates did not answer."""


class Rates:
    """Counts by a moving window: at no time more than ``amount`` in the last ``seconds``.

    A count in memory is under a lock of this class. The library's own lock is not enough: its timer deletes the lock of
    a key without entries while a thread waits for it, and the next thread gets another one.
    """

    def __init__(self, storage: str) -> None:
        library = _library()
        options = (
            {}
            if storage.startswith("memory:")
            else {
                "socket_timeout": STORAGE_TIMEOUT_SECONDS,
                "socket_connect_timeout": STORAGE_TIMEOUT_SECONDS,
            }
        )
        self.blocks = not storage.startswith("memory:")
        """A count may wait for a server: not in an event loop."""
        self._lock: Any = nullcontext() if self.blocks else threading.Lock()
        try:
            opened = library.storage.storage_from_string(storage, **options)
            self._window = library.strategies.MovingWindowRateLimiter(opened)
            self._client = getattr(opened, "storage", None)
        except Exception as error:  # noqa: BLE001 - the library and its drivers raise their own
            # Not the library's own words: they may have the address, and its password.
            unknown = type(error).__name__ == "ConfigurationError"  # as the library calls it
            why = "the library 'limits' does not know such an address" if unknown else type(error).__name__
            raise ConfigurationError(
                f"Limits(storage={_without_password(storage)!r}): {why}. It takes 'memory://', or an address of the "
                "library 'limits', such as redis://host:6379, whose driver is installed"
            ) from None
        self._item = library.RateLimitItemPerSecond

    def close(self) -> None:
        """Close the connections of a storage on a server. The next count opens others."""
        if self.blocks and (close := getattr(self._client, "close", None)) is not None:
            close()

    def hit(self, rate: Rate, what: str, tenant: str) -> float | None:
        """Count one. None: it was within the rate; otherwise it is not counted, and the seconds until one is again."""

        def ask(*at: Any) -> float | None:
            return None if self._window.hit(*at) else _seconds_until(self._window.get_window_stats(*at).reset_time)

        return self._ask(rate, what, tenant, ask)

    def full(self, rate: Rate, what: str, tenant: str, others: int) -> float | None:
        """As ``hit``, without counting. ``others`` are in flight and may yet be counted, so they take places too."""

        def ask(*at: Any) -> float | None:
            window = self._window.get_window_stats(*at)
            if window.remaining > others:
                return None
            return OTHERS_SECONDS if window.remaining > 0 else _seconds_until(window.reset_time)

        return self._ask(rate, what, tenant, ask)

    def _ask(self, rate: Rate, what: str, tenant: str, ask: Callable[..., float | None]) -> float | None:
        item = self._item(rate.amount, rate.seconds, namespace="oncekey")
        # A hash, so that the storage does not show tenants, and no tenant can be written as another.
        name = sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        try:
            with self._lock:
                return ask(item, what, name)
        except Exception as error:
            raise RatesDown(str(error)) from error


def _seconds_until(moment: float) -> float:
    return max(0.0, float(moment) - time.time())


def _library() -> Any:
    try:
        library = importlib.import_module("limits")
        importlib.import_module("limits.storage")
        importlib.import_module("limits.strategies")
    except ImportError as error:
        raise ConfigurationError("limits need the library 'limits': pip install 'oncekey[limits]'") from error
    return library


def _without_password(address: str) -> str:
    head, at, tail = address.rpartition("@")
    return f"{head.partition('://')[0]}://…@{tail}" if at else address
