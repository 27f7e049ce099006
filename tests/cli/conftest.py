"""A table of keys on each store, and the command line on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.key_table import KeyTable, Run, runner


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.stores)])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyTable]:
    """A store without keys, of each kind. The commands read and write through the protocols that the public suite
    tests, so PostgreSQL is left to `make stores`."""
    file = f"sqlite:///{tmp_path / 'keys.db'}"
    table = KeyTable(file if request.param == "sqlite" else request.getfixturevalue("ready_url"))
    yield table
    table.close()


@pytest.fixture
def operate(table: KeyTable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(table.url, monkeypatch, capsys)
