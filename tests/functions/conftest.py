"""A OnceKey on each store that functions are tested with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from tests.each_store import once, url

__all__ = ["once", "url"]


class Provider:
    """Counts what was really done."""

    def __init__(self) -> None:
        self.charged: list[Any] = []

    def charge(self, order: Any, amount: int = 1) -> dict[str, Any]:
        self.charged.append(order)
        return {"order": order, "number": len(self.charged)}


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def memory() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made
