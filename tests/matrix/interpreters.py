"""Other Pythons of this machine, for cells whose packages need a newer one than the running one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

Version = tuple[int, int]
_NEWEST_MINOR = 20
_ASK = "import sys; print(*sys.version_info[:2], sys.executable)"


@cache
def newest(at_least: Version) -> str | None:
    """The newest Python on the machine, if it is at least this version."""
    found = [(version, path) for version, path in map(_asked, _candidates()) if version >= at_least]
    return max(found, default=(None, None))[1]


def _candidates() -> Iterator[str]:
    for minor in range(_NEWEST_MINOR, 11, -1):
        if (path := shutil.which(f"python3.{minor}")) is not None:
            yield path
    if (pyenv := shutil.which("pyenv")) is not None:  # its python3.13 works only where that version is chosen
        for version in _said(pyenv, "versions", "--bare").split():
            if prefix := _said(pyenv, "prefix", version):
                yield f"{prefix}/bin/python"


def _asked(path: str) -> tuple[Version, str]:
    """Version and path as this Python tells them; (0, 0): it does not run."""
    words = _said(path, "-c", _ASK).split(maxsplit=2)
    return ((int(words[0]), int(words[1])), words[2]) if len(words) == 3 else ((0, 0), "")


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
