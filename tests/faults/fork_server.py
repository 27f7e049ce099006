"""App processes that are up at once: forked from one that has everything imported, and killed, paused or stopped.

``ForkServer`` forks its nursery when it is entered, so enter it before any event loop or thread exists; from then on it
may be used from wherever. Each app process serves real HTTP by uvicorn on one socket, which we hold open: clients wait
for the next process instead of being refused. ::

    with ForkServer(make_app) as forks:            # make_app(**options) -> an ASGI app, called in the new process
        server = forks.start(url=..., lease=0.5)
        ...                                 # clients talk to forks.url
        server.kill()                       # and pause(), resume(), stop()

An option ``fault`` ("effect.call:after:kill", see ``oncekey.testing.faults``; several with commas between them) is
installed before the app is made. Other work than an app's goes into ``roles``: functions that run in a process of their
own until they end or are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import uvicorn

from oncekey.testing import faults

_PR_SET_PDEATHSIG = 1
_PATIENCE = 30.0
_BACKLOG = 1024
_MESSAGE = 64 * 1024

for _point in faults.POINTS:
    faults.places_of(_point)  # imports every driver, once


class Process:
    """One forked process, known by a handle that no other process can come to have."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:  # a role with little to do has ended already
            self._handle = -1

    @property
    def alive(self) -> bool:
        return not self._ended(0.0)

    @property
    def paused(self) -> bool:
        """By SIGSTOP, its own or ours: all of its threads stand still."""
        tasks = Path(f"/proc/{self.pid}/task")
        try:
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir())
        except FileNotFoundError:
            return False  # a thread has ended, so it runs

    def kill(self) -> None:
        """kill -9, and return when it is gone."""
        self.send(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """As a deploy does it: SIGTERM, and what is in flight is finished."""
        self.send(signal.SIGTERM)
        self.wait()

    def pause(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def wait(self, seconds: float = _PATIENCE) -> None:
        if not self._ended(seconds):
            raise TimeoutError(f"process {self.pid} did not end within {seconds:g} s")

    def _ended(self, seconds: float) -> bool:
        if self._handle < 0:
            return True
        waiting = select.poll()
        waiting.register(self._handle, select.POLLIN)
        if not waiting.poll(seconds * 1_000):
            return False
        os.close(self._handle)  # a campaign has thousands of them
        self._handle = -1
        return True


class ForkServer:
    """See the module's docstring. ``log``: where processes write what goes wrong in them."""

    def __init__(
        self,
        make_app: Callable[..., Any] | None = None,
        roles: Mapping[str, Callable[..., None]] | None = None,
        *,
        log: Path | None = None,
    ) -> None:
        self._make_app = make_app
        self._roles = {"app": self._serve, **(roles or {})}
        self._log = log
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: list[Process] = []
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._nursery = 0

    def __enter__(self) -> Self:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._nursery = _fork()
        if self._nursery == 0:
            self._line.close()
            _run(lambda: self._raise_children(theirs))
        theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
        assert self._line is not None
        self._line.close()  # the nursery takes it as its end, and its children go with it
        os.waitpid(self._nursery, 0)
        self.listener.close()

    def start(self, **options: Any) -> Process:
        """A new app process. Requests may be sent at once: they wait until it serves."""
        return self.spawn("app", **options)

    def spawn(self, role: str, **options: Any) -> Process:
        """A new process of one of the roles. Its options must be JSON."""
        assert self._line is not None, "use it as a with block"
        with self._lock:
            self._line.send(json.dumps([role, options]).encode())
            process = Process(int(self._line.recv(_MESSAGE)))
        self.processes = [each for each in self.processes if each.alive]
        self.processes.append(process)
        return process

    # in the nursery, and in its children

    def _raise_children(self, line: socket.socket) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the campaign that tells
        if self._log is not None:
            file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
        uvicorn.Config(_no_app).load()  # its protocols, imported here and not in each child
        gc.collect()
        gc.freeze()  # so that no child's collector goes through all that it has inherited
        while told := line.recv(_MESSAGE):
            role, options = json.loads(told)
            pid = _fork()
            if pid == 0:
                line.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run(lambda: self._roles[role](**options))  # noqa: B023 - run at once
            line.send(str(pid).encode())

    def _serve(self, *, fault: str = "", **options: Any) -> None:
        assert self._make_app is not None, "there is no app: only roles"
        for each in fault.split(","):
            faults.install_from_environment({faults.VARIABLE: each})
        config = uvicorn.Config(
            self._make_app(**options), log_level="critical", access_log=False, timeout_graceful_shutdown=10
        )
        asyncio.run(uvicorn.Server(config).serve(sockets=[self.listener]))


async def _no_app(*_: object) -> None:
    """For uvicorn to get ready with."""


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; under pytest there may be one that waits
        pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphans, however the parent ends
        if os.getppid() != parent:
            os._exit(1)
    return pid


def _run(work: Callable[[], None]) -> NoReturn:
    """Leave through ``os._exit``: no code of the parent runs twice."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit:
        code = 0
    except BaseException:  # it is said in the log
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
