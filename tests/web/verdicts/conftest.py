"""One database for all cases, and runners that are closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.enlist.shop import Shop
from tests.web.verdicts.case_runner import CaseRunner, MakeBench


@pytest.fixture(scope="module")
def sqlite_shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """One database for all cases; each has a key of its own."""
    folder: Path = tmp_path_factory.mktemp("verdicts")
    return Shop(f"sqlite:///{folder / 'shop.db'}")


@pytest.fixture
async def make_runner() -> AsyncIterator[MakeBench]:
    made: list[CaseRunner] = []

    def make(*args: Any, **options: Any) -> CaseRunner:
        made.append(CaseRunner(*args, **options))
        return made[-1]

    yield make
    for runner in made:
        await runner.close()
