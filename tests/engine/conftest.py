"""A desk for phased requests, on each SQL store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.desk import Desk
from tests.enlist.shop import Shop, sqlite_url


@pytest.fixture
async def postgres_desk(ready_url: str) -> AsyncIterator[Desk]:
    desk = Desk(Shop(ready_url))
    yield desk
    await desk.close()


@pytest.fixture
async def sqlite_desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(Shop(sqlite_url(tmp_path)))
    yield desk
    await desk.close()


@pytest.fixture(params=["sqlite_desk", "postgres_desk"])
def desk(request: pytest.FixtureRequest) -> Desk:
    desk: Desk = request.getfixturevalue(request.param)
    return desk
