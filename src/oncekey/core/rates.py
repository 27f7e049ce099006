"""Rates, ``"100/minute"``, and the question how many keys a tenant has. Pure."""

from __future__ import annotations

import re

from oncekey.core.values import value
from oncekey.errors import ConfigurationError

_RATE = re.compile(r"\s*([0-9]{1,9})\s*(?:/|\s+per\s+)\s*(second|minute|hour|day)s?\s*").fullmatch
_SECONDS = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}


@value
class Rate:
    """So many in so many seconds."""

    amount: int
    seconds: int

    @classmethod
    def of(cls, text: object, option: str) -> Rate:
        """Read ``"100/minute"``. ``option``: where it was written, for the message."""
        found = _RATE(text) if isinstance(text, str) else None
        if found is None or int(found[1]) < 1:
            raise ConfigurationError(
                f"{option}={text!r}): it takes a number per second, minute, hour or day, such as '100/minute'"
            )
        return cls(int(found[1]), _SECONDS[found[2]])


@value
class Tally:
    """Ask a store how many keys a tenant has. It counts no further than ``limit``."""

    tenant: str
    limit: int
    newer_than: float | None = None
    """Count only keys that are not older than so many seconds."""

    @property
    def scope(self) -> str:
        """With ``key``, its place in a batch."""
        return self.tenant

    @property
    def key(self) -> str:
        return f"{self.limit} {self.newer_than}"

    @property
    def end(self) -> str:
        """All scopes of the tenant lie between its name and this: ``ann``, and ``ann`` with an endpoint after 0x1f. No
        scope has another character below the space."""
        return f"{self.tenant} "
