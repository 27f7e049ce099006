"""The operator's desk on each store, and the command line on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.desk import Desk, Run, runner


@pytest.fixture(params=["sqlite", "postgres"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    """A store without keys, of each kind."""
    file = f"sqlite:///{tmp_path / 'keys.db'}"
    desk = Desk(file if request.param == "sqlite" else request.getfixturevalue("ready_url"))
    yield desk
    desk.close()


@pytest.fixture
def operate(desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(desk.url, monkeypatch, capsys)
