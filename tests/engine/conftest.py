"""An API with phased requests, lanes that are closed at the end, and a keeper that looks when it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from oncekey.engine import keeper as keeper_module
from oncekey.engine.batching.router import Router
from oncekey.engine.keeper import Keeper
from tests.engine.doubles import Clock, FakeStore
from tests.engine.kept_operations import Kept
from tests.engine.lanes import Open
from tests.engine.phased_api import PhasedApi
from tests.enlist.shop import Shop, sqlite_url


@pytest.fixture
async def postgres_desk(ready_url: str) -> AsyncIterator[PhasedApi]:
    phased = PhasedApi(Shop(ready_url))
    yield phased
    await phased.close()


@pytest.fixture
async def sqlite_desk(tmp_path: Path) -> AsyncIterator[PhasedApi]:
    phased = PhasedApi(Shop(sqlite_url(tmp_path)))
    yield phased
    await phased.close()


@pytest.fixture(params=["sqlite_desk", "postgres_desk"])
def phased(request: pytest.FixtureRequest) -> PhasedApi:
    phased: PhasedApi = request.getfixturevalue(request.param)
    return phased


@pytest.fixture
def open_lanes() -> Iterator[Open]:
    """Makes Lanes that are closed when the test is over."""
    opened: list[Router] = []

    def make(store: FakeStore, **options: object) -> Router:
        opened.append(Router(store, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for router in opened:
        router.close(0.2)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Looks only when it is told to, on a clock that stands still."""
    clock = Clock()
    monkeypatch.setattr(keeper_module, "time", clock)
    monkeypatch.setattr(Keeper, "_look_within", lambda self, seconds: None)
    kept = Kept(clock)
    yield kept
    kept.keeper._unfinished.clear()
    kept.engine.close(1.0)
