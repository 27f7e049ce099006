"""What a row tells of an owner that does not renew its lease."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.core.leases import overdue_lease
from oncekey.core.record import Record
from oncekey.core.states import State
from tests.engine.doubles import record_of, reservation

NEW = record_of(reservation(lease=60.0))


def _later(record: Record, seconds: float) -> Record:
    return replace(record, now=record.now + seconds)


def _renewed(record: Record, lease: float) -> Record:
    return replace(record, lease_until=record.now + lease)


@pytest.mark.parametrize(("age", "left"), [(0.0, None), (25.0, None), (30.0, None), (30.5, 29.5), (59.0, 1.0)])
def test_lease_is_overdue_once_less_than_half_of_it_is_left(age: float, left: float | None) -> None:
    assert overdue_lease(_later(NEW, age), 60.0) == left


def test_lease_that_is_over_is_not_overdue() -> None:
    assert overdue_lease(_later(NEW, 60.0), 60.0) is None


@pytest.mark.parametrize("state", [state for state in State if state is not State.IN_PROGRESS])
def test_only_a_key_in_progress_has_an_overdue_lease(state: State) -> None:
    assert overdue_lease(replace(_later(NEW, 50.0), state=state), 60.0) is None


def test_first_lease_counts_by_its_own_length_after_a_deploy_raised_it() -> None:
    """The route says 600 s now; the row was reserved for 60 s, and its owner renews within 25."""
    assert overdue_lease(_later(NEW, 25.0), 600.0) is None
    assert overdue_lease(_later(NEW, 31.0), 600.0) == 29.0


def test_lease_that_a_deploy_shortened_is_overdue_by_the_shorter_one_only() -> None:
    """The owner has 600 s, and renews after 200: while more than 30 s are left, it may be alive."""
    long = record_of(reservation(lease=600.0))
    assert overdue_lease(_later(long, 550.0), 60.0) is None
    assert overdue_lease(_later(long, 580.0), 60.0) == 20.0


def test_renewed_lease_counts_by_the_length_of_the_route() -> None:
    renewed = _renewed(_later(NEW, 200.0), 60.0)
    assert overdue_lease(_later(renewed, 25.0), 60.0) is None
    assert overdue_lease(_later(renewed, 31.0), 60.0) == 29.0
