"""The values that engine and stores exchange: the row of a key, and the request to read or insert it.

Owns no rule: ``states.py`` says which moves exist, ``decision.py`` which one to make, ``swaps.py`` builds it.
Times are seconds since the epoch **on the store's clock**. ``Record.now`` is that clock when the row was read, so
that no code compares a row with the clock of the app's host.
"""

from __future__ import annotations

from dataclasses import field

from oncekey.core.fingerprint import UnderKey
from oncekey.core.recipe import Parts
from oncekey.core.states import Effects, State
from oncekey.core.values import value

DEFAULT_QUARANTINE_SECONDS = 300.0
"""What ``quarantine_seconds`` None means in a row. Rows outlive versions: another default must be written out."""
RESPONSE_SCHEMA_VERSION = 1
"""The layout of ``StoredResponse`` in a row. A row with another version is replayed as a tombstone."""
ENDPOINT_MARK = "\x1f"
"""Between tenant and operation in the scope of a key per endpoint. No tenant may contain it."""


def tenant_of(scope: str) -> str:
    """The tenant of the keys in this scope."""
    return scope.partition(ENDPOINT_MARK)[0]


@value
class StoredResponse:
    """A response as it is stored. ``body`` None is a **tombstone** (completed, but the body was not kept)."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes | None
    schema_version: int = RESPONSE_SCHEMA_VERSION

    @property
    def replayable(self) -> bool:
        return self.body is not None and self.schema_version == RESPONSE_SCHEMA_VERSION


@value
class Reservation:
    """Read the row of (scope, key), or insert this where there is none."""

    scope: str
    key: str
    operation: str
    fingerprint: bytes
    fingerprint_version: int
    effects: Effects
    owner: str
    lease_seconds: float
    retention_seconds: float
    fingerprint_recipe: str | None = None
    """Which parts the fingerprint was made of (``core/recipe.py``); None: the default of its version."""
    quarantine_seconds: float | None = None
    """The route's quarantine; None: ``DEFAULT_QUARANTINE_SECONDS``."""
    # neither stored nor compared
    parts: Parts | None = field(default=None, compare=False, repr=False)
    """The request, to compute its fingerprint again if the row has another recipe."""
    bindings: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The hashes of what binds this request, one for each secret (``core/binding.py``); (): nothing does."""
    under_key: UnderKey | None = field(default=None, compare=False, repr=False)
    """Makes a fingerprint under a key of the keyring; None: the app has no keyring."""

    def fingerprint_under(self, key_id: int, digest: bytes) -> bytes | None:
        """The fingerprint of this row, under the key of this id; None: there is no such key, or no keyring."""
        return None if self.under_key is None else self.under_key(key_id, self.scope, self.key, digest)

    def record(self, now: float) -> Record:
        """The row after this is inserted at ``now``, or after a key starts over with it."""
        return Record(
            self.scope,
            self.key,
            self.operation,
            self.fingerprint,
            self.fingerprint_version,
            self.effects,
            State.IN_PROGRESS,
            1,
            self.owner,
            now + self.lease_seconds,
            None,
            None,
            None,
            None,
            0,
            now,
            None,
            self.retention_seconds,
            now + self.retention_seconds,
            now,
            self.fingerprint_recipe,
            self.quarantine_seconds,
        )


@value
class Record:
    """One row of ``idempotency_keys``."""

    scope: str
    key: str
    operation: str
    fingerprint: bytes
    fingerprint_version: int
    effects: Effects
    state: State
    attempt: int
    owner: str
    lease_until: float
    recovery_point: str | None
    response: StoredResponse | None
    last_error: str | None
    reconcile_at: float | None
    reconcile_tries: int
    created_at: float
    finished_at: float | None
    retention_seconds: float
    expires_at: float
    now: float
    fingerprint_recipe: str | None = None
    quarantine_seconds: float | None = None

    @property
    def quarantine(self) -> float:
        """For how many seconds after the end of the lease nothing can be said not to have happened."""
        return DEFAULT_QUARANTINE_SECONDS if self.quarantine_seconds is None else self.quarantine_seconds

    @property
    def lease_over(self) -> bool:
        return self.lease_until <= self.now

    @property
    def past_expiry(self) -> bool:
        return self.expires_at <= self.now

    @property
    def has_steps(self) -> bool:
        return self.recovery_point is not None

    def meets(self, state: State | None, scope: str | None, operation: str | None, created_until: float | None) -> bool:
        """Whether it meets every filter of a listing that is not None."""
        return (
            (state is None or self.state is state)
            and (scope is None or self.scope == scope)
            and (operation is None or self.operation == operation)
            and (created_until is None or self.created_at <= created_until)
        )

    @property
    def dead(self) -> bool:
        """A dead letter: upkeep has made its last try, and leaves the key to an operator."""
        if self.reconcile_at is not None:
            return False
        half_done = self.state is State.FAILED_RETRYABLE and self.has_steps
        return self.state is State.UNKNOWN or (half_done and self.reconcile_tries > 0)

    @property
    def may_have_effect_in_doubt(self) -> bool:
        """It has steps, and is not ``phased``: its steps tell which effect is in doubt (``core/doubts.py``)."""
        return self.recovery_point is not None and self.effects is Effects.EXTERNAL


@value
class Found:
    """The answer of ``reserve``. ``busy``: the store neither saw a row nor could insert one, so no request may run."""

    record: Record | None

    @property
    def busy(self) -> bool:
        return self.record is None
