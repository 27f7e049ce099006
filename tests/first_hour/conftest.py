"""The first hour starts a server for nearly every test: `make frameworks` runs it, `make test` only its quick start."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
IN_MAKE_TEST = "test_quick_start_charges_once"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.name != IN_MAKE_TEST:
            item.add_marker(pytest.mark.frameworks)
