"""A wall clock that a test can turn while a process runs: the process of an app, or that of a database server.

``clock_shim.c`` is compiled where it is used, with the machine's own C compiler, and preloaded into the process. Only
the wall clock of the C library changes. The monotonic clock does not, as when an operator sets the time::

    clock = TurnedClock(folder)
    process = subprocess.Popen(command, env=os.environ | clock.environment)
    clock.turn(hours=1)
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

VARIABLE = "ONCEKEY_CLOCK"
_SIZE = 4096


class NoCompiler(RuntimeError):
    """There is no C compiler here, or none that can make a shared library; the message says what would help."""


class TurnedClock:
    """An offset that every process started with ``environment`` adds to its wall clock."""

    def __init__(self, folder: Path) -> None:
        self._library = _compiled(folder)
        self._file = folder / "clock"
        self._file.write_bytes(bytes(_SIZE))
        with self._file.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _SIZE)
        for each in (folder, self._library, self._file):
            each.chmod(0o755)  # a server runs as another user

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), VARIABLE: str(self._file)}

    def turn(self, by: timedelta) -> None:
        """From now on the clock is wrong by this much; ``timedelta(0)`` corrects it."""
        self._shared[:8] = struct.pack("=q", int(by.total_seconds() * 1e9))

    def close(self) -> None:
        self._shared.close()


def _compiled(folder: Path) -> Path:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler("no C compiler found: install gcc or clang to turn the clock of a process")
    source = folder / "clock_shim.c"
    source.write_text(files("oncekey.testing").joinpath("clock_shim.c").read_text())
    library = folder / "clock_shim.so"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise NoCompiler(f"{compiler} cannot make a shared library here: {done.stderr.strip()[:300]}")
    return library
