"""The tests of one cell: a pytest of its own, and what it counted."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.matrix.cells import FOLDER, OLDEST, ROOT, Cell

TESTS = (
    "tests/web",
    "tests/enlist",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/stores").glob("test_postgres*.py")),
    *("tests/stores/test_mysql.py", "tests/stores/test_mysql_locks.py"),
)
"""Everything that touches a web framework, SQLAlchemy or a driver."""
SERVED = "tests/web/test_frameworks_served.py"
"""The same suite again, under real servers, for minutes. The oldest cell runs it, and `make frameworks` the newest."""


class Run:
    """Started when it is made. ``seconds`` and the counts are final when ``going_on()`` has said no."""

    def __init__(self, cell: Cell, tests: Sequence[str] = (), folder: Path = FOLDER) -> None:
        self.cell = cell
        self.log = folder / f"{cell.name}.log"
        self.passed = self.skipped = 0
        self.failed: list[str] = []
        self.passed_alone: list[str] = []
        """Tests that failed beside other tests, and passed in ``repeat()``."""
        self.seconds = 0.0
        self._results = folder / f"{cell.name}.xml"
        self._began = time.monotonic()
        command = [cell.python, "-m", "pytest", "-q", "-o", f"cache_dir={folder / cell.name}.cache"]
        command += ["--continue-on-collection-errors", "-m", "not faults", f"--junitxml={self._results}"]
        if cell.name != OLDEST:
            command.append(f"--ignore={SERVED}")
        if cell.pins:
            # Old versions warn, of each other and of newer ones. That is not ours to fix, so it is no error here.
            command += ["-W", "default"]
        self._command = [*command, *(tests or cell.tests or TESTS)]
        self._process = self._start()

    def repeat(self) -> None:
        """Run the tests that failed once more, alone, and wait for them. ``failed`` keeps those that fail again.

        A test that needs an old version to behave fails twice. A test that a busy machine made too late passes, and
        `make test` has the same test on the newest versions, without a second try.
        """
        first, passed, skipped = self.failed, self.passed, self.skipped
        self.failed = []
        self._process = self._start("--last-failed", "--last-failed-no-failures=none")
        self._process.wait()
        self._count()
        self.passed_alone = [name for name in first if name not in self.failed]
        self.passed, self.skipped = passed + len(self.passed_alone), skipped

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        self._results.unlink(missing_ok=True)
        with self.log.open("a" if options else "w") as log:
            return subprocess.Popen(
                [*self._command, *options],
                cwd=ROOT,
                env=self.cell.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
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
            for case in ElementTree.parse(self._results).iter("testcase"):  # noqa: S314 - pytest wrote it
                outcomes = {child.tag for child in case}
                if outcomes & {"failure", "error"}:
                    self.failed.append(f"{case.get('classname')}::{case.get('name')}")
                elif "skipped" in outcomes:
                    self.skipped += 1
                else:
                    self.passed += 1
        if not self.failed and (self._process.returncode or not self.passed):
            self.failed.append(f"pytest ended with {self._process.returncode}: see {self.log}")
