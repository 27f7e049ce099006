"""A caller that is refused before the look-up is an event, without what it sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from oncekey import NotAuthenticated, NotAuthorized, OnceKey, Policy, Request
from oncekey.telemetry.events import CallerRefused
from oncekey.testing.http.stack import Stack
from oncekey.web.status import status_app, status_wsgi
from tests.web.frameworks import framework_of

on_both = pytest.mark.parametrize("name", ["asgi", "wsgi"])


def tenant_of(request: Request) -> str:
    if "x-token" not in request.headers:
        raise NotAuthenticated("no token")
    return "acme"


def nobody(request: Request, operation: str) -> None:
    if request.headers.get("x-token") == "intern":
        raise NotAuthorized("not for you")


@pytest.fixture
def make() -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []

    def stack(name: str, **options: Any) -> Stack:
        made.append(Stack(framework_of(name), **options))
        return made[-1]

    yield stack
    for each in made:
        each.close()


@on_both
@pytest.mark.parametrize(("headers", "reason"), [({}, "not-authenticated"), ({"X-Token": "intern"}, "not-authorized")])
def test_refused_caller_is_an_event(make: Callable[..., Stack], name: str, headers: Any, reason: str) -> None:
    stack = make(name, scope=tenant_of, authorize=nobody)
    stack.post("a-secret-key", headers=headers)
    (event,) = stack.saw(CallerRefused)
    assert event.reason == reason
    assert event.operation.startswith("POST /")
    assert "a-secret-key" not in repr(event)
    stack.post("a-secret-key", headers={"X-Token": "ann"})
    assert len(stack.saw(CallerRefused)) == 1


@on_both
def test_wrong_signature_is_an_event(make: Callable[..., Stack], name: str) -> None:
    stack = make(name, scope=lambda request: "acme", policy=Policy(verify=lambda request, body: False))
    assert stack.post("k-1").status_code == 401
    assert [event.reason for event in stack.saw(CallerRefused)] == ["signature-invalid"]


@pytest.mark.parametrize(("headers", "reason"), [({}, "not-authenticated"), ({"X-Token": "intern"}, "not-authorized")])
async def test_caller_that_the_status_endpoint_refuses_is_an_event(headers: Any, reason: str) -> None:
    seen: list[Any] = []
    with OnceKey("memory://", scope=tenant_of, authorize=nobody, on_event=seen.append) as once:
        with httpx.Client(transport=httpx.WSGITransport(status_wsgi(once)), base_url="http://s") as client:
            client.get("/a-secret-key", headers=headers)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(status_app(once)), base_url="http://s") as client:
            await client.get("/a-secret-key", headers=headers)
    found = [event for event in seen if isinstance(event, CallerRefused)]
    assert [(event.operation, event.reason) for event in found] == [("GET /", reason)] * 2
