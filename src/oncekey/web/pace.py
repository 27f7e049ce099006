"""Sends some 404s of the status endpoint by the clock, so that their time does not tell whether the key exists.

A key of another tenant and a key that was never used are the same look-up. But a key that is bound to another user
(``Policy(bind=…)``), or is of an operation that the caller may not use (``OnceKey(authorize=…)``), is found, read and
only then refused: 20 to 45 µs of work that a key without a row does not take. So with either of them, every 404 that
follows a look-up is sent at a multiple of ``PACE`` seconds after its question.

The last milliseconds are slept in a thread. asyncio's own timers round up to whole milliseconds *from the moment when
the loop waits*, and would hand on the very difference that is to be hidden.
"""

from __future__ import annotations

import asyncio
import time
from math import ceil

from oncekey.engine.once import OnceKey

PACE = 0.02
"""Longer than nearly every look-up: what takes longer waits for the next multiple."""
_IN_THREAD = 0.003


def applies(once: OnceKey) -> bool:
    """Whether a row can be found and then refused."""
    return once.authorize is not None or bool(once.bind_secrets)


def seconds_left(begun: float) -> float:
    """From now to the next multiple of PACE after ``begun`` (of ``time.perf_counter``)."""
    took = time.perf_counter() - begun
    return ceil(took / PACE) * PACE - took


async def pause(begun: float) -> None:
    left = seconds_left(begun)
    ends = time.perf_counter() + left
    if left > _IN_THREAD:
        await asyncio.sleep(left - _IN_THREAD)
    await asyncio.to_thread(_sleep_until, ends)


def pause_blocking(begun: float) -> None:
    time.sleep(seconds_left(begun))


def _sleep_until(ends: float) -> None:
    time.sleep(max(0.0, ends - time.perf_counter()))
