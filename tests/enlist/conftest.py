"""One shop per test, on each kind of database, and a payer for each driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.enlist.shop import POSTGRES, SQLITE, Payer, Shop, sqlite_url

if TYPE_CHECKING:
    from tests.enlist.django_site import Site


@pytest.fixture
def postgres_shop(ready_url: str) -> Shop:
    return Shop(ready_url)


@pytest.fixture
def sqlite_shop(tmp_path: Path) -> Shop:
    return Shop(sqlite_url(tmp_path))


@pytest.fixture
def mysql_shop(ready_mysql: str) -> Shop:
    from tests.enlist.mysql_shop import MysqlShop

    shop = MysqlShop(ready_mysql)
    shop.ask("DELETE FROM payments")
    return shop


def make_shop(kind: str, request: pytest.FixtureRequest) -> Shop:
    if kind.startswith("mysql"):
        driver = kind.partition("-")[2]
        if driver == "mysqlclient":
            pytest.importorskip(
                "MySQLdb", reason="no mysqlclient for this Python: run `make mysqlclient`", exc_type=ImportError
            )
        of_mysql: Any = request.getfixturevalue("mysql_shop")
        of_mysql.driver = driver
        return of_mysql
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


@pytest.fixture(params=["atomic-requests", "own-blocks"])
def atomic_requests(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "atomic-requests")


@pytest.fixture(params=["wsgi", pytest.param("asgi", marks=pytest.mark.frameworks)])
def make(shop: Shop, request: pytest.FixtureRequest, atomic_requests: bool) -> Iterator[Callable[..., Site]]:
    """Makes Django projects: ``make(view)``."""
    from tests.enlist.django_site import make_site

    made: list[Site] = []

    def make(view: Callable[[Site, Any], Any], **options: Any) -> Site:
        made.append(make_site(shop, view, asgi=request.param == "asgi", atomic_requests=atomic_requests, **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


pytest.register_assert_rewrite("tests.enlist.refusals")
