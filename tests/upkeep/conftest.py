"""Upkeep on each store, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upkeep.key_store import KeyStore


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyStore]:
    """An empty store of each kind in turn."""
    urls = {"memory": lambda: "memory://", "sqlite": lambda: f"sqlite:///{tmp_path / 'keys.db'}"}
    make = urls.get(request.param, lambda: request.getfixturevalue("ready_url"))
    made = KeyStore(make())
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyStore]:
    """As ``rows``, where there is an outbox."""
    made = KeyStore(
        f"sqlite:///{tmp_path / 'keys.db'}" if request.param == "sqlite" else request.getfixturevalue("ready_url")
    )
    yield made
    made.close()
