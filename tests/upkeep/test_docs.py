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

from oncekey import Confirmed
from oncekey.core.states import State
from oncekey.upkeep import Reconciler
from oncekey.web.asgi import IdempotencyMiddleware
from tests.upkeep.places import LEASE, Place

DOCS = Path(__file__).parent.parent.parent / "docs"


class Event(BaseModel):
    charge: str


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
def place() -> Iterator[Place]:
    made = Place("memory://")
    yield made
    made.close()


def test_the_resolver(place: Place) -> None:
    records = place.unknown(4)
    place.age(LEASE + 301)
    once = place.once()
    charges = [None, *(SimpleNamespace(id="ch_1", status=status) for status in ("pending", "declined", "paid"))]

    class Provider:
        async def find(self, idempotency_key: str) -> Any:
            assert idempotency_key.startswith("oncekey-")
            return charges.pop(0)

    run("reconciliation.md", "@once.resolver", once=once, provider=Provider())
    reconciler = Reconciler(once, concurrency=1)
    reconciler.run()
    reconciler.close()
    found = [place.get(record) for record in records]
    assert [each.state for each in found] == [
        *(State.FAILED_RETRYABLE, State.UNKNOWN, State.COMPLETED, State.COMPLETED)
    ]
    assert [each.response.status for each in found if each.response] == [402, 201]


async def test_the_webhook(place: Place) -> None:
    (record,) = place.reserved()
    record = place.step(record, "charge", "down-1", "ch_1")
    once = place.once()
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
        Confirmed=Confirmed,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:

        async def deliver() -> int:
            return (await client.post("/webhooks/provider", json={"charge": "ch_1"})).status_code

        assert await deliver() == 503, "its owner is still at work"
        place.age(LEASE + 1)
        assert [await deliver(), await deliver()] == [200, 200]
    assert place.get(record).state is State.COMPLETED
    assert place.audit(record) == [("provider webhook", "unknown", "completed")]
    await once.aclose()


def test_running_it_in_code(place: Place) -> None:
    run("upkeep.md", "with Upkeep(", once=place.once())
