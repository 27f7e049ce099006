"""The age of a key with an unknown outcome, measured when upkeep settles it."""

from __future__ import annotations

from pathlib import Path

import pytest
from flask import Flask
from prometheus_client import CollectorRegistry

from oncekey import SINGLE_TENANT, Confirmed, OnceKey, Refuted
from oncekey.core.verdicts import Verdict
from oncekey.stores.api import Store
from oncekey.stores.memory import MemoryStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.telemetry import instruments
from oncekey.telemetry.prometheus import Prometheus, page
from oncekey.web import flask
from tests.telemetry.pages import number
from tests.telemetry.sdk import Sdk
from tests.upkeep.key_store import OPERATION, Clock
from tests.upkeep.resolving import resolve

NAME = "api_idempotency_unknown_age_seconds"
PATH = OPERATION.removeprefix("POST ")
RUN = 20.0
"""Seconds that the handler runs. The age begins with the key, not with the doubt about its outcome."""
AGE = 5400.0


@pytest.mark.parametrize("verdict", [Confirmed(201, {"id": "pay_9"}), Refuted("no such charge")])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_settlement_measures_the_age_of_the_key(kind: str, verdict: Verdict, tmp_path: Path) -> None:
    clock, registry, sdk = Clock(), CollectorRegistry(), Sdk()
    store: Store = MemoryStore(clock) if kind == "memory" else SqliteStore(tmp_path / "keys.db", clock=clock)
    telemetry = [Prometheus(registry=registry), sdk.exporter()]
    once = OnceKey(store, scope=SINGLE_TENANT, telemetry=telemetry, migrate=True)
    app = Flask("shop")

    def pay() -> dict[str, bool]:
        clock.now += RUN
        raise OSError("the provider did not answer")

    app.add_url_rule(PATH, "pay", pay, methods=["POST"])
    flask.protect(app, once, upkeep=False)
    assert app.test_client().post(PATH, json={}, headers={"Idempotency-Key": "key-number-1"}).status_code >= 400
    clock.now += AGE - RUN
    assert number(page(registry=registry)[1].decode(), f"{NAME}_count") == 0

    assert resolve(once, lambda inquiry: verdict)["due"] == 1

    text = page(registry=registry)[1].decode()
    assert number(text, f"{NAME}_sum", operation=OPERATION) == AGE
    assert number(text, f"{NAME}_bucket", operation=OPERATION, le="3600.0") == 0
    assert number(text, f"{NAME}_bucket", operation=OPERATION, le="14400.0") == 1
    [point] = sdk.points()[instruments.AGE.name]
    assert (point.sum, point.count) == (AGE, 1)
    once.close()
