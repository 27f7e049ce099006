"""The short form of ``make matrix``: end-to-end tests on the oldest versions, and floors that are what was tried."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.matrix import interpreters
from tests.matrix.cells import NEWEST, OLDEST, ROOT, Cell, NotInstalled, cells, read_pins
from tests.matrix.inside import complaints
from tests.matrix.runs import Run

CELLS = {cell.name: cell for cell in cells()}
SHORT = ("tests/web/test_frameworks.py", "tests/enlist/test_drivers.py", "tests/enlist/test_base_http_middleware.py")
NOT_OURS_TO_INSTALL = {"werkzeug", "psycopg-binary", "async-timeout", "aiosqlite", "aiomysql", "asyncmy"}
"""pyproject.toml does not name them: they come with flask, psycopg and asyncpg, and no extra needs the last three."""


def floors() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    wanted = [Requirement(text) for text in named]
    return {one.name.lower(): part.version for one in wanted for part in one.specifier if part.operator == ">="}


def test_floors_in_pyproject_are_the_pins_of_the_oldest_cell() -> None:
    declared, pins = floors(), CELLS[OLDEST].pins
    tried = {name: Version(version) for name, version in pins.items() if name not in NOT_OURS_TO_INSTALL}
    assert {name: Version(declared[name]) for name in tried} == tried


def test_newest_cell_imports_the_versions_of_the_development_pins() -> None:
    pinned = read_pins((ROOT / "requirements/dev.txt").read_text())
    development = {name.lower(): version for name, version in pinned.items()}
    assert CELLS[NEWEST].versions == {name: development.get(name, "-") for name in CELLS[NEWEST].versions}


def test_cell_with_a_version_other_than_its_pin_is_refused() -> None:
    assert any(line.endswith("and 0.0.1 is pinned") for line in complaints({"starlette": "0.0.1"}))


def test_cell_that_imports_a_pin_from_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(ROOT / "src"))
    assert any("starlette is imported from" in line for line in complaints({"starlette": "0.0.1"}))


def test_cell_whose_pins_do_not_fit_each_other_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "starlette-0.39.dist-info"
    planted.mkdir()
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: starlette\nVersion: 0.39\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = list(complaints({"starlette": "0.39"}))
    assert any(line.startswith("fastapi ") and line.endswith("and 0.39 is installed") for line in told), told


@pytest.mark.frameworks
@pytest.mark.timeout(300)  # the first time pip fetches a dozen wheels
def test_oldest_cell_passes_the_end_to_end_tests(tmp_path: Path) -> None:
    cell = CELLS[OLDEST]
    try:
        cell.prepare()
    except NotInstalled as missing:
        pytest.skip(str(missing))
    assert {name: cell.versions[name] for name in cell.pins} == cell.pins
    run = Run(cell, SHORT, tmp_path)
    run.wait()
    assert not run.failed, run.log.read_text()
    assert run.passed


def test_cell_whose_python_is_not_on_the_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.matrix.interpreters._candidates", lambda: iter([sys.executable]))
    interpreters.newest.cache_clear()
    try:
        assert Cell("newer", {"django": "9"}, oldest_python=(3, 99)).missing.startswith("newer is skipped: it needs")
        assert Cell("old", {"django": "4"}, oldest_python=(3, 11)).missing == ""
        assert interpreters.newest((3, 11)) == sys.executable
    finally:
        interpreters.newest.cache_clear()


FLAKY = """
from pathlib import Path

def test_that_always_fails():
    assert False

def test_that_fails_the_first_time():
    seen = Path(__file__).with_suffix(".seen")
    again = seen.exists()
    seen.touch()
    assert again

def test_that_passes():
    pass
"""


def test_failed_tests_run_again_and_only_those_that_fail_again_count(tmp_path: Path) -> None:
    tests = tmp_path / "test_planted.py"
    tests.write_text(FLAKY)
    run = Run(CELLS[NEWEST], [str(tests)], tmp_path)
    run.wait()
    assert len(run.failed) == 2
    run.repeat()
    assert [name.rpartition("::")[2] for name in run.failed] == ["test_that_always_fails"]
    assert [name.rpartition("::")[2] for name in run.passed_alone] == ["test_that_fails_the_first_time"]
    assert run.passed == 2
