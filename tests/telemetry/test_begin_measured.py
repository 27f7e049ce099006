"""Every question for a key is measured once, whichever way it takes: flat, general, or with limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.telemetry.prometheus import Prometheus, page
from oncekey.testing.http.flaky import FlakyStore
from oncekey.web import fastapi, flask
from tests.telemetry.pages import number
from tests.telemetry.sdk import Sdk, id_of, linked, parent_of, place_of

KEY, OTHER_KEY, PERSONAL = "key-number-1", "key-number-2", "ann.planted@example.com"
OLD = "2020-01-01T00:00:00Z"
LIMITS: dict[str, dict[str, Any]] = {
    "rate": {"policy": Policy(limit="1/hour")},
    "cap": {"max_active_keys": 1},
}


class App:
    """A protected app of FastAPI or Flask. Each request has a span, as by an instrumentation of its server."""

    def __init__(self, protocol: str, **options: Any) -> None:
        self.sdk = Sdk()
        self.registry = CollectorRegistry()
        self.store = FlakyStore()
        self.inside: Callable[[], Awaitable[object]] | None = None
        """What the handler awaits."""
        telemetry = [self.sdk.exporter(), Prometheus(registry=self.registry)]
        self.once = OnceKey(self.store, scope=SINGLE_TENANT, telemetry=telemetry, **options)
        self.http: httpx.AsyncClient | None = None
        if protocol == "asgi":
            served = FastAPI()
            served.post("/pay")(self._pay)
            fastapi.protect(served, self.once, upkeep=False)
            self.http = httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://test")
        else:
            wsgi = Flask("shop")
            wsgi.add_url_rule("/pay", "pay", self._pay_blocking, methods=["POST"])
            flask.protect(wsgi, self.once, upkeep=False)
            self.client = wsgi.test_client()

    async def _pay(self) -> dict[str, bool]:
        if self.inside is not None:
            await self.inside()
        return {"paid": True}

    def _pay_blocking(self) -> dict[str, bool]:
        if self.inside is not None:
            with pytest.raises(StopIteration):  # ``post`` awaits nothing here
                self.inside().__await__().__next__()
        return {"paid": True}

    async def post(self, key: str, amount: int = 1, time: str | None = None) -> int:
        headers = {"Idempotency-Key": key} | ({"Idempotency-Timestamp": time} if time else {})
        with self.sdk.tracer.start_as_current_span("server"):
            if self.http is not None:
                return (await self.http.post("/pay", json={"amount": amount}, headers=headers)).status_code
            return self.client.post("/pay", json={"amount": amount}, headers=headers).status_code

    @property
    def decisions(self) -> list[object]:
        """Of each question, in order of their ends. The span of the request has the same one."""
        spans = self.sdk.spans("idempotency.begin")
        servers = {id_of(span): (span.attributes or {})["idempotency.decision"] for span in self.sdk.spans("server")}
        found: list[object] = [(span.attributes or {})["idempotency.decision"] for span in spans]
        assert [servers[parent_of(span) or 0] for span in spans] == found
        return found

    @property
    def measured(self) -> float:
        return number(page(registry=self.registry)[1].decode(), "api_idempotency_begin_duration_seconds_count")


Make = Callable[..., App]


@pytest.fixture(params=["asgi", "wsgi"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[App] = []

    def new(**options: Any) -> App:
        made.append(App(request.param, **options))
        return made[-1]

    yield new
    for app in made:
        if app.http is not None:
            await app.http.aclose()
        await app.once.aclose()


@pytest.mark.parametrize("limit", LIMITS)
async def test_replay_with_a_limit_is_linked_and_counted_once(make: Make, limit: str) -> None:
    app = make(**LIMITS[limit])
    assert [await app.post(KEY) for _ in range(3)] == [200] * 3
    first, *replays = app.sdk.spans("server")
    begun, *found = app.sdk.spans("idempotency.begin")
    assert linked(begun) == []
    assert [linked(span) for span in found] == [[place_of(first)]] * 2
    assert [parent_of(span) for span in found] == [id_of(span) for span in replays]
    assert (app.decisions, app.measured) == (["execute", "replay", "replay"], 3)


@pytest.mark.parametrize("limit", LIMITS)
async def test_request_over_a_limit_has_the_decision_turned_away(make: Make, limit: str) -> None:
    app = make(**LIMITS[limit])
    assert [await app.post(KEY), await app.post(OTHER_KEY)] == [200, 429]
    assert (app.decisions, app.measured) == (["execute", "turned_away"], 2)
    assert linked(app.sdk.spans("idempotency.begin")[1]) == []


async def test_old_and_personal_keys_that_are_refused_as_new_have_the_decision_turned_away(make: Make) -> None:
    app = make(policy=Policy(pii="refuse", max_age=timedelta(minutes=10)))
    assert [await app.post(PERSONAL), await app.post(KEY, time=OLD)] == [400, 400]
    assert (app.decisions, app.measured) == (["turned_away", "turned_away"], 2)


@pytest.mark.parametrize("limit", ["none", *LIMITS])
async def test_mismatch_and_duplicate_in_flight_are_linked_and_counted_once(make: Make, limit: str) -> None:
    app = make(**LIMITS.get(limit, {}))
    seen: list[int] = []

    async def duplicate() -> None:
        seen.append(await app.post(KEY))

    app.inside = duplicate
    assert await app.post(KEY) == 200
    assert seen == [409]
    assert await app.post(KEY, amount=2) == 422
    _, first, _ = app.sdk.spans("server")
    begun, *found = app.sdk.spans("idempotency.begin")
    assert [linked(span) for span in (begun, *found)] == [[], [place_of(first)], [place_of(first)]]
    assert (app.decisions, app.measured) == (["execute", "busy", "mismatch"], 3)


@pytest.mark.parametrize("limit", ["none", *LIMITS])
async def test_store_that_fails_is_a_failed_question_counted_once(make: Make, limit: str) -> None:
    app = make(**LIMITS.get(limit, {}))
    app.store.down = {"read", "reserve"}
    assert await app.post(KEY) == 503
    assert app.sdk.the("idempotency.begin").status.status_code is StatusCode.ERROR
    assert (app.decisions, app.measured) == (["failed"], 1)


@pytest.mark.parametrize("limit", ["none", *LIMITS])
async def test_full_queue_is_a_failed_question_counted_once(make: Make, limit: str) -> None:
    app = make(**LIMITS.get(limit, {}))
    app.once.engine.router._max_queued = 0
    assert await app.post(KEY) == 503
    assert (app.decisions, app.measured) == (["failed"], 1)
