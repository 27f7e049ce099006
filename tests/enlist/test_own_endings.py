"""A handler that ends its own transaction, in every way and with every driver: never "not executed" with rows."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import Response

from oncekey import current
from tests.enlist.own_endings import WAYS, Ending, check, handler_of
from tests.enlist.shop import ALL, Payer

pytestmark = pytest.mark.stores

SENDS = 3
SHORT: tuple[tuple[Ending, bool], ...] = (("returns 201", True), ("fails and raises", True), ("raises", False))
"""Of all combinations of an ending and whether the handler swallows errors: the others run in the campaign."""

CORE = (("sqlite", "sqlite3"), ("sqlite", "sa-session"), ("postgresql", "psycopg"), ("postgresql", "sa-async-session"))
"""Run by `make test`; the other drivers by `make stores`."""

CASES = [
    pytest.param(at, name, id="-".join((*at, name)), marks=() if at in CORE else pytest.mark.stores)
    for at in ALL
    for name, way in WAYS.items()
    if not way.beneath or at[1].startswith("sa-")
]


@pytest.mark.parametrize(("payer", "name"), CASES, indirect=["payer"])
async def test_handler_that_ends_its_transaction_never_commits_twice(payer: Payer, name: str) -> None:
    way, shop, wrong = WAYS[name], payer.shop, []
    handlers = {
        ending.replace(" ", "-"): handler_of(payer, way, ending, swallows=swallows) for ending, swallows in SHORT
    }

    async def pay(request: Request) -> Response:
        response: Response = await handlers[current().key](request)
        return response

    api = shop.api(pay)
    for key in handlers:
        told = []
        for _ in range(SENDS):
            told.append((await api.post(key)).status_code)
            await payer.close_opened()
        wrong += [f"{key}: {each}" for each in check(shop, payer, way, key, told)]
    assert not wrong, "\n".join(wrong)
