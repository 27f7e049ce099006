"""Is everything as it must be? The store's own setup first, then what its rows say about who works on them."""

from __future__ import annotations

from collections.abc import Callable

from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.core.record import COUNTED, StoreHealth
from oncekey.core.states import State
from oncekey.errors import SchemaError, StoreError
from oncekey.stores.base import Duty, Store

OVERDUE_SECONDS = 600.0
"""What upkeep has not done by then, it does not do: its rounds are a minute apart."""
UNKNOWN_SECONDS = 3600.0
"""A client is waiting for each of them."""
LAG_SECONDS = 300.0

_DUTIES = {
    Duty.EXPIRED: "expired keys",
    Duty.LAPSED: "half-done keys past their expiry",
    Duty.ABANDONED: "deferred keys past their expiry",
}
_RUN_UPKEEP = "run `oncekey upkeep` (or Upkeep inside the app), and look at its log"


def examine(store: Store) -> list[Diagnosis]:
    """A line for each thing that can be wrong. What cannot be asked is a line too, never an exception."""
    found = _ask(store.diagnose)
    if any(line.check in ("store", "schema") and line.level is Level.FAIL for line in found):
        return found  # there is nothing more to ask
    found += _ask(lambda: _of_the_keys(store, store.counts()))
    found += _ask(lambda: _of_the_outbox(store))
    return found


def _ask(asked: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
    try:
        return asked()
    except (StoreError, SchemaError) as error:
        return [Diagnosis("store", Level.FAIL, str(error), "see docs/stores.md for what each store needs")]


def _of_the_keys(store: Store, health: StoreHealth) -> list[Diagnosis]:
    return [_upkeep(store, health), _unknown(health), _dead_keys(health)]


def _upkeep(store: Store, health: StoreHealth) -> Diagnosis:
    """Whether it runs shows in what it has left undone: it may run on another host, and leaves no other trace."""
    waits = [(health.lease_over_seconds, "expired leases")]
    for duty, what in _DUTIES.items():
        waits += [(record.now - record.expires_at, what) for record in store.due(duty, 1)]
    waited, what = max(waits)
    if waited <= OVERDUE_SECONDS:
        return Diagnosis("upkeep", Level.OK, "nothing is overdue: it runs, or there is nothing to do")
    return Diagnosis(
        "upkeep", Level.WARN, f"{what} have waited for {span(waited)}: it does not run, or cannot", _RUN_UPKEEP
    )


def _unknown(health: StoreHealth) -> Diagnosis:
    number = health.counts[State.UNKNOWN]
    if number == 0:
        return Diagnosis("unknown", Level.OK, "no key has an unknown outcome")
    found = f"{counted(number, 'key')} with an unknown outcome, the oldest for {span(health.oldest_unknown_seconds)}"
    if health.oldest_unknown_seconds <= UNKNOWN_SECONDS:
        return Diagnosis("unknown", Level.OK, found)
    return Diagnosis(
        "unknown",
        Level.WARN,
        f"{found}; their clients get 409 until somebody settles them",
        "run `oncekey upkeep module:once` with a resolver for the operation, or `oncekey keys list --state unknown` "
        "and `oncekey keys resolve`",
    )


def _dead_keys(health: StoreHealth) -> Diagnosis:
    if health.dead == 0:
        return Diagnosis("dead keys", Level.OK, "none")
    return Diagnosis(
        "dead keys",
        Level.WARN,
        f"{counted(health.dead, 'unknown outcome')} that nobody asks about any more",
        "see `oncekey dead-letters list`, then `oncekey keys resolve` or `oncekey dead-letters retry`",
    )


def _of_the_outbox(store: Store) -> list[Diagnosis]:
    if store.capabilities.enlists is None:
        return []
    health = store.outbox_health()
    found = [Diagnosis("outbox", Level.OK, f"{counted(health.ready, 'job')} due, lag {span(health.lag_seconds)}")]
    if health.lag_seconds > LAG_SECONDS:
        found = [
            Diagnosis(
                "outbox",
                Level.WARN,
                f"{counted(health.ready, 'job')} due, the oldest for {span(health.lag_seconds)}: no worker runs its "
                "task, or too few do",
                "run `oncekey worker module:worker`, with that task registered, or more of them",
            )
        ]
    if health.dead == 0:
        return [*found, Diagnosis("dead jobs", Level.OK, "none")]
    dead = f"{counted(health.dead, 'job')} given up after the last attempt"
    advice = "see `oncekey dead-letters list`, then retry or discard each"
    return [*found, Diagnosis("dead jobs", Level.WARN, dead, advice)]


def counted(number: int, what: str) -> str:
    """A number that a health check counted: it stops at COUNTED."""
    if number >= COUNTED:
        return f"{COUNTED:,} {what}s or more"
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """A length of time in its two largest units: ``3 d 4 h``, ``2 h``, ``12 min``, ``45 s``."""
    whole = round(max(0.0, seconds))
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    parts = []
    for size, unit in units:
        if whole >= size:
            parts.append(f"{whole // size} {unit}")
            whole %= size
    return " ".join(parts[:2]) or "0 s"
