"""A BaseHTTPMiddleware inside of oncekey, around a session that a dependency closes.

Before Starlette 1.7 such a middleware returns from ``send`` before the last message has been sent. FastAPI then ends
the dependency, which closes the session, before oncekey has committed it (docs/compatibility.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.states import State
from oncekey.web.fastapi import CurrentOperation, protect
from tests.enlist.shop import Shop
from tests.web.versions import MIDDLEWARE_WAITS


class PassesOn(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        answer: Response = await call_next(request)
        return answer


@pytest.mark.parametrize("commit", ["engine", "caller"])
async def test_no_201_without_its_row_behind_a_base_http_middleware(shop: Shop, commit: Any) -> None:
    url = shop.url.replace("postgresql:", "postgresql+psycopg:")
    database = sa.create_engine(url, poolclass=NullPool)
    app = FastAPI()
    app.add_middleware(PassesOn)

    async def enlisted(operation: CurrentOperation) -> AsyncIterator[Session]:
        with Session(database) as own:
            await operation.enlist(own, commit=commit)
            yield own
            if commit == "caller":
                own.commit()

    in_session = Depends(enlisted)

    @app.post("/payments", status_code=201)
    async def pay(own: Session = in_session) -> None:
        own.execute(sa.text("INSERT INTO payments (key, cents) VALUES ('k-1', 5)"))

    with OnceKey(shop.url, scope=SINGLE_TENANT, policy=Policy(effects="transactional")) as once:
        protect(app, once)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://shop"
        ) as client:
            sent = [await client.post("/payments", headers={"Idempotency-Key": "k-1"}) for _ in range(3)]
    database.dispose()
    statuses = [answer.status_code for answer in sent]
    if MIDDLEWARE_WAITS:
        assert (statuses, shop.payments(), shop.state()) == ([201] * 3, 1, State.COMPLETED)
    else:
        assert (statuses, shop.payments(), shop.state()) == ([503] * 3, 0, State.FAILED_RETRYABLE)
