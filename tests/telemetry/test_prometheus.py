"""The exporter of Prometheus: what it counts and measures, on every way that a request can take, and its page."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from prometheus_client import CollectorRegistry

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy
from oncekey.core.health import StoreHealth
from oncekey.engine.batching.router import Router
from oncekey.engine.engine import Engine
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.telemetry import instruments
from oncekey.telemetry.events import BreakerClosed, BreakerOpened, ReconcileResolved, Reserved
from oncekey.telemetry.prometheus import Prometheus, metrics_app, metrics_wsgi_app, page
from oncekey.upkeep import Upkeep, gauges
from oncekey.web import fastapi, flask
from tests.telemetry.pages import number, series

P = "api_idempotency_"


def shown(registry: CollectorRegistry) -> str:
    return page(registry=registry)[1].decode()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


class Api:
    """A payments API with metrics in a registry of its own."""

    def __init__(self, url: str, registry: CollectorRegistry, **options: Any) -> None:
        self.registry = registry
        self.gate = asyncio.Event()
        self.once = OnceKey(
            url,
            scope=lambda request: request.headers.get("x-tenant", "acme"),
            routes={"POST /pay": Policy(effects="repeatable"), "POST /wait": Policy(), "POST /fail": Policy()},
            telemetry=Prometheus(registry=registry, **options),
            migrate=True,
        )
        self.app = FastAPI()
        self.app.post("/pay")(self.pay)
        self.app.post("/wait")(self.wait)
        self.app.post("/fail")(self.fail)
        fastapi.protect(self.app, self.once, upkeep=False)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    async def pay(self) -> dict[str, bool]:
        return {"paid": True}

    async def wait(self) -> dict[str, bool]:
        await self.gate.wait()
        return {"paid": True}

    async def fail(self) -> None:
        raise NotExecuted("the provider is closed")

    async def post(self, path: str, key: str, body: object = None, tenant: str = "acme") -> int:
        headers = {"Idempotency-Key": key, "X-Tenant": tenant}
        return (await self.http.post(path, json=body, headers=headers)).status_code

    def number(self, name: str, **labels: str) -> float:
        return number(shown(self.registry), P + name, **labels)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def api(request: pytest.FixtureRequest, tmp_path: Path, registry: CollectorRegistry) -> AsyncIterator[Api]:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'keys.db'}"}
    made = Api(urls.get(request.param) or request.getfixturevalue("postgres_url"), registry)
    yield made
    await made.http.aclose()
    await made.once.aclose()


async def test_each_request_is_counted_and_timed_once_on_the_flat_way_and_the_general_way(api: Api) -> None:
    for n in range(5):
        assert await api.post("/pay", f"key-number-{n}") == 200
        assert await api.post("/pay", f"key-number-{n}") == 200
    assert await api.post("/pay", "key-number-0", {"other": 1}) == 422
    for _ in range(3):
        assert await api.post("/fail", "key-that-fails") == 503
    assert api.number("reserve_created_total", operation="POST /pay") == 5
    assert api.number("reserve_replay_total", operation="POST /pay") == 5
    assert api.number("reserve_key_misuse_total", operation="POST /pay") == 1
    assert api.number("reserve_failed_retry_total", operation="POST /fail") == 2
    assert api.number("finish_completed_total") == 5
    assert api.number("finish_released_total", operation="POST /fail") == 3
    assert api.number("begin_duration_seconds_count", operation="POST /pay") == 11
    assert api.number("begin_duration_seconds_count", operation="POST /fail") == 3
    assert api.number("handler_duration_seconds_count", operation="POST /pay") == 5
    assert api.number("handler_duration_seconds_count", operation="POST /fail") == 3
    assert api.number("finish_duration_seconds_count", operation="POST /pay") == 5
    assert api.number("finish_duration_seconds_count", operation="POST /fail") == 3
    assert api.number("handler_running") == 0


async def test_running_handlers_are_a_gauge_and_its_duplicates_are_counted(api: Api) -> None:
    first = asyncio.create_task(api.post("/wait", "key-in-flight"))
    while not api.number("handler_running", operation="POST /wait"):
        await asyncio.sleep(0)
    assert await api.post("/wait", "key-in-flight") == 409
    api.gate.set()
    assert await first == 200
    assert api.number("handler_running", operation="POST /wait") == 0
    assert api.number("reserve_in_progress_total", operation="POST /wait") == 1


async def test_batches_have_all_keys_of_all_requests(api: Api) -> None:
    await asyncio.gather(*(api.post("/pay", f"key-number-{n}") for n in range(40)))
    assert api.number("batch_size_sum") == 80, "each key is reserved and completed"
    assert api.number("batch_size_count") <= 80


def test_sync_app_is_timed_in_its_threads(tmp_path: Path, registry: CollectorRegistry) -> None:
    app = Flask("shop")
    once = OnceKey(f"sqlite:///{tmp_path / 'keys.db'}", scope=SINGLE_TENANT, telemetry=Prometheus(registry=registry))
    app.add_url_rule("/pay", "pay", lambda: ({"paid": True}, 201), methods=["POST"])
    flask.protect(app, once, upkeep=False)
    client = app.test_client()
    for _ in range(3):
        client.post("/pay", json={}, headers={"Idempotency-Key": "key-number-one"})
    text = shown(registry)
    assert number(text, f"{P}begin_duration_seconds_count") == 3
    assert number(text, f"{P}handler_duration_seconds_count") == 1
    assert number(text, f"{P}finish_duration_seconds_count") == 1
    assert number(text, f"{P}handler_running") == 0
    once.close()


def test_usual_counters_of_listed_routes_begin_at_zero(registry: CollectorRegistry) -> None:
    routes = {"POST /pay": Policy(), "POST /login": None}
    OnceKey("memory://", scope=SINGLE_TENANT, routes=routes, telemetry=Prometheus(registry=registry)).close()
    text = shown(registry)
    assert series(text, f"{P}reserve_created_total") == [{"operation": "POST /pay"}]
    assert series(text, f"{P}reconcile_failed_total") == [{"operation": "POST /pay"}]
    assert number(text, f"{P}reserve_created_total") == 0
    assert series(text, f"{P}store_error_total") == [{"verb": "reserve"}]


def test_events_move_the_gauge_of_the_breaker_and_the_age_of_settled_keys(registry: CollectorRegistry) -> None:
    exporter = Prometheus(registry=registry)
    exporter.on_event(BreakerOpened("reserve", "down"))
    assert number(shown(registry), f"{P}breaker_open") == 1
    exporter.on_event(BreakerClosed())
    assert number(shown(registry), f"{P}breaker_open") == 0
    exporter.on_event(ReconcileResolved("acme", "~1", "POST /pay", 1, state="completed", age_seconds=90.0))
    assert number(shown(registry), f"{P}unknown_age_seconds_sum", operation="POST /pay") == 90


def test_operations_that_clients_can_invent_are_bounded(registry: CollectorRegistry) -> None:
    exporter = Prometheus(registry=registry)
    for n in range(1000):
        exporter.on_event(Reserved("acme", "~1", f"POST /pay/{n}", 1))
    found = series(shown(registry), f"{P}reserve_created_total")
    assert len(found) == 201
    assert number(shown(registry), f"{P}reserve_created_total", operation="other") == 800


@pytest.mark.parametrize("framework", ["fastapi", "flask"])
async def test_paths_without_a_route_are_one_series_and_routes_have_their_pattern(
    framework: str, registry: CollectorRegistry
) -> None:
    app: Any
    paths = ["/pay", "/orders/1/cancel", "/orders/2/cancel", *(f"/wp-admin/{n}" for n in range(5))]
    with OnceKey("memory://", scope=SINGLE_TENANT, telemetry=Prometheus(registry=registry)) as once:
        if framework == "fastapi":
            app = FastAPI()
            app.post("/pay")(lambda: {"paid": True})
            app.post("/orders/{number}/cancel")(lambda number: {"cancelled": number})
            fastapi.protect(app, once, upkeep=False)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
                for n, path in enumerate(paths):
                    await http.post(path, headers={"Idempotency-Key": f"k-{n}"})
        else:
            app = Flask("shop")
            app.post("/pay")(lambda: {"paid": True})
            app.post("/orders/<int:number>/cancel", endpoint="cancel")(lambda number: {"cancelled": number})
            flask.protect(app, once, upkeep=False)
            for n, path in enumerate(paths):
                app.test_client().post(path, headers={"Idempotency-Key": f"k-{n}"})
        text = shown(registry)
        for operation, many in {"POST /pay": 1, "POST /orders/{number}/cancel": 2, "other": 5}.items():
            assert number(text, f"{P}reserve_created_total", operation=operation) == many
        assert "wp-admin" not in text


def test_path_that_is_not_unicode_does_not_break_the_page(registry: CollectorRegistry) -> None:
    Prometheus(registry=registry).on_event(Reserved("acme", "~1", 'POST /caf\udce9"\n', 1))
    assert number(shown(registry), f"{P}reserve_created_total", operation='POST /caf?"\n') == 1


def test_tenants_are_no_label_unless_asked_for(registry: CollectorRegistry) -> None:
    Prometheus(registry=registry).on_event(Reserved("acme", "~1", "POST /pay", 1))
    assert series(shown(registry), f"{P}reserve_created_total") == [{"operation": "POST /pay"}]


def test_tenant_is_the_label_without_its_endpoint(registry: CollectorRegistry) -> None:
    Prometheus(registry=registry, tenants=5).on_event(Reserved("acme\x1fPOST /pay", "~1", "POST /pay", 1))
    assert series(shown(registry), f"{P}reserve_created_total") == [{"operation": "POST /pay", "tenant": "acme"}]


# -- the numbers of the store ------------------------------------------------------------------------------------------


class CountedStore(MemoryStore):
    looks = 0
    down = False

    def counts(self) -> StoreHealth:
        self.looks += 1
        if self.down:
            raise StoreUnavailable("the store is down")
        return super().counts()


@pytest.fixture
def watched(registry: CollectorRegistry) -> Iterator[tuple[CountedStore, Upkeep]]:
    store = CountedStore()
    upkeep = Upkeep(store, telemetry=Prometheus(registry=registry), sweep_every=60, reap_every=60)
    yield store, upkeep
    if upkeep.running:
        upkeep.stop()


def test_numbers_of_the_store_are_shown_while_upkeep_runs(
    registry: CollectorRegistry, watched: tuple[CountedStore, Upkeep]
) -> None:
    _, upkeep = watched
    assert f"{P}keys" not in shown(registry)
    with upkeep:
        text = shown(registry)
        assert number(text, f"{P}store_up") == 1
        assert {labels["state"] for labels in series(text, f"{P}keys")} == {"in_progress", "pending", "unknown"}
        assert {labels["kind"] for labels in series(text, f"{P}dead_letters")} == {"key", "job"}
        for gauge in ("unknown_oldest", "sweeper_lag", "reaper_lag", "reconciler_lag", "outbox_lag"):
            assert series(text, f"{P}{gauge}_seconds") == [{}]
    assert f"{P}keys" not in shown(registry)


def test_store_is_read_at_most_every_ten_seconds(registry: CollectorRegistry) -> None:
    store = CountedStore()
    gauges.show([Prometheus(registry=registry)], store)
    assert store.looks == 0, "not before the page is fetched"
    for _ in range(50):
        shown(registry)
    assert store.looks == 1


def test_page_is_shown_while_the_store_is_down(
    registry: CollectorRegistry, watched: tuple[CountedStore, Upkeep], caplog: pytest.LogCaptureFixture
) -> None:
    store, upkeep = watched
    store.down = True
    with upkeep:
        text = shown(registry)
    assert number(text, f"{P}store_up") == 0
    assert f"{P}keys" not in text
    assert "could not be read for the metrics page" in caplog.text


# -- the page ----------------------------------------------------------------------------------------------------------


async def test_page_is_an_asgi_app(registry: CollectorRegistry) -> None:
    Prometheus(registry=registry).on_event(Reserved("acme", "~1", "POST /pay", 1))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(metrics_app(registry)), base_url="http://test"
    ) as client:
        answer = await client.get("/metrics")
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/plain")
        assert number(answer.text, f"{P}reserve_created_total") == 1
        modern = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert modern.text.endswith("# EOF\n")
        assert (await client.head("/metrics")).content == b""
        refused = await client.post("/metrics")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/metrics/other")).status_code == 404


async def test_mounted_page_has_nothing_below_it_and_no_series_of_its_own(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    once = OnceKey("memory://", scope=SINGLE_TENANT, telemetry=Prometheus(registry=registry))
    app.mount("/metrics", metrics_app(registry))
    app.post("/pay")(lambda: {"paid": True})
    fastapi.protect(app, once, upkeep=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        assert (await client.get("/metrics", follow_redirects=True)).status_code == 200
        assert (await client.get("/metrics/other")).status_code == 404
        for path, status in (("/metrics/", 405), ("/pay", 200)):
            headers = {"Idempotency-Key": f"key-of-{path[1:4]}-1"}
            assert (await client.post(path, json={}, headers=headers)).status_code == status
        text = (await client.get("/metrics/")).text
    assert number(text, f"{P}reserve_created_total", operation="POST /pay") == 1
    assert number(text, f"{P}reserve_created_total", operation="other") == 1
    assert "POST /metrics" not in text


def test_page_is_a_wsgi_app(registry: CollectorRegistry) -> None:
    Prometheus(registry=registry).on_event(Reserved("acme", "~1", "POST /pay", 1))
    with httpx.Client(transport=httpx.WSGITransport(metrics_wsgi_app(registry)), base_url="http://test") as client:
        assert number(client.get("/metrics").text, f"{P}reserve_created_total") == 1
        assert client.head("/metrics").content == b""
        assert client.post("/metrics").status_code == 405
        assert client.get("/").status_code == 200
        assert client.get("/metrics/other").status_code == 404


# -- without exporters -------------------------------------------------------------------------------------------------


def test_app_without_exporters_has_the_plain_engine_and_router() -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT)
    assert (type(once.engine), type(once.engine.router)) == (Engine, Router)
    assert "enter" in vars(once.engine)
    once.close()


def test_app_without_exporters_imports_none_of_it() -> None:
    code = (
        "import sys; from oncekey import OnceKey, SINGLE_TENANT; from oncekey.upkeep import Upkeep\n"
        "from oncekey.web.asgi import IdempotencyMiddleware; from oncekey.outbox import Worker\n"
        "once = OnceKey('memory://', scope=SINGLE_TENANT); Upkeep(once).run_once(); once.close()\n"
        "print([name for name in sys.modules if 'prometheus' in name or 'opentelemetry' in name\n"
        "       or name in ('oncekey.engine.observed', 'oncekey.telemetry.exporter')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == "[]"


# -- settings that are wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("telemetry", ["promteheus", 5, ["prometheus", 7], object()])
def test_setting_that_names_no_exporter_is_refused(telemetry: Any) -> None:
    with pytest.raises(ConfigurationError, match="it takes the name of an exporter, 'prometheus', 'otel'"):
        OnceKey("memory://", scope=SINGLE_TENANT, telemetry=telemetry)


def test_class_in_place_of_an_exporter_is_refused_with_what_to_write() -> None:
    wrong: Any = Prometheus
    with pytest.raises(ConfigurationError, match=r"write Prometheus\(\)"):
        OnceKey("memory://", scope=SINGLE_TENANT, telemetry=wrong)


def test_empty_list_of_exporters_is_as_none() -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT, telemetry=[])
    assert type(once.engine) is Engine
    once.close()


def test_folder_of_several_processes_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="there is no such folder: create it"):
        Prometheus(registry=CollectorRegistry())


def test_folder_of_several_processes_must_be_set_before_the_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with pytest.raises(ConfigurationError, match="was set after prometheus_client was imported"):
        Prometheus(registry=CollectorRegistry())


def test_same_exporter_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="would count everything twice"):
        OnceKey("memory://", scope=SINGLE_TENANT, telemetry=["prometheus", "prometheus"])


def test_tenants_out_of_range_are_refused(registry: CollectorRegistry) -> None:
    wrong: Any
    for wrong in (-1, 100_000, "20"):
        with pytest.raises(ConfigurationError, match="it takes 0 to 1000"):
            Prometheus(tenants=wrong, registry=registry)


def test_two_exporters_of_one_registry_share_its_counters(registry: CollectorRegistry) -> None:
    for exporter in (Prometheus(registry=registry), Prometheus(registry=registry)):
        exporter.on_event(Reserved("acme", "~1", "POST /pay", 1))
    assert number(shown(registry), f"{P}reserve_created_total") == 2
    with pytest.raises(ConfigurationError, match="one with tenants"):
        Prometheus(registry=registry, tenants=3)


def test_names_of_all_instruments_differ() -> None:
    counters = [instruments.counter_name(kind) for kind in instruments.COUNTERS]
    others = [*instruments.HISTOGRAMS, *instruments.PROCESS_GAUGES, *instruments.STORE_GAUGES]
    names = [*counters, *(each.name for each in others)]
    assert len(set(names)) == len(names)
