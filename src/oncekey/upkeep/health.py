"""Whether upkeep keeps up: when each duty last succeeded, and what has waited too long.

Only the process that does a duty knows when it last succeeded. Other processes, such as ``oncekey doctor``, look for
overdue rows: if a lease has been over for minutes, no sweeper runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oncekey.core.health import StoreHealth
from oncekey.core.jobs import OutboxHealth
from oncekey.core.record import Record
from oncekey.core.values import value
from oncekey.stores.api import Duty, Outbox, Store
from oncekey.upkeep import waiting
from oncekey.upkeep.unasked import advice, no_resolver

UNDONE_SECONDS = 300.0
"""How long a lease may be over, or an unknown outcome be due, before it is a problem."""
REAPED_SECONDS = 86_400.0
"""How long a key may be past its expiry. Only the table grows by it."""
UNKNOWN_SECONDS = 3_600.0
LAG_SECONDS = 60.0
LATE_TURNS = 3
"""How many turns of a duty may be missed."""


@value
class DutyHealth:
    """What this process knows about one duty."""

    name: str
    every: float
    """Seconds between two turns."""
    succeeded_seconds_ago: float | None
    """None: it has not succeeded since it was started."""
    failures: int
    """Since it last succeeded."""
    last_error: str | None


@value
class Health:
    """The present numbers; ``problems`` gives sentences that say what is wrong and what to do."""

    duties: tuple[DutyHealth, ...]
    keys: StoreHealth
    outbox: OutboxHealth
    reconcile_over_seconds: float
    """How long the oldest due unknown outcome has waited for the reconciler."""
    expired_over_seconds: float
    """How long the oldest key past its expiry has waited for the reaper."""

    @property
    def problems(self) -> list[str]:
        return [*_of_duties(self.duties), *_of_the_store(self)]

    def as_json(self) -> dict[str, Any]:
        keys, outbox = self.keys, self.outbox
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "duties": {
                duty.name: {
                    "every_seconds": duty.every,
                    "succeeded_seconds_ago": _rounded(duty.succeeded_seconds_ago),
                    "failures": duty.failures,
                    "last_error": duty.last_error,
                }
                for duty in self.duties
            },
            "keys": {str(state): number for state, number in keys.counts.items()},
            "unknown_without_resolver": {each.operation: each.unasked for each in keys.unknowns if each.unasked},
            "half_done_and_waiting": {each.operation: each.keys for each in keys.half_done},
            "oldest_unknown_seconds": _rounded(keys.oldest_unknown_seconds),
            "oldest_expired_lease_seconds": _rounded(keys.lease_over_seconds),
            "oldest_due_unknown_seconds": _rounded(self.reconcile_over_seconds),
            "oldest_expired_key_seconds": _rounded(self.expired_over_seconds),
            "outbox_ready": outbox.ready,
            "outbox_lag_seconds": _rounded(outbox.lag_seconds),
            "dead_letters": {"keys": keys.dead, "jobs": outbox.dead},
        }


def look(store: Store, duties: Sequence[DutyHealth] = ()) -> Health:
    """Read the numbers from the store, cheaply. Blocks, and closes the calling thread's connection at the end."""
    try:
        unknown, expired = store.due(Duty.UNKNOWNS, 1), store.due(Duty.EXPIRED, 1)
        return Health(
            tuple(duties),
            store.counts(),
            store.outbox_health() if isinstance(store, Outbox) else OutboxHealth(ready=0, lag_seconds=0.0, dead=0),
            max((_waited(record, record.reconcile_at) for record in unknown), default=0.0),
            max((_waited(record, record.expires_at) for record in expired), default=0.0),
        )
    finally:
        store.disconnect()


def _waited(record: Record, since: float | None) -> float:
    return 0.0 if since is None else max(0.0, record.now - since)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _of_duties(duties: Sequence[DutyHealth]) -> list[str]:
    sentences = []
    for duty in duties:
        ago = duty.succeeded_seconds_ago
        if duty.failures and (ago is None or ago > LATE_TURNS * duty.every):
            since = "never" if ago is None else f"{ago:.0f} s ago"
            sentences.append(f"{duty.name} succeeded {since} and failed {duty.failures} times since: {duty.last_error}")
    return sentences


def _of_the_store(health: Health) -> list[str]:
    keys, outbox = health.keys, health.outbox
    sentences = []
    if keys.lease_over_seconds > UNDONE_SECONDS:
        sentences.append(
            f"a lease has been over for {keys.lease_over_seconds:.0f} s and was not swept: run `oncekey upkeep`"
        )
    if health.reconcile_over_seconds > UNDONE_SECONDS:
        sentences.append(
            f"an unknown outcome has been due for {health.reconcile_over_seconds:.0f} s and no resolver was asked: "
            "register a resolver and run `oncekey upkeep MODULE:ONCE`, or settle it by hand"
        )
    elif keys.oldest_unknown_seconds > UNKNOWN_SECONDS:
        sentences.append(f"an outcome has been unknown for {keys.oldest_unknown_seconds:.0f} s: ask the provider")
    if health.expired_over_seconds > REAPED_SECONDS:
        sentences.append(
            f"a key expired {health.expired_over_seconds:.0f} s ago and is still there: run `oncekey upkeep`, or give "
            "its reaper a larger share"
        )
    sentences += [
        f"{no_resolver(each.operation, each.unasked)}: {advice(each.operation)}"
        for each in keys.unknowns
        if each.unasked
    ]
    sentences += [f"{waiting.half_done(each)}: {waiting.advice(each.operation)}" for each in keys.half_done]
    if keys.dead:
        sentences.append(
            f"{keys.dead} keys are dead letters, which upkeep leaves alone: see `oncekey dead-letters list`"
        )
    if outbox.lag_seconds > LAG_SECONDS:
        sentences.append(f"a job has been ready for {outbox.lag_seconds:.0f} s: run `oncekey worker`, or more of them")
    if outbox.dead:
        sentences.append(f"{outbox.dead} jobs are dead letters: find out what each has done, and retry or discard it")
    return sentences
