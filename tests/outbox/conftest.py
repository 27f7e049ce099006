"""The outbox on each store, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outbox.boxes import Box


@pytest.fixture(params=["sqlite", "postgres"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    """An empty outbox on each store."""
    file = f"sqlite:///{tmp_path / 'keys.db'}"
    box = Box(file if request.param == "sqlite" else request.getfixturevalue("ready_url"))
    yield box
    box.close()
