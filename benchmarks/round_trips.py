"""The yardstick for one request: two raw round trips with commit, on one psycopg connection.

The same two statements as pgbench's, a reservation and its completion, each committed by itself, from a blocking
connection with prepared statements: what a protected request cannot do without.
"""

from __future__ import annotations

import statistics
import time
import uuid

import psycopg

from benchmarks.pgbench import COMPLETE, RESERVE

Pair = tuple[float, float]


def run(url: str, seconds: float) -> Pair:
    """Pairs per second, and the median of a pair in milliseconds, after a short warm-up."""
    reserve, complete = (statement.format(key="%(key)s", owner="%(owner)s") for statement in (RESERVE, COMPLETE))
    took: list[float] = []
    with psycopg.connect(url, autocommit=True) as connection:
        warm = time.perf_counter() + min(0.5, seconds / 4)
        end = warm + seconds
        while (began := time.perf_counter()) < end:
            row = {"key": str(uuid.uuid4()), "owner": uuid.uuid4().hex}
            reserved = connection.execute(reserve, row).rowcount
            completed = connection.execute(complete, row).rowcount
            if (reserved, completed) != (1, 1):
                raise RuntimeError("a pair did not write its row: the number would mean nothing")
            if began >= warm:
                took.append(time.perf_counter() - began)
    return len(took) / sum(took), statistics.median(took) * 1000
