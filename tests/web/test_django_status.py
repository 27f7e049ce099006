"""The status resource as a view of Django: the caller's own keys, with ``SCOPE`` and ``AUTHORIZE`` of the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from oncekey import NotAuthenticated, NotAuthorized, OnceKey, OutcomeUnknown, Policy
from oncekey.testing.http.stack import Loop, as_a_server
from tests.web.django_apps import configure, make_handler, urls

configure()

from django.http import HttpResponse  # noqa: E402 - Django is configured first
from django.test import Client, override_settings  # noqa: E402
from django.urls import path  # noqa: E402

from oncekey.web.django import conf, endpoints  # noqa: E402
from oncekey.web.django.status import status_view  # noqa: E402


def tenant_of(request: Any) -> str:
    """It needs Django's request: ``META`` is Django's."""
    if (token := request.META.get("HTTP_AUTHORIZATION")) is None:
        raise NotAuthenticated("send a token")
    return str(token)


async def tenant_of_async(request: Any) -> str:
    return tenant_of(request)


class Site:
    """POST /pay, and the status of its keys."""

    def __init__(self, *, asgi: bool, pay: Any = None, operation: str | None = None, **options: Any) -> None:
        self.once = OnceKey("memory://", **{"scope": tenant_of, **options})
        view = status_view(self.once, operation=operation)
        made = urls(
            path("pay", pay or (lambda request: HttpResponse(b"paid", status=201))),
            path("idempotency/", view),
            path("idempotency/<path:key>", view),
        )
        self.urls = made
        self.app = make_handler(made, self.once, asgi=asgi, upkeep=False)
        self.loop = Loop() if asgi else None

    def send(self, method: str, url: str, who: str | None = "ann", **headers: str) -> httpx.Response:
        sent = {**headers, **({"Authorization": who} if who else {})}
        if self.loop is not None:
            answer: httpx.Response = self.loop.start(self._send(method, url, sent)).result(20.0)
            return answer
        transport = httpx.WSGITransport(as_a_server(self.app), raise_app_exceptions=False)
        with httpx.Client(transport=transport, base_url="http://site") as client:
            return client.request(method, url, headers=sent)

    async def _send(self, method: str, url: str, sent: dict[str, str]) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            return await client.request(method, url, headers=sent)

    def pay(self, key: str = "k-1", who: str = "ann") -> httpx.Response:
        return self.send("POST", "/pay", who, **{"Idempotency-Key": key})

    def close(self) -> None:
        if self.loop is None:
            self.once.close()
        else:
            self.loop.start(self.once.aclose(grace=2.0)).result(10.0)
            self.loop.close()


@pytest.fixture(params=["wsgi", pytest.param("asgi", marks=pytest.mark.frameworks)])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(**options: Any) -> Site:
        made.append(Site(asgi=request.param == "asgi", **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


def test_done_is_the_stored_response(make: Callable[..., Site]) -> None:
    site = make()
    first = site.pay()
    asked = site.send("GET", "/idempotency/k-1")
    assert (asked.status_code, asked.content, asked.headers["idempotency-replayed"]) == (201, b"paid", "true")
    assert asked.headers["idempotency-key"] == "k-1"
    assert asked.headers["cache-control"] == "no-store"
    assert first.content == asked.content
    head = site.send("HEAD", "/idempotency/k-1")
    assert (head.status_code, head.content) == (201, b"")


@pytest.mark.parametrize("key", ["orders/7 a", "ä"])
def test_key_may_have_any_characters(make: Callable[..., Site], key: str) -> None:
    site = make()
    if key.isascii():
        site.pay(f'"{key}"')
    answer = site.send("GET", f"/idempotency/{httpx.URL(path='/' + key).raw_path.decode()[1:]}")
    assert answer.status_code == (201 if key.isascii() else 404)


def test_key_may_come_in_the_header(make: Callable[..., Site]) -> None:
    site = make()
    site.pay()
    assert site.send("GET", "/idempotency/", **{"Idempotency-Key": "k-1"}).content == b"paid"
    missing = site.send("GET", "/idempotency/")
    assert (missing.status_code, missing.json()["type"]) == (400, "urn:oncekey:problem:key-missing")


def test_unknown_outcome_is_409(make: Callable[..., Site]) -> None:
    def pay(request: Any) -> HttpResponse:
        raise OutcomeUnknown("the bank did not answer")

    site = make(pay=pay)
    site.pay()
    asked = site.send("GET", "/idempotency/k-1")
    assert (asked.status_code, asked.json()["type"]) == (409, "urn:oncekey:problem:outcome-unknown")


def test_running_request_is_202_with_its_address(make: Callable[..., Site]) -> None:
    seen: list[httpx.Response] = []

    def pay(request: Any) -> HttpResponse:
        with InView(site) as ask:
            seen.append(ask("/idempotency/k-1"))
        return HttpResponse(status=201)

    site = make(pay=pay)
    site.pay()
    assert (seen[0].status_code, seen[0].headers["location"]) == (202, "/idempotency/k-1")
    assert "retry-after" in seen[0].headers


class InView:
    """Asks from inside of the view, under WSGI: another request."""

    def __init__(self, site: Site) -> None:
        self.app = make_handler(site.urls, site.once, asgi=False, upkeep=False)

    def __enter__(self) -> Callable[[str], httpx.Response]:
        transport = httpx.WSGITransport(as_a_server(self.app))
        self.client = httpx.Client(transport=transport, base_url="http://site", headers={"Authorization": "ann"})
        return self.client.get

    def __exit__(self, *_: object) -> None:
        self.client.close()


@pytest.mark.parametrize("scope", [tenant_of, tenant_of_async])
def test_caller_sees_only_its_own_keys(make: Callable[..., Site], scope: Any) -> None:
    site = make(scope=scope)
    if scope is tenant_of_async and site.loop is None:
        pytest.skip("an async SCOPE needs ASGI")
    site.pay()
    other, never = site.send("GET", "/idempotency/k-1", "bob"), site.send("GET", "/idempotency/k-2", "ann")
    assert (other.status_code, never.status_code) == (404, 404)
    assert other.content == never.content
    assert site.send("GET", "/idempotency/k-1", None).status_code == 401
    assert site.send("GET", "/idempotency/k-1").status_code == 201


def test_authorize_is_asked_with_the_request_of_django(make: Callable[..., Site]) -> None:
    asked: list[tuple[str, str]] = []
    allowed = {"GET /idempotency", "POST /pay"}

    def authorize(request: Any, operation: str) -> None:
        asked.append((request.META["HTTP_AUTHORIZATION"], operation))
        if operation not in allowed:
            raise NotAuthorized("not yours")

    site = make(authorize=authorize)
    site.pay()
    asked.clear()
    assert site.send("GET", "/idempotency/k-1").status_code == 201
    assert asked == [("ann", "GET /idempotency"), ("ann", "POST /pay")]
    allowed.discard("POST /pay")
    assert site.send("GET", "/idempotency/k-1").status_code == 404
    allowed.clear()
    assert site.send("GET", "/idempotency/k-1").status_code == 403


def test_operation_names_the_keys_of_one_route(make: Callable[..., Site]) -> None:
    routes = {"POST /pay": Policy(key_per="endpoint")}
    site = make(routes=routes)
    site.pay()
    assert site.send("GET", "/idempotency/k-1").status_code == 404
    assert site.send("GET", "/idempotency/k-1?operation=POST%20%2Fpay").status_code == 201
    named = make(routes=routes, operation="POST /pay")
    named.pay()
    assert named.send("GET", "/idempotency/k-1").status_code == 201


def test_other_method_is_405_and_leaves_the_key_unused(make: Callable[..., Site]) -> None:
    site = make()
    answer = site.send("POST", "/idempotency/k-1", **{"Idempotency-Key": "k-1"})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert site.pay().status_code == 201


def test_view_is_no_route_that_must_be_protected(make: Callable[..., Site]) -> None:
    listed = {(method, where) for method, where, _ in endpoints.views(make().urls)}
    assert {method for method, where in listed if "idempotency" in where} == {"GET"}


def test_view_takes_the_setting() -> None:
    """Without an argument it is the OnceKey of ONCEKEY, made when it is first needed."""
    made = urls(path("pay", lambda request: HttpResponse(b"paid")), path("idempotency/<key>", status_view()))
    ours = ["oncekey.web.django.OnceKeyMiddleware"]
    said = {"STORE": "memory://", "SCOPE": "SINGLE_TENANT"}
    conf.once.reset()
    with override_settings(ONCEKEY=said, ROOT_URLCONF=made, MIDDLEWARE=ours):
        client = Client()
        client.post("/pay", headers={"Idempotency-Key": "k-1"})
        assert client.get("/idempotency/k-1").content == b"paid"
    conf.once.reset()
