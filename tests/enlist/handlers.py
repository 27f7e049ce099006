"""A handler that enlists and pays, and the marks that run a test with every driver."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from oncekey import current
from tests.enlist.shop import ALL, SYNC, Payer, paid

INSERT = "INSERT INTO payments (key, cents) VALUES ('k-1', 5)"

every_driver = pytest.mark.parametrize("payer", ALL, ids="-".join, indirect=True)
every_sync_driver = pytest.mark.parametrize("payer", SYNC, ids="-".join, indirect=True)


def handler(payer: Payer, then: Any = None, **options: Any) -> Any:
    """Enlists, pays, and ends as the test says."""

    async def pay(request: Request) -> Response:
        op = current()
        thing = await payer.open()
        await op.enlist(thing, **options)
        done = payer.pay(thing, op.key)
        if payer.is_async:
            await done
        if then is not None:
            answer = then(thing)
            return (await answer) if asyncio.iscoroutine(answer) else answer
        return paid(op.key)

    return pay
