"""The ledger comparison at the size it is made for; a smaller one runs with every ``make test``."""

from __future__ import annotations

import pytest

from tests.upkeep.large_ledgers import compare_large


@pytest.mark.faults
def test_a_hundred_planted_differences_in_a_million() -> None:
    """1,000,000 against 1,000,000 rows: exactly those, in less than 300 MB."""
    assert compare_large(1_000_000)["kilobytes"] < 300 * 1024
