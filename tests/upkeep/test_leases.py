"""Leases against handler times: what is measured, and when the log warns."""

from __future__ import annotations

from oncekey.core.states import Actor, Effects, Event
from oncekey.telemetry.emitter import Emitter
from oncekey.upkeep.leases import ENOUGH, LOOKED_AT, LeaseWatch
from tests.upkeep.key_store import LEASE, OPERATION, RESPONSE, KeyStore


def _slow(rows: KeyStore, number: int, seconds: float) -> None:
    """Requests whose handler takes so long, and lives: its lease is renewed."""
    records = rows.reserved(number)
    while seconds > LEASE / 2:
        rows.age(LEASE / 2)
        seconds -= LEASE / 2
        records = rows.moved(records, Event.RENEW, lease_seconds=LEASE)
    rows.age(seconds)
    rows.moved(records, Event.COMPLETE, response=RESPONSE)


def _watch(rows: KeyStore, looks: int = 1) -> LeaseWatch:
    watch = LeaseWatch(rows.store, Emitter(rows.told.append))
    for _ in range(looks):
        watch.look()
    return watch


def test_handlers_that_outlive_their_lease(rows: KeyStore) -> None:
    """Two in a hundred are slower than the lease: told, with both numbers, and only once."""
    _slow(rows, 98, 1.0)
    _slow(rows, 2, LEASE * 2)
    watch = _watch(rows)
    watch.look()
    (told,) = rows.told
    assert (type(told).__name__, told.operation) == ("LeaseTooShort", OPERATION)  # type: ignore[attr-defined]
    assert abs(told.lease_seconds - LEASE) < 5  # type: ignore[attr-defined]
    assert abs(told.p99_seconds - 2 * LEASE) < 5  # type: ignore[attr-defined]


def test_one_in_a_hundred_may_be_slow(rows: KeyStore) -> None:
    _slow(rows, 199, 1.0)
    _slow(rows, 1, LEASE * 2)
    watch = _watch(rows)
    assert watch.measured(OPERATION) is not None
    assert rows.told == []


def test_too_few_runs_give_no_measure(rows: KeyStore) -> None:
    _slow(rows, ENOUGH - 1, LEASE * 2)
    assert _watch(rows).measured(OPERATION) is None
    assert rows.told == []


def test_runs_that_do_not_measure_a_handler_are_ignored(rows: KeyStore) -> None:
    """Settled by the reconciler long after, still running, or finished by a second attempt: none is measured."""
    unknown = rows.unknown(ENOUGH)
    again = rows.reserved(ENOUGH, effects=Effects.REPEATABLE)
    rows.age(LEASE * 3)
    rows.moved(unknown, Event.CONFIRM, Actor.RECONCILER, response=RESPONSE)
    wanted = rows.reservations(ENOUGH, effects=Effects.REPEATABLE)
    for record, reservation in zip(again, wanted, strict=True):
        (taken,) = rows.moved([record], Event.TAKE_OVER, Actor.REQUEST, reservation=reservation)
        rows.moved([taken], Event.COMPLETE, response=RESPONSE)
    rows.reserved(ENOUGH)
    assert _watch(rows, looks=3).measured(OPERATION) is None


def test_lease_watch_starts_again_after_the_last_key(rows: KeyStore) -> None:
    """A look reads on where the last one stopped, and begins again at the end."""
    _slow(rows, LOOKED_AT + 50, 1.0)
    watch = _watch(rows)
    assert len(watch._seen[OPERATION]) == LOOKED_AT
    watch.look()
    assert len(watch._seen[OPERATION]) == LOOKED_AT + 50
    watch.look()
    assert len(watch._seen[OPERATION]) == 2 * LOOKED_AT + 50
