"""A town on each SQL store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.pointed import Town


@pytest.fixture(params=["sqlite", "postgres"])
def town(request: pytest.FixtureRequest, tmp_path: Path) -> Town:
    if request.param == "sqlite":
        return Town(f"sqlite:///{tmp_path / 'town.db'}", tmp_path)
    return Town(request.getfixturevalue("postgres_url"), tmp_path)


@pytest.fixture
def postgres_town(postgres_url: str, tmp_path: Path) -> Town:
    return Town(postgres_url, tmp_path)
