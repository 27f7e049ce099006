"""The threads of sync tasks: kept, and not stopped by a task that was given up."""

from __future__ import annotations

import threading

from oncekey.outbox.threads import Threads
from tests.engine.doubles import PATIENCE


def test_a_thread_is_used_again() -> None:
    threads = Threads()
    names = {threads.submit(threading.current_thread).result(PATIENCE).name for _ in range(3)}
    threads.close()
    assert len(names) <= 3
    assert threads._count == len(names)


def test_a_call_that_was_cancelled_before_it_began_is_not_made() -> None:
    """And the thread that comes by goes on to the next."""
    threads = Threads()
    made: list[str] = []
    threads._idle.release()  # as if one were idle, so that none starts yet
    cancelled = threads.submit(made.append, "cancelled")
    assert cancelled.cancel()
    assert threads.submit(made.append, "wanted").result(PATIENCE) is None
    threads.close()
    assert made == ["wanted"]
