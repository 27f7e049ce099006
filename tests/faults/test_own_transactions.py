"""A handler that ends its own transaction: the campaign notices where a guard is taken away."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from tests.enlist.own_endings import WAYS
from tests.faults import own_transactions
from tests.faults.campaign import Run
from tests.faults.own_transactions import DRIVERS, Case


def test_every_driver_and_way_has_its_cases() -> None:
    for store, drivers in DRIVERS.items():
        cases = list(own_transactions.cases(store))
        assert len(cases) == len(set(cases)) == own_transactions.EVERYTHING[store]
        assert {case.driver for case in cases} == set(drivers)
        assert {case.way for case in cases} == set(WAYS)


def test_second_commit_that_is_not_refused_is_noticed(tmp_path: Path) -> None:
    """Three attempts write in a transaction of their own, which is not guarded, and each is released."""
    case = Case("sqlite3", "rolls back, writes again, commits", "raises", swallows=True)
    run = Run("sqlite", 1, 1, tmp_path)

    async def not_enlisted(*_: object, **__: object) -> None:
        return None

    with (
        patch.object(own_transactions, "cases", lambda store: iter([case])),
        patch("oncekey.engine.operation.enlistment.start", not_enlisted),
    ):
        own_transactions.own_transactions(run)
    assert any("attempts committed" in what for what in run.violations), run.violations
