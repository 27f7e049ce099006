"""The cells of the version matrix: virtualenvs that differ from ``.venv`` in a few packages.

A cell is a file of pins in requirements/matrix. Its virtualenv holds the pinned packages only. After them on
``sys.path`` comes everything that the running Python has, so that a cell is made in seconds and a pinned version is
the one imported. The cell ``newest`` has no pins: it is the running Python, with the versions of requirements/dev.txt.
A file with lines ``# tests: …`` is for these tests alone; every other cell runs those of ``runs.py``.

A file with a line ``# python: 3.12`` is for this Python or a newer one. The running Python's compiled packages do not
work there, so its virtualenv gets those, too, in the same versions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path

from oncekey.testing.servers.binaries import find_postgres
from oncekey.testing.servers.processes import ServerUnavailable
from tests.matrix import interpreters

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements" / "matrix"
FOLDER = ROOT / ".venv-matrix"
OLDEST, NEWEST = "oldest", "newest"


class NotInstalled(Exception):
    """pip could not install the pins of a cell: there is no network, or no wheel for this machine."""


class WrongVersions(Exception):
    """The pins do not fit each other, or another version than the pinned one would be imported."""


@dataclass(frozen=True)
class Cell:
    name: str
    pins: Mapping[str, str]
    tests: tuple[str, ...] = ()
    """The tests that it is for; (): all."""
    oldest_python: interpreters.Version | None = None
    """The oldest Python that its pins allow; None: the running one."""

    @property
    def missing(self) -> str:
        """Why this machine cannot have the cell; "": it can."""
        if self.oldest_python is None or interpreters.newest(self.oldest_python) is not None:
            return ""
        asked = ".".join(map(str, self.oldest_python))
        return f"{self.name} is skipped: it needs Python {asked} or newer, and this machine has none"

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python") if self.pins else sys.executable

    @property
    def environment(self) -> dict[str, str]:
        """The checkout's own source comes first; a surrounding pytest or coverage has no say in a cell."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
        if self.oldest_python is not None:
            with suppress(ServerUnavailable):  # a wheel of the running Python may have it
                kept["ONCEKEY_PG_BIN"] = str(find_postgres())
        return {**kept, "PYTHONPATH": str(ROOT / "src")}

    def prepare(self) -> None:
        """Make the virtualenv, unless one with these pins is there."""
        FOLDER.mkdir(exist_ok=True)
        with self._alone():
            stamp = self.folder / ".stamp"
            if self.pins and not (stamp.exists() and stamp.read_text() == self._recipe):
                self._build()
                stamp.write_text(self._recipe)

    @cached_property
    def versions(self) -> dict[str, str]:
        """The version that the cell imports of each package that any cell pins, "-" for none; raises WrongVersions."""
        asked = [self.python, "-m", "tests.matrix.inside", json.dumps(dict(self.pins)), json.dumps(packages())]
        done = subprocess.run(asked, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise WrongVersions(f"the cell {self.name} is not what its pins say:\n{done.stdout}{done.stderr}")
        found: dict[str, str] = json.loads(done.stdout)
        return found

    @property
    def _recipe(self) -> str:
        said = json.dumps([dict(self.pins), self._base_python, sys.version, _base_folders()])
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def _base_python(self) -> str:
        found = None if self.oldest_python is None else interpreters.newest(self.oldest_python)
        return sys.executable if found is None else found

    def _build(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        made = [self._base_python, "-m", "venv", "--without-pip", "--symlinks", str(self.folder)]
        subprocess.run(made, capture_output=True, check=True)
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        options = ["-qq", "--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=10"]
        wanted = dict(self.pins) if self.oldest_python is None else {**_compiled(), **self.pins}
        pins = [f"{name}=={version}" for name, version in wanted.items()]
        done = subprocess.run([*pip, "install", *options, *pins], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotInstalled(f"pip could not install the cell {self.name}: {done.stderr.strip()[-300:]}")
        # After pip, which leaves out what it finds in these folders.
        (own,) = self.folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({folder!r})" for folder in _base_folders()]
        (own / "after_own_packages.pth").write_text("\n".join(lines) + "\n")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two commands at once do not build the same folder."""
        with (FOLDER / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def read_pins(text: str) -> dict[str, str]:
    lines = [line.strip() for line in text.splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def read_words(text: str, name: str) -> tuple[str, ...]:
    """The words of all lines ``# name: …``."""
    return tuple(word for line in text.splitlines() if line.startswith(f"# {name}:") for word in line.split()[2:])


def cells() -> list[Cell]:
    """From the oldest to the newest."""
    between = sorted(path.name.removesuffix(".txt") for path in PINS.glob("*.txt"))
    between.remove(OLDEST)
    return [
        *(_cell(name, (PINS / f"{name}.txt").read_text()) for name in (OLDEST, *between)),
        Cell(NEWEST, {}),
    ]


def _cell(name: str, text: str) -> Cell:
    oldest = [(int(major), int(minor)) for major, minor in (word.split(".") for word in read_words(text, "python"))]
    return Cell(name, read_pins(text), read_words(text, "tests"), oldest[0] if oldest else None)


def packages() -> list[str]:
    """The packages whose versions differ between cells, in the order in which the pins name them."""
    return list(dict.fromkeys(name for cell in cells() for name in cell.pins))


def _compiled() -> dict[str, str]:
    """The packages of requirements/dev.txt that the running Python has compiled for itself."""
    pinned = {name.lower() for name in read_pins((ROOT / "requirements/dev.txt").read_text())}
    found = {each.name.lower(): each for each in distributions()}
    return {
        name: found[name].version
        for name in sorted(pinned & found.keys())
        if any(str(file).endswith(".so") and ".cpython-" in str(file) for file in found[name].files or ())
    }


def _base_folders() -> list[str]:
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
