"""A small payments API in FastAPI, and what its tests ask of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.record import Record
from oncekey.web.fastapi import protect

GOOD = {"amount": 10}
BAD = {"amount": "ten"}


class Payment(BaseModel):
    amount: int


class Pay:
    """An endpoint that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, payment: Payment) -> dict[str, int]:
        self.calls += 1
        return {"paid": payment.amount, "calls": self.calls}


@pytest.fixture(params=["memory", "sqlite"])
def once(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnceKey]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/keys.db"
    with OnceKey(url, scope=SINGLE_TENANT) as made:
        yield made


@pytest.fixture
def pay() -> Pay:
    return Pay()


@pytest.fixture
def app(once: OnceKey, pay: Pay) -> FastAPI:
    app = FastAPI()
    app.post("/payments", status_code=201)(pay.__call__)
    protect(app, once)
    return app


def fresh() -> str:
    return str(uuid.uuid4())


async def post(app: Any, path: str, key: str, **request: Any) -> httpx.Response:
    if "content" not in request:
        request.setdefault("json", GOOD)
    headers = {"Idempotency-Key": key, **request.pop("headers", {})}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(request.pop("method", "POST"), path, headers=headers, **request)


def row(once: OnceKey, key: str) -> Record | None:
    return once.store.read([("single-tenant", key)])[0]


def state(once: OnceKey, key: str) -> str | None:
    found = row(once, key)
    return None if found is None else str(found.state)


async def assert_spared(app: Any, once: OnceKey, path: str = "/payments", status: int = 422, **bad: Any) -> None:
    """The bad request leaves no row, and the same key then takes a good one."""
    key = fresh()
    refused = await post(app, path, key, **(bad or {"json": BAD}))
    assert refused.status_code == status, refused.text
    assert row(once, key) is None
    accepted = await post(app, path, key)
    assert accepted.status_code == 201, accepted.text
    assert state(once, key) == "completed"
