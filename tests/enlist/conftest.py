"""One shop per test, on each kind of database, and a payer for each driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.enlist.shop import POSTGRES, SQLITE, Payer, Shop, sqlite_url


@pytest.fixture
def postgres_shop(ready_url: str) -> Shop:
    return Shop(ready_url)


@pytest.fixture
def sqlite_shop(tmp_path: Path) -> Shop:
    return Shop(sqlite_url(tmp_path))


def make_shop(kind: str, request: pytest.FixtureRequest) -> Shop:
    shop: Shop = request.getfixturevalue("sqlite_shop" if kind == "sqlite" else "postgres_shop")
    return shop


@pytest.fixture(params=["sqlite", "postgresql"])
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    shop = make_shop(request.param, request)
    yield shop
    for api in shop.apis:
        await api.close()


@pytest.fixture
async def payer(request: pytest.FixtureRequest) -> AsyncIterator[Payer]:
    """Parametrized by (kind, name); its shop is ``payer.shop``."""
    kind, name = request.param
    shop = make_shop(kind, request)
    payer = (SQLITE if kind == "sqlite" else POSTGRES)[name](shop)
    yield payer
    await payer.close()
    for api in shop.apis:
        await api.close()


@pytest.fixture
def dispose_of_engines() -> Iterator[None]:
    """For modules whose tests make engines by ``refusals.create_engine``."""
    from tests.enlist import refusals

    yield
    refusals.dispose_of_engines()


pytest.register_assert_rewrite("tests.enlist.refusals")
