"""The demo's processes: a parent that starts them, starts them again when they are killed, and takes them along.

A child holds the reading end of a pipe whose writing end only the parent has. When the parent is gone, however it went,
the pipe says so, and the child ends: no orphans, also after ``kill -9``, on every system with pipes.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

STOP_SECONDS = 10.0
_LIFELINE = "ONCEKEY_DEMO_LIFELINE"


class Member:
    """One kind of child: what it is called, what it runs, and which sockets of the parent it takes over."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> None:
        self.name = name
        self.command = [sys.executable, "-m", module, *arguments]
        self.fds = fds
        self.process: subprocess.Popen[bytes]


class Family:
    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._events: queue.SimpleQueue[Member | None] = queue.SimpleQueue()  # None: stop
        self._read_end, self._write_end = os.pipe()

    def run(self) -> int:
        """Until a signal, or until a child ends by itself, which is no good sign: its exit code is ours."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._events.put(None))
        for member in self._members:
            self._start(member)
        code = 0
        while (ended := self._events.get()) is not None:
            code = ended.process.returncode
            if code >= 0:
                break  # a wrong store, say, and it has said so
            print(f"the {ended.name} was killed (signal {-code}); starting it again", flush=True)
            self._start(ended)
        self._stop()
        return max(0, code)

    def _start(self, member: Member) -> None:
        member.process = subprocess.Popen(
            member.command,
            stdin=subprocess.DEVNULL,
            pass_fds=[self._read_end, *member.fds],
            env=os.environ | {_LIFELINE: str(self._read_end)},
        )
        print(f"the {member.name} is process {member.process.pid}", flush=True)
        threading.Thread(target=self._wait, args=[member, member.process], daemon=True).start()

    def _wait(self, member: Member, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._events.put(member)

    def _stop(self) -> None:
        """The last one first: what is under way may still need those that were there before it."""
        for member in reversed(self._members):
            member.process.terminate()
            try:
                member.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()


def follow_parent() -> None:
    """Called by a child: end when the parent does."""
    lifeline = os.environ.get(_LIFELINE)
    if lifeline is not None:
        threading.Thread(target=_follow, args=[int(lifeline)], daemon=True).start()


def _follow(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass  # nobody writes: it returns when nobody can any more
    os._exit(1)
