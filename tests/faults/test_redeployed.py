"""A deploy that changes a declaration: the campaign notices where a guard is taken away."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from oncekey.core import decision
from tests.faults import redeployed
from tests.faults.campaign import Run
from tests.faults.redeployed import EFFECTS, Case


def violations(folder: Path, case: Case) -> list[str]:
    run = Run("sqlite", 1, 1, folder)
    with patch.object(redeployed, "cases", lambda: iter([case])):
        redeployed.redeployed(run)
    assert run.hits == 1
    return run.violations


@pytest.mark.parametrize(
    "case",
    [
        Case("phased", "charged", "dies", "external"),
        Case("phased", "charging", "returns 500", "external", honoured=True),
        Case("repeatable", "charged", "raises", "phased"),
    ],
    ids=str,
)
def test_second_charge_after_a_deploy_is_noticed(case: Case, tmp_path: Path) -> None:
    with patch.object(decision, "_not_again", lambda *_: None):
        (found,) = violations(tmp_path, case)
    assert found.startswith("I1: 2 charges")
    (tmp_path / "guarded").mkdir()
    assert violations(tmp_path / "guarded", case) == []


def test_every_pair_of_declarations_has_its_cases() -> None:
    cases = list(redeployed.cases())
    assert len(cases) == len(set(cases)) == redeployed.EVERYTHING
    assert {(case.before, case.now) for case in cases} == {(before, now) for before in EFFECTS for now in EFFECTS}
