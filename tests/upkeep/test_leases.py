"""Leases against handler times: what is measured, and when somebody is told."""

from __future__ import annotations

from oncekey.core.states import Actor, Effects, Event
from oncekey.telemetry.emitter import Emitter
from oncekey.upkeep.leases import ENOUGH, LOOKED_AT, LeaseWatch
from tests.upkeep.places import LEASE, OPERATION, RESPONSE, Place


def _slow(place: Place, number: int, seconds: float) -> None:
    """Requests whose handler takes so long, and lives: its lease is renewed."""
    records = place.reserved(number)
    while seconds > LEASE / 2:
        place.age(LEASE / 2)
        seconds -= LEASE / 2
        records = place.moved(records, Event.RENEW, lease_seconds=LEASE)
    place.age(seconds)
    place.moved(records, Event.COMPLETE, response=RESPONSE)


def _watch(place: Place, looks: int = 1) -> LeaseWatch:
    watch = LeaseWatch(place.store, Emitter(place.told.append))
    for _ in range(looks):
        watch.look()
    return watch


def test_handlers_that_outlive_their_lease(place: Place) -> None:
    """Two in a hundred are slower than the lease: told, with both numbers, and only once."""
    _slow(place, 98, 1.0)
    _slow(place, 2, LEASE * 2)
    watch = _watch(place)
    watch.look()
    (told,) = place.told
    assert (type(told).__name__, told.operation) == ("LeaseTooShort", OPERATION)  # type: ignore[attr-defined]
    assert abs(told.lease_seconds - LEASE) < 5  # type: ignore[attr-defined]
    assert abs(told.p99_seconds - 2 * LEASE) < 5  # type: ignore[attr-defined]


def test_one_in_a_hundred_may_be_slow(place: Place) -> None:
    _slow(place, 199, 1.0)
    _slow(place, 1, LEASE * 2)
    watch = _watch(place)
    assert watch.measured(OPERATION) is not None
    assert place.told == []


def test_too_few_to_tell(place: Place) -> None:
    _slow(place, ENOUGH - 1, LEASE * 2)
    assert _watch(place).measured(OPERATION) is None
    assert place.told == []


def test_what_says_nothing_about_a_handler(place: Place) -> None:
    """Settled by the reconciler long after, still running, or finished by a second attempt: none is measured."""
    unknown = place.unknown(ENOUGH)
    again = place.reserved(ENOUGH, effects=Effects.REPEATABLE)
    place.age(LEASE * 3)
    place.moved(unknown, Event.CONFIRM, Actor.RECONCILER, response=RESPONSE)
    wanted = place.reservations(ENOUGH, effects=Effects.REPEATABLE)
    for record, reservation in zip(again, wanted, strict=True):
        (taken,) = place.moved([record], Event.TAKE_OVER, Actor.REQUEST, reservation=reservation)
        place.moved([taken], Event.COMPLETE, response=RESPONSE)
    place.reserved(ENOUGH)
    assert _watch(place, looks=3).measured(OPERATION) is None


def test_it_comes_round(place: Place) -> None:
    """A look reads on where the last one stopped, and begins again at the end."""
    _slow(place, LOOKED_AT + 50, 1.0)
    watch = _watch(place)
    assert len(watch._seen[OPERATION]) == LOOKED_AT
    watch.look()
    assert len(watch._seen[OPERATION]) == LOOKED_AT + 50
    watch.look()
    assert len(watch._seen[OPERATION]) == 2 * LOOKED_AT + 50
