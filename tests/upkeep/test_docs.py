"""What docs/reconciliation.md and docs/upkeep.md show is what happens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from pydantic import BaseModel

from oncekey import Confirmed, Happened
from oncekey.core.states import Event as Move
from oncekey.core.states import State
from oncekey.upkeep import Reconciler
from oncekey.web.asgi import IdempotencyMiddleware
from tests.upkeep.key_store import LEASE, KeyStore

DOCS = Path(__file__).parent.parent.parent / "docs"


class Event(BaseModel):
    charge: str
    idempotency_key: str


def run(page: str, part: str, **names: Any) -> dict[str, Any]:
    """Execute the one block of Python of a page that has this in it."""
    (source,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
        if part in block
    ]
    exec(compile(source, page, "exec"), names)
    return names


@pytest.fixture
def rows() -> Iterator[KeyStore]:
    made = KeyStore("memory://")
    yield made
    made.close()


def test_resolver_of_the_page_settles_keys(rows: KeyStore) -> None:
    records = rows.unknown(4)
    rows.age(LEASE + 301)
    once = rows.once()
    charges = [None, *(SimpleNamespace(id="ch_1", status=status) for status in ("pending", "declined", "paid"))]

    class Provider:
        async def find(self, idempotency_key: str) -> Any:
            assert idempotency_key.startswith("oncekey-")
            return charges.pop(0)

    run("reconciliation.md", 'resolver("POST /payments")', once=once, provider=Provider())
    reconciler = Reconciler(once, concurrency=1)
    reconciler.run()
    reconciler.close()
    found = [rows.get(record) for record in records]
    assert [each.state for each in found] == [
        *(State.FAILED_RETRYABLE, State.UNKNOWN, State.COMPLETED, State.COMPLETED)
    ]
    assert [each.response.status for each in found if each.response] == [402, 201]


def test_resolver_of_the_page_settles_an_effect_in_doubt(rows: KeyStore) -> None:
    records = [
        rows.step(record, "charge", f"down-{n}", None)
        for n, record in enumerate(rows.reserved(3, operation="POST /rides"))
    ]
    rows.moved(records, Move.DOUBT)
    rows.age(301)
    once = rows.once()
    charges = [None, *(SimpleNamespace(id="ch_1", status=status) for status in ("declined", "paid"))]

    class Provider:
        async def find(self, idempotency_key: str) -> Any:
            return charges.pop(0)

    run("reconciliation.md", 'resolver("POST /rides")', once=once, provider=Provider(), Confirmed=Confirmed)
    reconciler = Reconciler(once, concurrency=1)
    done = reconciler.run()
    reconciler.close()
    assert (done.not_happened, done.confirmed, done.happened) == (1, 1, 1)
    assert rows.states(records) == [State.FAILED_RETRYABLE, State.COMPLETED, State.FAILED_RETRYABLE]


async def test_webhook_of_the_page_settles_keys(rows: KeyStore) -> None:
    (record,) = rows.reserved()
    record = rows.step(record, "charge", "down-1", "ch_1")
    once = rows.once()
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, once=once)
    once.routes = type(once.routes)(once.default_policy, {"POST /webhooks/provider": None})
    run(
        "reconciliation.md",
        "/webhooks/provider",
        app=app,
        once=once,
        Event=Event,
        Response=Response,
        Happened=Happened,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:

        async def deliver() -> int:
            return (
                await client.post("/webhooks/provider", json={"charge": "ch_7", "idempotency_key": "down-1"})
            ).status_code

        assert await deliver() == 503, "its owner is still at work"
        rows.age(LEASE + 1)
        assert [await deliver(), await deliver()] == [200, 200]
    assert rows.get(record).state is State.FAILED_RETRYABLE, "the next attempt goes on after the effect"
    assert rows.audit(record) == [("provider webhook", "unknown", "failed_retryable")]
    await once.aclose()


def test_code_of_the_page_runs_upkeep(rows: KeyStore) -> None:
    run("upkeep.md", "with Upkeep(", once=rows.once())
