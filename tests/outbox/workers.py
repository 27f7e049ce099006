"""A worker to test with, over a real outbox and in the process of the test, and a way to wait for what it does.

No test sleeps to synchronise: tasks wait for events, and tests wait for rows (``until``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from oncekey.outbox import Worker
from oncekey.outbox.attempts import Counts
from tests.engine.doubles import PATIENCE
from tests.outbox.outbox_table import OutboxTable


async def until(check: Callable[[], Any], what: str = "") -> None:
    """Wait until it is so, with the loop free."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, f"did not happen in time: {what}"
        await asyncio.sleep(0.005)


def make(outbox: OutboxTable, **settings: Any) -> Worker:
    return Worker(outbox.store, **({"poll": 0.01} | settings))


async def drain(worker: Worker) -> Counts:
    return await asyncio.wait_for(worker.serve(until="drained"), PATIENCE)
