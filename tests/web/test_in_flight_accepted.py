"""``in_flight="accepted"``: a duplicate of a running request gets 202, when and where to ask; and nothing is stored."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.decision import Busy
from oncekey.core.problems import PROFILES, ProfileName
from oncekey.core.routes import Routes
from oncekey.core.states import State
from oncekey.errors import ConfigurationError
from oncekey.testing.http.base import MakeStack
from oncekey.testing.http.stack import PAYMENT
from oncekey.web.fastapi import protect
from oncekey.web.openapi import declare
from oncekey.web.responses import answer_to
from oncekey.web.status import status_app
from tests.engine.doubles import record_of, reservation
from tests.web.apps import SECONDS, Gate
from tests.web.frameworks import STACKS

POLICY = Policy(in_flight="accepted", retry_after=timedelta(seconds=3))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", STACKS)
def test_duplicate_of_a_running_request_is_202_and_then_a_replay(
    name: str, profile: ProfileName, make_stack: MakeStack
) -> None:
    stack = make_stack(name, policy=POLICY, profile=profile, status_url="/idempotency")
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    busy = stack.post(m="slow")
    assert (busy.status_code, busy.json()["state"]) == (202, "in_progress")
    assert (busy.headers["retry-after"], busy.headers["location"]) == ("3", "/idempotency/k-1")
    assert (busy.headers["idempotency-key"], busy.headers["cache-control"]) == ("k-1", "no-store")
    assert not {"idempotency-replayed", "idempotent-replayed"} & set(busy.headers)
    assert busy.headers.get("stripe-should-retry") == ("true" if profile == "stripe" else None)
    record = stack.record()
    assert record is not None
    assert (record.state, record.response) == (State.IN_PROGRESS, None)
    another = stack.post(m="slow", body=PAYMENT | {"amount": 2000})
    assert another.status_code == (400 if profile == "stripe" else 422), "another request is refused, not accepted"
    stack.payments.go.set()
    done = first.result(SECONDS)
    assert done.status_code == 201
    again = stack.post(m="slow")
    assert (again.status_code, again.content) == (201, done.content)
    assert stack.runs == 1


async def test_location_of_the_202_answers_until_it_is_the_result() -> None:
    """With the same body, for a key with characters that an address needs escaped."""
    app, gate = FastAPI(), Gate()
    with OnceKey(
        "memory://", scope=SINGLE_TENANT, policy=Policy(in_flight="accepted", key_per="endpoint"), status_url="/status/"
    ) as once:

        @app.post("/payments")
        async def pay() -> dict[str, int]:
            await gate.wait()
            return {"paid": 1}

        app.mount("/status", status_app(once))
        protect(app, once)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            headers = {"Idempotency-Key": '"order 1/2"'}
            first = asyncio.create_task(client.post("/payments", headers=headers))
            await gate.entered.wait()
            busy = await client.post("/payments", headers=headers)
            assert busy.headers["location"] == "/status/order%201%2F2?operation=POST%20%2Fpayments"
            asked = await client.get(busy.headers["location"])
            assert (asked.status_code, asked.json()) == (202, busy.json())
            gate.go.set()
            await first
            assert (await client.get(busy.headers["location"])).json() == {"paid": 1}


class _Voice:
    profile: ProfileName = "ietf"
    docs_url = None
    status_url = "/idempotency"


RUNNING = record_of(reservation(lease=60.0))


@pytest.mark.parametrize(
    ("record", "status"),
    [(RUNNING, 202), (None, 409), (record_of(reservation(), State.FAILED_RETRYABLE), 409)],
    ids=["in progress", "not seen", "retryable"],
)
def test_202_only_where_a_row_says_that_a_request_runs(record: Any, status: int) -> None:
    assert answer_to(Busy(record), POLICY, _Voice()).status == status


def test_overdue_lease_gets_202_with_the_remaining_seconds() -> None:
    assert (b"retry-after", b"29") in answer_to(Busy(RUNNING, 28.5), POLICY, _Voice()).headers


@pytest.mark.parametrize(
    "where", [{"policy": POLICY}, {"routes": {"POST /login": None, "POST /payments": POLICY}}], ids=["app", "route"]
)
def test_accepted_without_a_status_url_is_refused_at_start(where: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"status_app\(once\).*OnceKey\(status_url='/idempotency'\)"):
        OnceKey("memory://", scope=SINGLE_TENANT, **where)


def test_accepted_at_a_handler_without_a_status_url_is_refused_at_start() -> None:
    once = OnceKey("memory://", scope=SINGLE_TENANT)
    with pytest.raises(ConfigurationError, match=r"OnceKey\(status_url='/idempotency'\)"):
        once.policy(in_flight="accepted")


@pytest.mark.parametrize("profile", PROFILES)
def test_openapi_document_has_the_202_of_such_a_route_only(profile: ProfileName) -> None:
    there: Any = {"openapi": "3.1.0", "paths": {path: {"post": {"responses": {}}} for path in ("/a", "/b")}}
    made = declare(there, Routes(Policy(), {"POST /a": POLICY}).match, profile=profile)
    answer = made["paths"]["/a"]["post"]["responses"]["202"]
    assert set(answer["headers"]) == {"Retry-After", "Location"}
    assert answer["content"] == {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/IdempotencyProgress"},
            "examples": {"accepted": {"$ref": "#/components/examples/IdempotencyAccepted"}},
        }
    }
    assert "202" not in made["paths"]["/b"]["post"]["responses"]
    assert made["paths"]["/a"]["post"]["x-idempotency"]["in_flight"] == "accepted"
