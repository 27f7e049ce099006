"""A OnceKey on SQLite and on PostgreSQL, for the tests of what is built on the engine without HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oncekey import SINGLE_TENANT, OnceKey


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    ready: str = request.getfixturevalue("ready_url")
    return ready


@pytest.fixture
def once(url: str) -> Iterator[OnceKey]:
    made = OnceKey(url, scope=SINGLE_TENANT)
    yield made
    made.close()
