"""The tests of one cell: a pytest of its own, and what it counted."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.matrix.cells import FOLDER, ROOT, Cell

TESTS = (
    "tests/web",
    "tests/enlist",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/stores").glob("test_postgres*.py")),
    *("tests/stores/test_mysql.py", "tests/stores/test_mysql_locks.py"),
)
"""Everything that touches a web framework, SQLAlchemy or a driver."""


class Run:
    """Started when it is made. ``seconds`` and the counts are final when ``going_on()`` has said no."""

    def __init__(self, cell: Cell, tests: Sequence[str] = TESTS, folder: Path = FOLDER) -> None:
        self.cell = cell
        self.log = folder / f"{cell.name}.log"
        self.passed = self.skipped = 0
        self.failed: list[str] = []
        self.seconds = 0.0
        self._results = folder / f"{cell.name}.xml"
        self._results.unlink(missing_ok=True)
        self._began = time.monotonic()
        command = [cell.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += ["-m", "not faults", f"--junitxml={self._results}"]
        if cell.pins:
            # Old versions warn, of each other and of newer ones. That is not ours to fix, so it is no error here.
            command += ["-W", "default"]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *tests], cwd=ROOT, env=cell.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def going_on(self) -> bool:
        if self._process.poll() is None:
            return True
        if not self.seconds:
            self.seconds = time.monotonic() - self._began
            self._count()
        return False

    def wait(self) -> None:
        try:
            self._process.wait()
        finally:
            self.kill()
        self.going_on()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _count(self) -> None:
        if self._results.exists():
            for case in ElementTree.parse(self._results).iter("testcase"):
                outcomes = {child.tag for child in case}
                if outcomes & {"failure", "error"}:
                    self.failed.append(f"{case.get('classname')}::{case.get('name')}")
                elif "skipped" in outcomes:
                    self.skipped += 1
                else:
                    self.passed += 1
        if not self.failed and (self._process.returncode or not self.passed):
            self.failed.append(f"pytest ended with {self._process.returncode}: see {self.log}")
