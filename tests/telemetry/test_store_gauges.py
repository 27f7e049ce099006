"""When the page shows the numbers of the store, and by what they are split."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from flask import Flask
from prometheus_client import CollectorRegistry

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.telemetry import instruments
from oncekey.telemetry.prometheus import Prometheus, page
from oncekey.web import fastapi, flask
from tests.telemetry.pages import series

UP = "api_idempotency_store_up"
HEADERS = {"Idempotency-Key": "key-number-1"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def once(registry: CollectorRegistry, tmp_path: Path) -> OnceKey:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    return OnceKey(url, scope=SINGLE_TENANT, telemetry=Prometheus(registry=registry), migrate=True)


def is_shown(registry: CollectorRegistry) -> bool:
    return bool(series(page(registry=registry)[1].decode(), UP))


def test_wsgi_app_shows_the_numbers_of_the_store_from_its_first_protected_request_on(
    once: OnceKey, registry: CollectorRegistry
) -> None:
    app = Flask("shop")
    app.add_url_rule("/pay", "pay", lambda: {"paid": True}, methods=["GET", "POST"])
    flask.protect(app, once)
    client = app.test_client()
    assert client.get("/pay").status_code == 200
    assert not is_shown(registry)
    assert client.post("/pay", json={}, headers=HEADERS).status_code == 200
    assert is_shown(registry)
    once.close()
    assert not is_shown(registry)


async def test_asgi_app_shows_the_numbers_of_the_store_from_its_start_on(
    once: OnceKey, registry: CollectorRegistry
) -> None:
    app = FastAPI()
    app.post("/pay")(lambda: {"paid": True})
    fastapi.protect(app, once)
    received = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    shown: list[bool] = []

    async def receive() -> dict[str, str]:
        message = next(received)
        if message["type"] == "lifespan.shutdown":
            shown.append(is_shown(registry))
        return message

    async def send(message: object) -> None: ...

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert shown == [True]


def test_only_unknown_keys_are_split_by_operation() -> None:
    assert {each.name for each in instruments.STORE_GAUGES if "operation" in each.labels} == {instruments.UNKNOWN.name}
