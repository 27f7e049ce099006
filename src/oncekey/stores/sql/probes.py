"""Asks a database server what ``oncekey doctor`` asks all of them: schema, tables, clock. ``diagnosis.py`` judges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from oncekey.core.diagnosis import Diagnosis
from oncekey.errors import SchemaError
from oncekey.stores.sql import diagnosis


def diagnose(
    package: str,
    check: Callable[[], None],
    tables: Callable[[], Iterable[Diagnosis]],
    server_clock: Callable[[], float],
) -> list[Diagnosis]:
    """``check`` raises SchemaError if the schema is not as this version wants it. ``tables`` is asked only if it is."""
    trouble = None
    try:
        check()
    except SchemaError as error:
        trouble = str(error)
    found = [diagnosis.schema(package, trouble)]
    if trouble is None:
        found += tables()
    return [*found, _clock(server_clock)]


def _clock(server_clock: Callable[[], float]) -> Diagnosis:
    before = host_clock()
    there = server_clock()
    after = host_clock()
    return diagnosis.clock(there - (before + after) / 2, (after - before) / 2)


def host_clock() -> float:
    return time.time()
