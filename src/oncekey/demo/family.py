"""The demo's processes: a parent that starts its children, restarts a child that was killed, and stops them at its end.

A child holds the reading end of a pipe, and only the parent has the writing end. When the parent ends for any reason,
also by ``kill -9``, the child reads the end of the pipe and ends too. So no child outlives its parent.
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
    """One kind of child: its name, its command, and the parent's sockets that it inherits."""

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
        """Run until a signal, or until a child ends by itself, which is an error: return its exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._events.put(None))
        for member in self._members:
            self._start(member)
        code = 0
        while (ended := self._events.get()) is not None:
            code = ended.process.returncode
            if code >= 0:
                break  # for example a wrong store; the child has printed the reason
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
        """Stop the last child first: its running work may still need the children that started before it."""
        for member in reversed(self._members):
            member.process.terminate()
            try:
                member.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()


def follow_parent() -> None:
    """A child calls this, so that it ends when the parent ends."""
    lifeline = os.environ.get(_LIFELINE)
    if lifeline is not None:
        threading.Thread(target=_follow, args=[int(lifeline)], daemon=True).start()


def _follow(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass  # the parent never writes: read() returns when the parent's end of the pipe is closed
    os._exit(1)
