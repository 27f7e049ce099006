"""What a framework that oncekey does not know gets from its adapter: declarations, and the list of its routes."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.states import State
from oncekey.web.route_audit import Coverage, audit
from tests.web.test_toy_framework import Answer, Rule, Toy, protect


def declared(once: OnceKey) -> Toy:
    @once.policy(effects="repeatable")
    async def pay(scope: Any) -> Answer:
        return Answer(503)

    @once.exempt
    async def login(scope: Any) -> Answer:
        return Answer(200)

    app = Toy()
    app.rules += [Rule("POST", "/payments/{id}", pay), Rule("POST", "/login", login)]
    protect(app, once)
    return app


async def test_declaration_at_a_handler_of_another_framework_holds(caplog: pytest.LogCaptureFixture) -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT)
    with caplog.at_level(logging.WARNING, "oncekey"):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(declared(once)), base_url="http://toy") as client:
            assert (await client.post("/login")).status_code == 200
            assert (await client.post("/payments/7", headers={"Idempotency-Key": "k-1"})).status_code == 503
    (record,) = once.store.read([("single-tenant", "k-1")])
    assert record is not None
    assert (record.state, record.operation) == (State.FAILED_RETRYABLE, "POST /payments/{id}")
    assert [line for line in caplog.messages if "has no effect" in line] == []
    await once.aclose()


def test_routes_of_another_framework_are_listed_with_their_coverage() -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        found = {(each.method, each.path): each.coverage for each in audit(declared(once)).endpoints}
    assert found == {("POST", "/payments/{id}"): Coverage.PROTECTED, ("POST", "/login"): Coverage.EXEMPT}
