"""An enlisted commit is as durable as oncekey's own: what was answered is on the disk."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from starlette.responses import Response

from tests import databases
from tests.enlist.handlers import handler
from tests.enlist.shop import POSTGRES, Shop, paid

# off loses commits; each of the others is the operator's choice.
SETTINGS = {"off": "on", "local": "local", "remote_write": "remote_write", "on": "on", "remote_apply": "remote_apply"}


@pytest.fixture(params=SETTINGS)
def shop_and_setting(request: pytest.FixtureRequest, postgres_url: str) -> tuple[Shop, str]:
    shop = Shop(postgres_url)
    with databases.beside(postgres_url) as server:
        name = server.info.dbname
    shop.ask(f'ALTER DATABASE "{name}" SET synchronous_commit = {request.param}')
    return shop, SETTINGS[request.param]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "sa-session"])
async def test_synchronous_commit_off_is_on_in_the_enlisted_transaction(
    shop_and_setting: tuple[Shop, str], driver: str
) -> None:
    shop, expected = shop_and_setting
    payer = POSTGRES[driver](shop)
    seen: list[str] = []

    async def ask(thing: Any) -> Response:
        sql: Any = "SELECT current_setting('synchronous_commit')"
        if driver == "asyncpg":
            seen.append(await thing.fetchval(sql))
        else:
            seen.append(thing.execute(sa.text(sql) if driver == "sa-session" else sql).fetchone()[0])
        return paid("k-1")

    api = shop.api(handler(payer, ask))
    assert (await api.post()).status_code == 201
    assert seen == [expected]
    await payer.close()
    await api.close()
