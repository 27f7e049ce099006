"""The seam: what a store must do, and nothing of how.

A store is plain blocking code that takes **batches**; ``engine/lanes.py`` turns concurrent callers into them. It knows
keys, not payments, and no policy: it compares and sets. Three rules bind every implementation, and
``oncekey.testing.store_suite`` checks them:

* every verb ends within the store's own time limit, or raises ``StoreUnavailable``;
* a batch names each (scope, key) once (the lane sees to it), is applied in the order of (scope, key), and its answers
  stand in the order of the batch;
* time is the store's clock, where it has one.

Calling a verb again after it raised is safe: the owner token tells one's own earlier success from a rival's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from oncekey.core.record import Found, Record, Reservation, Swap


class Duty(StrEnum):
    """What upkeep looks for; one partial index each."""

    LEASES = "leases"  # in_progress, lease over
    EXPIRED = "expired"  # completed or failed (or retryable without steps), past expiry
    ABANDONED = "abandoned"  # pending, past expiry
    UNKNOWNS = "unknowns"  # unknown, its time to reconcile has come


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What differs between stores, so that callers and the public suite never ask which store it is."""

    durable: bool
    """A commit survives kill -9 of every process and a loss of power."""
    shared: bool
    """Several processes see the same keys."""
    server_clock: bool
    """Leases are measured on a clock that all processes share, not on the host's."""
    writers: int
    """How many lanes may write at once; 1 means that reserve and swap share one."""


class Store(Protocol):
    """See the module's docstring for the rules."""

    @property
    def capabilities(self) -> Capabilities: ...

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        """Read each row, or insert it where there is none. Never waits for somebody's open transaction."""
        ...

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        """Move each row that still is as its swap says. None: it is not, or somebody holds it right now.

        The record that a deleting swap returns is the row as it was.
        """
        ...

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        """The rows of these (scope, key) pairs, as committed."""
        ...

    def due(self, duty: Duty, limit: int) -> list[Record]:
        """At most ``limit`` rows that a duty is about, oldest first."""
        ...

    def purge(self, limit: int) -> int:
        """Delete at most ``limit`` rows of Duty.EXPIRED, and say how many. Never anything in flight."""
        ...

    def migrate(self) -> list[str]:
        """Bring the tables to this version; the names of the migrations that ran. Safe to run twice and at once."""
        ...

    def check(self) -> None:
        """SchemaError, with one sentence that says what to run, unless the tables are as this version wants them."""
        ...

    def disconnect(self) -> None:
        """Close the calling thread's connection; the next verb opens another."""
        ...

    def close(self) -> None:
        """Close whatever this process holds open."""
        ...
