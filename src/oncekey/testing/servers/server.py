"""What every server has in common, and what fault tests do to it: start, pause, kill, restart, stop."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from oncekey.testing.servers.folders import Folder
from oncekey.testing.servers.processes import (
    ServerFailed,
    children,
    die_with_parent,
    free_port,
    pause_all,
    send_signal,
    wait_until,
)

_START_SECONDS: Final = 30.0


class Server(ABC):
    """One process tree in one folder: started, paused, killed, restarted and stopped by process id."""

    kind: str
    _stop_signal: signal.Signals  # the quickest end that still cleans up
    _start_seconds: float = _START_SECONDS

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Folder | None = None
        self._user: pwd.struct_passwd | None = None

    # -- for the subclasses

    @abstractmethod
    def _prepare(self) -> None:
        """Find the binaries and lay out the folder, once."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool: ...

    @property
    @abstractmethod
    def url(self) -> str:
        """Where a driver connects."""

    # -- start

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the running server (PostgreSQL: the postmaster)."""
        if self._process is None:
            raise ServerFailed(f"{self.kind} is not running: start() it first")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, or start again after :meth:`kill`, and return when it answers."""
        if self.running:
            return
        try:
            if self._folder is None:
                self._prepare()
            self._launch()
        except BaseException:
            self.stop()
            raise

    def _launch(self) -> None:
        fixed = self.port != 0
        for attempt in range(5):
            if not fixed:
                self.port = free_port()
            self._process = self._spawn(self._command())
            if wait_until(lambda: not self.running or self._answers(), self._start_seconds) and self.running:
                return
            self._kill_tree()
            if fixed or attempt == 4 or "ddress already in use" not in self._last_words():
                break
        raise ServerFailed(f"{self.kind} did not start on port {self.port}; the end of its log: {self._last_words()}")

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._home / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self._home,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal must not reach the server
                preexec_fn=die_with_parent(self._stop_signal),  # noqa: PLW1509 - one system call, looked up before
                user=None if self._user is None else self._user.pw_uid,
                group=None if self._user is None else self._user.pw_gid,
                extra_groups=None if self._user is None else [],
            )

    def _run_to_end(
        self, command: list[str], *, cwd: Path, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program that makes the server's files, as the user that the server will have."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            start_new_session=True,
            user=None if self._user is None else self._user.pw_uid,
            group=None if self._user is None else self._user.pw_gid,
            extra_groups=None if self._user is None else [],
        )

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        return kept | {"LC_ALL": "C", "TZ": "UTC", "HOME": str(self._home)}

    @property
    def _home(self) -> Path:
        if self._folder is None:
            raise ServerFailed(f"{self.kind} was never started, or is stopped: start() it")
        return self._folder.path

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return " / ".join((self._home / "log").read_text(errors="replace").splitlines()[-5:]) or "none"
        return "none"

    # -- faults

    def _tree(self) -> list[int]:
        """The server and its children. The server is paused first, so that it starts no new ones."""
        pause_all([self.pid])
        return [self.pid, *children(self.pid)]

    def pause(self) -> None:
        """Pause every process (SIGSTOP): connections stay open, and no process answers."""
        pause_all(self._tree())

    def resume(self) -> None:
        """Let a paused server run again."""
        if self.running:
            for pid in reversed([self.pid, *children(self.pid)]):
                send_signal(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process at once. :meth:`start` starts the server again with its data."""
        self._kill_tree()

    def restart(self, mode: Literal["immediate", "clean"] = "immediate") -> None:
        """Stop, and start again on the same port. ``immediate`` aborts open transactions, and the start recovers."""
        self.resume()
        self._end(self._stop_signal if mode == "immediate" else self._clean_signal)
        self.start()

    @property
    def _clean_signal(self) -> signal.Signals:
        return self._stop_signal

    def stop(self) -> None:
        """End the server and remove its folder. Safe to call twice, and on a server that never started."""
        self.resume()
        self._end(self._stop_signal)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
            self.port = 0

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        send_signal(self.pid, number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._kill_tree()
        self._process = None

    def _kill_tree(self) -> None:
        if self._process is None:
            return
        if self.running:
            for pid in self._tree():
                send_signal(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
