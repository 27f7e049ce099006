"""The temporary folder of a server. The server's user can reach it, and a later run removes it if this run does not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO, Final

from oncekey.testing.servers.processes import ServerUnavailable

_STALE_SECONDS: Final = 600.0


def open_to_others(path: Path) -> bool:
    """Whether an unprivileged user can reach this path: all users may enter every folder above it."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def temporary_root() -> Path:
    """A temporary folder that an unprivileged user can reach, whatever TMPDIR is set to."""
    for candidate in (tempfile.gettempdir(), "/tmp", "/var/tmp"):  # noqa: S108 - a private folder is made inside
        root = Path(candidate)
        if root.is_dir() and open_to_others(root / "x"):
            return root
    raise ServerUnavailable(f"every user must be able to reach {tempfile.gettempdir()}, or set TMPDIR to such a folder")


class Folder:
    """A temporary folder with a lock file. The lock is held for as long as the process that made it lives."""

    def __init__(self, kind: str, user: pwd.struct_passwd | None) -> None:
        root = temporary_root()
        prefix = f"oncekey-{kind}-"
        self._sweep(root, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._lock: IO[bytes] = (self.path / "lock").open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if user is not None:
            os.chown(self.path, user.pw_uid, user.pw_gid)
        self.path.chmod(0o755)

    @staticmethod
    def _sweep(root: Path, prefix: str) -> None:
        """Remove the folders of runs that were killed: those that are old enough and whose lock is free."""
        for left in root.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid not in {os.getuid(), *server_uids()} or left.is_symlink():
                    continue
                if time.time() - (left / "lock").stat().st_mtime < _STALE_SECONDS:
                    continue
                with (left / "lock").open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def server_uids() -> set[int]:
    user = unprivileged_user() if os.getuid() == 0 else None
    return set() if user is None else {user.pw_uid}


def unprivileged_user() -> pwd.struct_passwd | None:
    """The user to run a database server as, because they refuse to run as root. None: the current user."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerUnavailable(
        "A database server refuses to run as root, and there is no user postgres or nobody to run it as."
    )
