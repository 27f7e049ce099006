"""Threads for sync tasks, at most one for each job that may run at once.

They are daemons, because a task that hangs must not keep the process alive (``ThreadPoolExecutor`` joins its threads at
exit). Idle threads are kept, because apps keep connections in thread-locals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Threads:
    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run the function at once, in an idle thread or a new one. The caller limits how many run."""
        future: Future[Any] = Future()
        self._calls.put((future, function, arguments))
        if not self._idle.acquire(blocking=False):
            self._count += 1
            threading.Thread(target=self._run, name=f"oncekey-task-{self._count}", daemon=True).start()
        return future

    def close(self) -> None:
        """End idle threads now, and the others after their task. Nothing can be submitted after this."""
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            del call
            if future.set_running_or_notify_cancel():  # else it was cancelled; now it cannot be cancelled any more
                try:
                    result = function(*arguments)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del future, function, arguments
            self._idle.release()
