"""The numbers about keys that a store counts for a health check, and how far it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.values import value


@value
class UnknownsOf:
    """The unknown keys of one operation, among those that a health check counts."""

    operation: str
    keys: int
    unasked: int
    """How many of them have ``NO_RESOLVER`` from the last reconciler."""


NO_RESOLVER = "no resolver is registered for this operation"
"""The ``last_error`` of a key begins with this if the last reconciler had no resolver for its operation."""


@value
class HalfDoneOf:
    """The half-done keys of one operation that wait: no attempt for ``WAITING_SECONDS``, and no try of upkeep."""

    operation: str
    keys: int
    oldest_seconds: float
    """For how long the oldest of them has had no attempt, counted from the end of its last lease."""


WAITING_SECONDS = 600.0
"""How long a half-done key may wait. Most clients retry within seconds, and upkeep goes on after half a minute, if a
function is registered for it."""
OPERATIONS = 20
"""How many operations a health check names: those with the most unknown keys."""


@value
class StoreHealth:
    """The numbers about keys for a health check and ``oncekey doctor``."""

    counts: Mapping[State, int]
    """Rows in each state. States that share an index are counted together, up to ``COUNTED``."""
    dead: int
    """Keys after upkeep's last try: an operator must look (:attr:`Record.dead`). Each kind is counted up to
    ``COUNTED``."""
    oldest_unknown_seconds: float
    """The age of the oldest key, of those counted, whose outcome is unknown; 0 where there is none."""
    lease_over_seconds: float
    """For how long the oldest expired lease has waited for the sweeper; 0 where there is none."""
    unknowns: tuple[UnknownsOf, ...] = ()
    """Unknown keys by operation: at most ``OPERATIONS``, those with the most keys first."""
    half_done: tuple[HalfDoneOf, ...] = ()
    """Half-done requests by operation, in the same order and number as ``unknowns``."""


COUNTED = 10_000
"""How far a store counts for a health check: enough to say "too many", without reading all keys."""


def health_of(rows: Iterable[Record], now: float) -> StoreHealth:
    """The numbers, for a store that looks at each row. The SQL stores count with their indexes."""
    rows = list(rows)
    counted = Counter(row.state for row in rows)
    unknown = [row for row in rows if row.state is State.UNKNOWN]
    leases = [row.lease_until for row in rows if row.state is State.IN_PROGRESS]
    keys = Counter(row.operation for row in unknown)
    unasked = Counter(row.operation for row in unknown if (row.last_error or "").startswith(NO_RESOLVER))
    waiting = [row for row in rows if row.state is State.FAILED_RETRYABLE and row.has_steps and not row.reconcile_tries]
    idle: dict[str, list[float]] = {}
    for row in waiting:
        if row.lease_until + WAITING_SECONDS <= now:
            idle.setdefault(row.operation, []).append(now - row.lease_until)
    longest = sorted(idle, key=lambda operation: (-len(idle[operation]), operation))[:OPERATIONS]
    most = sorted(keys, key=lambda operation: (-keys[operation], operation))[:OPERATIONS]
    return StoreHealth(
        counts={state: min(counted[state], COUNTED) for state in State},
        dead=min(sum(row.dead for row in rows), COUNTED),
        oldest_unknown_seconds=max((now - row.created_at for row in unknown), default=0.0),
        lease_over_seconds=max(0.0, now - min(leases, default=now)),
        unknowns=tuple(UnknownsOf(operation, keys[operation], unasked[operation]) for operation in most),
        half_done=tuple(HalfDoneOf(each, len(idle[each]), max(idle[each])) for each in longest),
    )
