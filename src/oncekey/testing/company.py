"""Threads and processes for a test: threads that begin together, and forked processes that answer or die.

Children end with ``os._exit``: it is quick, and no code of the test runner runs twice. No test needs to sleep: it waits
for a :class:`Signal`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from oncekey.stores.api import Store

_PATIENCE = 30.0


class Signal:
    """One process gives it, and another waits for it. Make it before the fork."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def give(self) -> None:
        os.write(self._write, b"!")

    def wait(self) -> None:
        ready, _, _ = select.select([self._read], [], [], _PATIENCE)
        if not ready:
            raise TimeoutError("the other process gave no signal")
        os.read(self._read, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read)
        os.close(self._write)


class Child:
    """A forked process that runs ``work`` and sends its result, which must be JSON, to the parent."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork in a process with threads. Servers fork that way, so it must work.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._read)
            self._run(work, write)
        os.close(write)

    @staticmethod
    def _run(work: Callable[[], Any], write: int) -> None:
        answer = {}
        try:
            answer["result"] = work()
        except BaseException:  # noqa: BLE001 - the parent reports it
            answer["error"] = traceback.format_exc()
        finally:
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)

    def end(self) -> int:
        """Wait for the end without reading the child's result. Return the wait status."""
        os.close(self._read)
        return os.waitpid(self.pid, 0)[1]

    def result(self) -> Any:
        with os.fdopen(self._read) as pipe:
            text = pipe.read()
        status = os.waitpid(self.pid, 0)[1]
        assert text, f"the child ended with status {status} and said nothing"
        answer = json.loads(text)
        assert "error" not in answer, f"in the child: {answer['error']}"
        return answer["result"]

    def killed(self) -> bool:
        """Wait for the end. Return whether SIGKILL ended the child."""
        status = self.end()
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def in_threads(store: Store, work: Callable[[int], Any], count: int) -> list[Any]:
    """Run ``work`` in ``count`` threads that begin at the same moment, and return their results."""
    begin = threading.Barrier(count)

    def run(number: int) -> Any:
        begin.wait(_PATIENCE)
        try:
            return work(number)
        finally:
            store.disconnect()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
