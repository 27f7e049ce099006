"""The outbox on each store, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.outbox.outbox_table import OutboxTable


@pytest.fixture(params=["sqlite", "postgres"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxTable]:
    """An empty outbox on each store."""
    file = f"sqlite:///{tmp_path / 'keys.db'}"
    outbox = OutboxTable(file if request.param == "sqlite" else request.getfixturevalue("ready_url"))
    yield outbox
    outbox.close()
