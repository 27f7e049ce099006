"""The exporter of OpenTelemetry: spans of requests, effects and jobs, their links, and the same metrics."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.outbox import Worker
from oncekey.stores.api import Epochs
from oncekey.telemetry import instruments
from oncekey.telemetry.otel import links_to
from oncekey.telemetry.prometheus import Prometheus, metric_name, page
from oncekey.upkeep import Upkeep
from oncekey.web import fastapi, flask
from tests.telemetry.pages import number
from tests.telemetry.sdk import Sdk, id_of, linked, parent_of, place_of

KEY = "a-key-that-no-span-may-have"
SECRET = "a message with a secret"


@pytest.fixture
def sdk() -> Sdk:
    return Sdk()


class Traced:
    """Around the app, as an instrumentation of its server: a span for each request."""

    def __init__(self, app: Any, sdk: Sdk) -> None:
        self.app = app
        self.sdk = sdk
        self.after: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self.sdk.tracer.start_as_current_span("server") as span:
            await self.app(scope, receive, send)
            self.after.append(trace.get_current_span() is span)


class Api:
    def __init__(self, url: str, sdk: Sdk) -> None:
        self.sdk = sdk
        self.once = OnceKey(
            url,
            scope=SINGLE_TENANT,
            routes={
                "POST /pay": Policy(effects="repeatable"),
                "POST /wait": Policy(),
                "POST /steps": Policy(effects="phased"),
                "POST /sync-steps": Policy(effects="phased"),
            },
            telemetry=sdk.exporter(),
            migrate=True,
        )
        self.gate = asyncio.Event()
        app = FastAPI()
        app.post("/pay")(self.pay)
        app.post("/wait")(self.wait)
        app.post("/steps")(self.steps)
        app.post("/sync-steps")(self.sync_steps)
        fastapi.protect(app, self.once, upkeep=False)
        self.app = Traced(app, sdk)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://test"
        )

    async def pay(self) -> dict[str, bool]:
        with self.sdk.tracer.start_as_current_span("work of the app"):
            return {"paid": True}

    async def wait(self) -> dict[str, bool]:
        await self.gate.wait()
        return {"paid": True}

    async def steps(self, fail: bool = False) -> dict[str, bool]:
        async def call() -> str:
            with self.sdk.tracer.start_as_current_span("call of the provider"):
                if fail:
                    raise OSError(SECRET)
                return "ch_1"

        await current().effect("charged", call, repeatable=True)
        return {"paid": True}

    def sync_steps(self) -> dict[str, bool]:
        def call() -> str:
            with self.sdk.tracer.start_as_current_span("call of the provider"):
                return "ch_1"

        current().blocking.effect("charged", call, repeatable=True)
        return {"paid": True}

    async def post(self, path: str, key: str = KEY) -> int:
        return (await self.http.post(path, json={}, headers={"Idempotency-Key": key})).status_code


OTHERS = [pytest.param(name, marks=pytest.mark.stores) for name in ("mysql", "redis", "sqlite-process")]


@pytest.fixture(params=["memory", "sqlite", "postgres", *OTHERS])
async def api(request: pytest.FixtureRequest, tmp_path: Path, sdk: Sdk) -> AsyncIterator[Api]:
    urls = {
        "memory": "memory://",
        "sqlite": f"sqlite:///{tmp_path / 'keys.db'}",
        "sqlite-process": f"sqlite:///{tmp_path / 'keys.db'}?writer=process",
    }
    made = Api(urls.get(request.param) or request.getfixturevalue(f"{request.param}_url"), sdk)
    if isinstance(made.once.store, Epochs):
        made.once.store.init()
    yield made
    await made.http.aclose()
    await made.once.aclose()


async def test_spans_of_a_request_are_inside_of_its_own_span(api: Api, sdk: Sdk) -> None:
    for n in range(3):  # the first ones take a thread, later ones the loop
        assert await api.post("/pay", f"{KEY}-{n}") == 200
    for server, begin, handler, work, finish in zip(
        sdk.spans("server"),
        sdk.spans("idempotency.begin"),
        sdk.spans("idempotency.handler"),
        sdk.spans("work of the app"),
        sdk.spans("idempotency.finish"),
        strict=True,
    ):
        assert {parent_of(begin), parent_of(handler), parent_of(finish)} == {id_of(server)}
        assert parent_of(work) == id_of(handler)
        assert begin.attributes == {"idempotency.operation": "POST /pay", "idempotency.decision": "execute"}
        assert finish.attributes == {"idempotency.operation": "POST /pay", "idempotency.outcome": "complete"}
        assert handler.attributes == {"idempotency.operation": "POST /pay", "idempotency.attempt": 1}
        times = [begin.start_time or 0, begin.end_time or 0, handler.end_time or 0, finish.end_time or 0]
        assert times == sorted(times)
    assert api.app.after == [True] * 3, "outer middleware is in its own span again"
    assert KEY not in sdk.text()


async def test_replay_is_linked_to_the_trace_of_the_first_request(api: Api, sdk: Sdk) -> None:
    for _ in range(3):
        assert await api.post("/pay") == 200
    first, *replays = sdk.spans("server")
    begun, *found = sdk.spans("idempotency.begin")
    assert linked(begun) == []
    assert [linked(span) for span in found] == [[place_of(first)]] * 2
    assert {span.attributes["idempotency.decision"] for span in (*found, *replays) if span.attributes} == {"replay"}
    assert len(sdk.spans("idempotency.handler")) == 1


async def test_request_without_a_span_around_it_has_traces_of_its_own_and_its_replay_no_link(
    api: Api, sdk: Sdk
) -> None:
    """docs/tracing.md says so. The token is made before ``begin``, so it can only have the span around the request."""
    transport = httpx.ASGITransport(api.app.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as bare:
        for _ in range(2):
            await bare.post("/pay", json={}, headers={"Idempotency-Key": KEY})
    first, replay = sdk.spans("idempotency.begin")
    assert linked(first) == linked(replay) == []
    own = [*sdk.spans("idempotency.begin"), sdk.the("idempotency.handler"), sdk.the("idempotency.finish")]
    assert [parent_of(span) for span in own] == [None] * 4
    assert len({place_of(span)[0] for span in own}) == 4


async def test_duplicate_in_flight_is_linked_to_the_request_that_runs(api: Api, sdk: Sdk) -> None:
    first = asyncio.create_task(api.post("/wait"))
    while not sdk.spans("idempotency.begin"):
        await asyncio.sleep(0)
    assert await api.post("/wait") == 409
    api.gate.set()
    assert await first == 200
    duplicate, server = sdk.spans("server")
    [_, found] = sdk.spans("idempotency.begin")
    assert linked(found) == [place_of(server)]
    assert parent_of(found) == id_of(duplicate)


@pytest.mark.parametrize("path", ["/steps", "/sync-steps"])
async def test_effect_is_a_span_around_the_call(api: Api, sdk: Sdk, path: str) -> None:
    assert await api.post(path) == 200
    effect = sdk.the("idempotency.effect")
    assert parent_of(effect) == id_of(sdk.the("idempotency.handler"))
    assert parent_of(sdk.the("call of the provider")) == id_of(effect)
    assert effect.attributes == {"idempotency.operation": f"POST {path}", "idempotency.step": "charged"}


async def test_effect_that_raises_is_an_error_without_its_message(api: Api, sdk: Sdk) -> None:
    assert await api.post("/steps?fail=true") >= 500
    effect = sdk.the("idempotency.effect")
    assert (effect.status.status_code, effect.status.description) == (StatusCode.ERROR, "OSError")
    ours = (*sdk.spans("idempotency.handler"), *sdk.spans("idempotency.finish"), effect)
    assert not any(SECRET in span.to_json() for span in ours)


# -- sync apps, transactions and jobs ----------------------------------------------------------------------------------


@pytest.fixture
def shop(sdk: Sdk, tmp_path: Path) -> Iterator[tuple[OnceKey, Any]]:
    """A Flask app whose handler enlists its transaction and enqueues a job."""
    path = tmp_path / "shop.db"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("CREATE TABLE orders (name TEXT)")
    once = OnceKey(
        f"sqlite:///{path}",
        scope=SINGLE_TENANT,
        policy=Policy(effects="transactional"),
        telemetry=sdk.exporter(),
    )
    app = Flask("shop")

    def order() -> Any:
        operation = current().blocking
        operation.enlist(db)
        db.execute("INSERT INTO orders VALUES ('one')")
        operation.enqueue("send_receipt", {"to": "ada"})
        return {"ordered": True}, 201

    app.add_url_rule("/orders", "order", order, methods=["POST"])
    flask.protect(app, once, upkeep=False)
    yield once, app.test_client()
    db.close()
    once.close()


def test_request_of_a_sync_app_with_a_transaction_has_its_spans(shop: tuple[OnceKey, Any], sdk: Sdk) -> None:
    _, client = shop
    for _ in range(2):
        with sdk.tracer.start_as_current_span("server") as server:
            assert client.post("/orders", json={}, headers={"Idempotency-Key": KEY}).status_code == 201
            assert trace.get_current_span() is server
    first, second = sdk.spans("server")
    begun, replayed = sdk.spans("idempotency.begin")
    assert parent_of(begun) == parent_of(sdk.the("idempotency.handler")) == id_of(first)
    assert parent_of(sdk.spans("idempotency.finish")[0]) == id_of(first)
    assert parent_of(replayed) == id_of(second)
    assert linked(replayed) == [place_of(first)]


async def test_transaction_that_ends_in_another_thread_has_its_finish_in_the_request(sdk: Sdk, tmp_path: Path) -> None:
    """A sync handler of an ASGI app: oncekey commits its transaction in a thread of its own."""
    path = tmp_path / "shop.db"
    once = OnceKey(
        f"sqlite:///{path}", scope=SINGLE_TENANT, policy=Policy(effects="transactional"), telemetry=sdk.exporter()
    )
    opened = []

    def order() -> dict[str, bool]:
        opened.append(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
        current().blocking.enlist(opened[-1])
        return {"ordered": True}

    app = FastAPI()
    app.post("/orders")(order)
    fastapi.protect(app, once, upkeep=False)
    traced = Traced(app, sdk)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(traced), base_url="http://test") as client:
        for n in range(2):
            answer = await client.post("/orders", json={}, headers={"Idempotency-Key": f"{KEY}-{n}"})
            assert answer.status_code == 200
    servers = [id_of(span) for span in sdk.spans("server")]
    assert [parent_of(span) for span in sdk.spans("idempotency.finish")] == servers
    assert [parent_of(span) for span in sdk.spans("idempotency.handler")] == servers
    assert traced.after == [True, True]
    for each in opened:
        each.close()
    await once.aclose()


@pytest.mark.parametrize("is_async", [True, False])
def test_job_is_linked_to_the_trace_of_its_request(shop: tuple[OnceKey, Any], sdk: Sdk, is_async: bool) -> None:
    once, client = shop
    with sdk.tracer.start_as_current_span("server"):
        assert client.post("/orders", json={}, headers={"Idempotency-Key": KEY}).status_code == 201
    worker = Worker(once, poll=0.01)

    async def later(context: Any, payload: Any) -> None:
        with sdk.tracer.start_as_current_span("work of the task"):
            await asyncio.sleep(0)

    def at_once(context: Any, payload: Any) -> None:
        with sdk.tracer.start_as_current_span("work of the task"):
            pass

    worker.task("send_receipt")(later if is_async else at_once)
    assert asyncio.run(worker.serve(until="drained")).done == 1
    job = sdk.the("idempotency.job")
    assert linked(job) == [place_of(sdk.the("server"))]
    assert parent_of(job) is None
    assert parent_of(sdk.the("work of the task")) == id_of(job)
    assert job.attributes == {
        "idempotency.operation": "POST /orders",
        "idempotency.task": "send_receipt",
        "idempotency.attempt": 1,
    }


def test_retry_links_to_the_attempt_before_it(sdk: Sdk) -> None:
    """A retry has a token of its own, and its question found the token of the attempt before."""
    app = Flask("shop")
    once = OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(effects="repeatable"), telemetry=sdk.exporter())
    answers = iter([500, 201])
    app.add_url_rule("/pay", "pay", lambda: ({}, next(answers)), methods=["POST"])
    flask.protect(app, once, upkeep=False)
    for status in (500, 201):
        with sdk.tracer.start_as_current_span("server"):
            assert app.test_client().post("/pay", json={}, headers={"Idempotency-Key": KEY}).status_code == status
    first = sdk.spans("server")[0]
    [_, retried] = sdk.spans("idempotency.begin")
    assert linked(retried) == [place_of(first)]
    assert [span.attributes["idempotency.attempt"] for span in sdk.spans("idempotency.handler") if span.attributes] == [
        1,
        2,
    ]
    once.close()


# -- metrics -----------------------------------------------------------------------------------------------------------


async def test_both_exporters_have_the_same_numbers(sdk: Sdk, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    once = OnceKey(
        f"sqlite:///{tmp_path / 'keys.db'}",
        scope=SINGLE_TENANT,
        telemetry=[sdk.exporter(), Prometheus(registry=registry)],
    )
    app = FastAPI()
    app.post("/pay")(lambda: {"paid": True})
    fastapi.protect(app, once, upkeep=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for n in range(10):
            await client.post("/pay", json={}, headers={"Idempotency-Key": f"key-number-{n // 2}"})
    await once.aclose()
    text, points = page(registry=registry)[1].decode(), sdk.points()
    for kind in instruments.COUNTERS:
        name = instruments.counter_name(kind)
        ours = sum(point.value for point in points.get(name, []))
        assert ours == number(text, f"{metric_name(name)}_total"), name
    for each in (instruments.BEGIN, instruments.HANDLER, instruments.FINISH, instruments.BATCH):
        assert sum(point.count for point in points[each.name]) == number(
            text, f"{metric_name(each.name, each.unit)}_count"
        )
        assert tuple(points[each.name][0].explicit_bounds) == each.buckets
    assert sum(point.value for point in points[instruments.RUNNING.name]) == 0


def test_upkeep_shows_the_numbers_of_the_store(sdk: Sdk) -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT, telemetry=sdk.exporter())
    assert instruments.STORE_UP.name not in sdk.points()
    with Upkeep(once):
        points = sdk.points()
    assert [point.value for point in points[instruments.STORE_UP.name]] == [1]
    states = {point.attributes["idempotency.state"] for point in points[instruments.BY_STATE.name]}
    assert states == {"in_progress", "pending", "unknown"}
    assert instruments.STORE_UP.name not in sdk.points()
    once.close()


# -- owner tokens ------------------------------------------------------------------------------------------------------


def test_owner_token_without_a_trace_is_as_before(sdk: Sdk) -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT, telemetry=sdk.exporter())
    assert "." not in once.engine.owners.new()
    with sdk.tracer.start_as_current_span("server") as span:
        token = once.engine.owners.new()
        assert linked_context(token) == span.get_span_context().trace_id
    assert len(token) < 120
    once.close()


def linked_context(token: str) -> int:
    [link] = links_to(token)
    return link.context.trace_id


@pytest.mark.parametrize("owner", [None, "", "abc-1", "abc-1.", "abc-1.zz", "abc-1." + "z" * 50])
def test_token_without_a_trace_has_no_link(owner: str | None) -> None:
    assert links_to(owner) == []


def test_app_without_an_sdk_runs_and_keeps_plain_tokens() -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT, telemetry="otel")
    app = Flask("shop")
    app.add_url_rule("/pay", "pay", lambda: {"paid": True}, methods=["POST"])
    flask.protect(app, once, upkeep=False)
    assert app.test_client().post("/pay", json={}, headers={"Idempotency-Key": KEY}).status_code == 200
    assert "." not in once.engine.owners.new()
    once.close()
