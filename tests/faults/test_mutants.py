"""What counts as caught, and what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncekey.stores.sql import queries
from tests.faults import mutants
from tests.faults.mutant import Mutant
from tests.faults.mutant_table import MUTANTS, NOT_HERE

MUTANT = Mutant(1, "I3", "a guard", (("oncekey.core.values", "old", "new"),), "tests/core/test_values.py::test_it")
APPLIED = "applied: oncekey.core.values\n"
FAILED = "E   assert False\nFAILED tests/core/test_values.py::test_it[a b] - assert False\n"


@pytest.mark.parametrize(
    ("code", "said", "applied", "why"),
    [
        (1, FAILED, APPLIED, None),
        (0, "1 passed", APPLIED, "survived"),
        (1, FAILED, "", "never loaded"),
        (1, FAILED, "stale: oncekey.core.values has this 0 times: old\n" + APPLIED, "stale"),
        (1, "E   NameError: name 'x' is not defined\n" + FAILED, APPLIED, "no verdict"),
        (2, "collected 0 items", APPLIED, "no verdict"),
        (4, "ERROR: not found", APPLIED, "no verdict"),
        (-9, "", APPLIED, "no verdict"),
        (1, "ERROR tests/core/test_values.py::test_it - fixture", APPLIED, "no test failed"),
    ],
)
def test_mutant_is_caught_only_by_a_failed_assertion(code: int, said: str, applied: str, why: Any) -> None:
    trial: Any = SimpleNamespace(mutant=MUTANT, began=0.0, code=code, said=said, applied=applied)
    outcome = mutants.judged(trial)
    assert outcome.caught == (why is None)
    assert (why or "") in outcome.why


def test_every_hazard_is_in_the_table_or_has_its_reason() -> None:
    there = {str(mutant.hazard) for mutant in MUTANTS} | set(NOT_HERE)
    assert {str(number) for number in range(1, 40)} <= there
    assert len(mutants.markdown().splitlines()) == len(MUTANTS) + len(NOT_HERE) + 2


def test_text_that_a_mutant_changes_is_in_the_source_once() -> None:
    """A change of a guard fails here at once, not only when the campaign tries its mutant."""
    for mutant in MUTANTS:
        for where, old, _ in mutant.edits:
            package, _slash, name = where.partition("/")
            folder = mutants.ROOT / "src" / package.replace(".", "/")
            migration = folder / "migrations" / f"{name}.sql"
            if not name:
                text = folder.with_suffix(".py").read_text("utf-8")
            elif migration.exists():
                text = migration.read_text("utf-8")
            else:
                text = queries.statement(package, name)
            assert text.count(old) == 1, f"{mutant.guard}: {where} has this not once: {old}"


def test_words_that_no_mutant_contains_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mutants", "no guard has these words"])
    monkeypatch.setattr(mutants, "try_all", None)  # to be called is an error
    with pytest.raises(SystemExit, match="2"):
        mutants.main()


def test_mutant_whose_module_is_not_installed_cannot_run() -> None:
    assert MUTANT.can_run
    assert replace(MUTANT, needs="json").can_run
    assert not replace(MUTANT, needs="no_such_module").can_run


def test_a_change_is_made_in_memory_and_in_children(tmp_path: Path) -> None:
    """Of a module, of a statement, and told; text that is not there is said to be stale."""
    edits = [
        ["oncekey.core.policy_headers", '"content-language",', '"x-planted",'],
        ["oncekey.stores.sqlite/due_leases", "lease_until <= ?1", "lease_until <= 7"],
        ["oncekey.stores.sqlite/delete", "no such text", ""],
    ]
    script = """
import subprocess, sys
from oncekey.core.policy_headers import STORED_HEADERS
from oncekey.stores.sqlite import store
print("x-planted" in STORED_HEADERS, "lease_until <= 7" in store._DUE[store.Duty.LEASES])
if len(sys.argv) == 1:
    sys.exit(subprocess.run([sys.executable, __file__, "child"]).returncode)
"""
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {
        "PYTHONPATH": str(mutants.MUTATING),
        "ONCEKEY_MUTANT": json.dumps(edits),
        "ONCEKEY_MUTANT_APPLIED": str(tmp_path / "applied"),
    }
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=50)
    assert sorted(ended.stdout.split("\n")) == ["", "True True", "True True"]
    told = (tmp_path / "applied").read_text().splitlines()
    assert told.count("applied: oncekey.core.policy_headers") == 2
    assert told.count("stale: oncekey.stores.sqlite/delete has this 0 times: no such text") == 2
