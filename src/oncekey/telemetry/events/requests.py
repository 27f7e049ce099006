"""Events of a request: what was found at its key, how its attempt ended, and what became of its lease."""

from __future__ import annotations

from dataclasses import dataclass
from logging import DEBUG, INFO, WARNING

from oncekey.telemetry.events.base import Event, KeyEvent


@dataclass(frozen=True, slots=True)
class Reserved(KeyEvent):
    """The first request of a new key reserved it."""

    metric = "api.idempotency.reserve.created.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Replayed(KeyEvent):
    """A stored response was sent again."""

    metric = "api.idempotency.reserve.replay.count"
    level = DEBUG
    status: int


@dataclass(frozen=True, slots=True)
class FoundInFlight(KeyEvent):
    """A duplicate came while the first request was still running."""

    metric = "api.idempotency.reserve.in_progress.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Misused(KeyEvent):
    """A key came back with a different request: a bug of the client, or an attack."""

    metric = "api.idempotency.reserve.key_misuse.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class Retried(KeyEvent):
    """A new attempt took a retryable key."""

    metric = "api.idempotency.reserve.failed_retry.count"
    level = INFO


@dataclass(frozen=True, slots=True)
class TakenOver(KeyEvent):
    """A request took over a key whose lease ran out."""

    metric = "api.idempotency.lease.taken_over.count"
    level = INFO


@dataclass(frozen=True, slots=True)
class FoundUnknown(KeyEvent):
    """A retry was refused, because the outcome of its key is unknown."""

    metric = "api.idempotency.reserve.unknown.count"
    level = WARNING


@dataclass(frozen=True, slots=True)
class FoundUnreadable(KeyEvent):
    """What the row holds cannot be compared or read: a newer version wrote it, its fingerprint is under a key that is
    not in the keyring, or its response is encrypted and this process has no keyring. 503, nothing ran."""

    metric = "api.idempotency.reserve.not_comparable.count"
    level = WARNING
    reason: str


@dataclass(frozen=True, slots=True)
class TurnedAway(Event):
    """A request with a new key was refused before any write. ``reason``: ``limited``, ``timestamp-refused`` or
    ``key-malformed``. Or a question to the status endpoint was refused before the look-up: ``limited``, and
    ``operation`` is the endpoint's."""

    metric = "api.idempotency.reserve.turned_away.count"
    level = INFO
    labels = ("operation", "reason")
    scope: str
    operation: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallerRefused(Event):
    """The app's ``scope`` or ``authorize`` function, or a signature, refused a caller, before any look-up. ``reason``:
    ``not-authenticated``, ``not-authorized`` or ``signature-invalid``."""

    metric = "api.idempotency.caller.refused.count"
    level = INFO
    labels = ("operation", "reason")
    operation: str
    reason: str


@dataclass(frozen=True, slots=True)
class PersonalKeyFound(Event):
    """A key looks like personal data. ``kind``: ``email``, ``phone``, ``card`` or ``token``; ``answer``: ``taken``, or
    ``refused`` with ``Policy(pii="refuse")``, which refuses keys that are not known. It never has a part of the key."""

    metric = "api.idempotency.key.personal.count"
    level = INFO
    labels = ("operation", "kind", "answer")
    scope: str
    operation: str
    kind: str
    answer: str


@dataclass(frozen=True, slots=True)
class WaitedOut(KeyEvent):
    """A duplicate waited for the first request as long as its policy allows, and got a 409."""

    metric = "api.idempotency.wait.timed_out.count"
    level = INFO
    seconds: float


# How the attempt ended.


@dataclass(frozen=True, slots=True)
class Completed(KeyEvent):
    """The handler succeeded, and its response is stored."""

    metric = "api.idempotency.finish.completed.count"
    level = DEBUG
    status: int


@dataclass(frozen=True, slots=True)
class Failed(KeyEvent):
    """The handler failed for good, and its error is stored."""

    metric = "api.idempotency.finish.failed.count"
    level = INFO
    status: int


@dataclass(frozen=True, slots=True)
class Released(KeyEvent):
    """The attempt ended without an effect, or can be resumed: the key can be retried."""

    metric = "api.idempotency.finish.released.count"
    level = INFO
    reason: str


@dataclass(frozen=True, slots=True)
class Doubted(KeyEvent):
    """The attempt may have had an effect: the key became unknown."""

    metric = "api.idempotency.finish.doubted.count"
    level = WARNING
    reason: str


@dataclass(frozen=True, slots=True)
class Discarded(KeyEvent):
    """The request was refused before the operation began: the key is unused again."""

    metric = "api.idempotency.finish.discarded.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Deferred(KeyEvent):
    """The request is done, and its job in the outbox will settle the key."""

    metric = "api.idempotency.finish.deferred.count"
    level = DEBUG


@dataclass(frozen=True, slots=True)
class Tombstoned(KeyEvent):
    """The key was completed, but its response could not be kept."""

    metric = "api.idempotency.finish.tombstoned.count"
    level = INFO
    reason: str


@dataclass(frozen=True, slots=True)
class EffectLeftOpen(KeyEvent):
    """The handler answered with a success, but the result of an effect that may not be repeated is not known. The key
    is completed, and its audit has a line about this. An operator must look for the effect at its provider."""

    metric = "api.idempotency.finish.effect_left_open.count"
    level = WARNING


# Its lease.


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Event):
    """The keeper renewed ``rows`` leases in one batch."""

    metric = "api.idempotency.lease.renewed.count"
    level = DEBUG
    unit = "{lease}"
    rows: int

    @property
    def amount(self) -> int:
        return self.rows


@dataclass(frozen=True, slots=True)
class LeaseLost(KeyEvent):
    """An owner lost its lease, so its write (``move``) was refused."""

    metric = "api.idempotency.lease.lost.count"
    level = WARNING
    move: str


@dataclass(frozen=True, slots=True)
class LeaseTooShort(Event):
    """More than one in a hundred handlers of an operation runs for longer than its lease.

    Renewals keep their keys. But a handler that is paused, or cut off from its store, loses its key.
    """

    metric = "api.idempotency.lease.too_short.count"
    level = WARNING
    labels = ("operation",)
    operation: str
    lease_seconds: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class RanTooLong(KeyEvent):
    """A handler was still running when its ``max_run`` was over. Its lease is no longer renewed, and ``effects``
    decides what the key becomes. ``handler`` says whether it was cancelled: a thread cannot be."""

    metric = "api.idempotency.handler.max_run.count"
    level = WARNING
    max_seconds: float
    handler: str


@dataclass(frozen=True, slots=True)
class ZombieFound(KeyEvent):
    """A key in progress was found with a lease that ran out."""

    metric = "api.idempotency.zombie_key.count"
    level = WARNING
