"""Tasks for the workers of RQ, which import them by name in a process of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from oncekey import SINGLE_TENANT, OnceKey, current

once = OnceKey(os.environ["ONCEKEY_STORE"], scope=SINGLE_TENANT)
LEDGER = Path(os.environ["LEDGER"])


def _note(line: str) -> int:
    with LEDGER.open("a") as ledger:
        ledger.write(f"{line}\n")
    return len(LEDGER.read_text().splitlines())


@once.function("charge", key="order")
def charge(order: str, cents: int) -> dict[str, Any]:
    return {"number": _note(order)}


@once.function("stumble", key="order", effects="repeatable")
def stumble(order: str) -> int:
    _note(order)
    if current().attempt < 3:
        raise TimeoutError
    return current().attempt


@once.function("die", key="order")
def die(order: str) -> None:
    """The work-horse dies in the middle, as by the out-of-memory killer."""
    _note(order)
    os._exit(9)
