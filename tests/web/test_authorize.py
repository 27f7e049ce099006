"""``OnceKey(authorize=…)``: it decides whether the caller may use an operation, before the key is looked up,
also for a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from oncekey import SINGLE_TENANT, NotAuthenticated, NotAuthorized, OnceKey, Policy, Request
from oncekey.errors import ConfigurationError
from oncekey.testing.http.base import MakeStack
from oncekey.testing.http.checks import problem, replays
from oncekey.web.flask import protect
from oncekey.web.openapi import situations
from oncekey.web.status import status_app, status_wsgi
from tests.web.apps import Api
from tests.web.frameworks import ASGI_STACKS, WSGI_STACKS

MakeApi = Callable[..., Api]
ADMIN, INTERN = {"x-role": "admin"}, {"x-role": "intern"}


class Roles:
    """Lets admins do everything, and writes down what it was asked."""

    def __init__(self, **open_to_interns: bool) -> None:
        self.asked: list[tuple[str, str]] = []
        self.open = set(open_to_interns)

    def __call__(self, request: Request, operation: str) -> None:
        role = request.headers.get("X-Role", "")
        self.asked.append((role, operation))
        if not role:
            raise NotAuthenticated("send X-Role")
        if role != "admin" and operation not in self.open:
            raise NotAuthorized(f"an {role} may not do this")


class AsyncRoles(Roles):
    async def __call__(self, request: Request, operation: str) -> None:  # type: ignore[override]
        super().__call__(request, operation)


# ---------------------------------------------------------------- requests


def test_replay_is_refused_to_a_caller_without_permission(name: str, make_stack: MakeStack) -> None:
    """An intern and an admin of one account share a scope; the stored secret is for the admin alone."""
    roles = Roles()
    stack = make_stack(name, authorize=roles)
    first = stack.post(headers=ADMIN)
    refused = stack.post(headers=INTERN)
    assert (refused.status_code, problem(refused)) == (403, "not-authorized")
    assert "an intern may not do this" in refused.json()["detail"]
    assert first.text not in refused.text
    assert replays(first, stack.post(headers=ADMIN))
    assert stack.runs == 1
    assert roles.asked == [(role, "POST /payments") for role in ("admin", "intern", "admin")]


def test_403_is_the_same_for_known_and_unknown_keys_and_asks_no_store(name: str, make_stack: MakeStack) -> None:
    stack = make_stack(name, authorize=Roles())
    stack.post("known", headers=ADMIN)
    stack.store.down = {"reserve", "read", "swap"}
    known, unknown = (stack.post(key, headers=INTERN) for key in ("known", "never-seen"))
    assert known.status_code == unknown.status_code == 403
    assert known.content == unknown.content
    assert "idempotency-expires" not in known.headers
    assert stack.runs == 1


def test_authorize_comes_after_the_tenant_and_before_the_key_is_read(name: str, make_stack: MakeStack) -> None:
    def tenant_of(request: Request) -> str:
        if "x-account" not in request.headers:
            raise NotAuthenticated
        return "acme"

    roles = Roles()
    stack = make_stack(name, scope=tenant_of, authorize=roles)
    assert (stack.post(headers=INTERN).status_code, roles.asked) == (401, [])
    assert stack.post("not a key", headers={**INTERN, "x-account": "a"}).status_code == 403
    assert stack.post("not a key", headers={**ADMIN, "x-account": "a"}).status_code == 400
    assert stack.post(headers={"x-account": "a"}).status_code == 401, "authorize may say that, too"


def test_request_without_a_key_is_not_authorized_by_us(name: str, make_stack: MakeStack) -> None:
    """The app's own authorization runs for it: nothing is replayed."""
    roles = Roles()
    stack = make_stack(name, authorize=roles, policy=Policy(required=False))
    stack.post(None, headers=INTERN)  # reaches a handler that has no operation, and fails
    assert roles.asked == []
    assert make_stack(name, authorize=roles).post(None, headers=INTERN).status_code == 400
    assert roles.asked == []


@pytest.mark.parametrize("name", ASGI_STACKS)
def test_authorize_may_be_async_under_asgi(name: str, make_stack: MakeStack) -> None:
    stack = make_stack(name, authorize=AsyncRoles())
    assert stack.post(headers=ADMIN).status_code == 201
    assert stack.post(headers=INTERN).status_code == 403


@pytest.mark.parametrize("name", WSGI_STACKS)
def test_async_authorize_is_refused_under_wsgi(name: str, make_stack: MakeStack) -> None:
    """As an async scope function is: nothing runs, and nothing is given away."""
    stack = make_stack(name, authorize=AsyncRoles())
    assert (stack.post(headers=ADMIN).status_code, stack.runs) == (500, 0)


@pytest.mark.parametrize("answer", [True, False, "admin"])
def test_authorize_that_returns_something_lets_nothing_pass(name: str, make_stack: MakeStack, answer: Any) -> None:
    """Its author meant False as a refusal: that must not be taken for a permission."""
    stack = make_stack(name, authorize=lambda request, operation: answer)
    assert (stack.post().status_code, stack.runs) == (500, 0)


def test_authorize_that_is_no_function_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="authorize"):
        OnceKey("memory://", scope=SINGLE_TENANT, authorize="admin")  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
def test_every_profile_has_words_for_403(make_stack: MakeStack, profile: str) -> None:
    answer = make_stack("asgi", authorize=Roles(), profile=profile).post(headers=INTERN)
    assert answer.status_code == 403
    assert "an intern may not do this" in answer.text


def test_openapi_declares_403_where_authorize_is_set() -> None:
    declared = [str(each) for each in situations(Policy(), authorizes=True)]
    assert "not-authorized" in declared
    assert "not-authorized" not in [str(each) for each in situations(Policy())]


@pytest.mark.parametrize("authorize", [Roles(), None])
def test_fastapi_document_declares_403_where_authorize_is_set(authorize: Roles | None) -> None:
    from fastapi import FastAPI

    from oncekey.web import fastapi

    app = FastAPI()
    app.post("/payments")(lambda: None)
    with OnceKey("memory://", scope=SINGLE_TENANT, authorize=authorize) as once:
        fastapi.protect(app, once)
        responses = app.openapi()["paths"]["/payments"]["post"]["responses"]
    assert ("403" in responses) == (authorize is not None)


@pytest.mark.parametrize("authorize", [Roles(), None])
def test_litestar_document_declares_403_where_authorize_is_set(authorize: Roles | None) -> None:
    from litestar import Litestar, post

    from oncekey.web.litestar import OnceKeyPlugin

    @post("/payments")
    async def pay() -> None: ...

    with OnceKey("memory://", scope=SINGLE_TENANT, authorize=authorize) as once:
        document = Litestar([pay], plugins=[OnceKeyPlugin(once)]).openapi_schema.to_schema()
    assert ("403" in document["paths"]["/payments"]["post"]["responses"]) == (authorize is not None)


# ---------------------------------------------------------------- the status endpoint


@pytest.fixture
def framework() -> str:
    return "starlette"


ENDPOINT = "GET /idempotency"


@pytest.mark.parametrize("roles", [Roles, AsyncRoles])
async def test_status_endpoint_authorizes_before_the_look_up(make_api: MakeApi, roles: type[Roles]) -> None:
    asked = roles()
    api = make_api(authorize=asked)
    api.app.mount("/idempotency", status_app(api.once))
    first = await api.post("k-1", headers=ADMIN)
    asked.asked.clear()
    known, unknown = [await api.client.get(f"/idempotency/{key}", headers=INTERN) for key in ("k-1", "k-2")]
    assert (known.status_code, known.content) == (403, unknown.content)
    assert asked.asked == [("intern", ENDPOINT)] * 2
    shown = await api.client.get("/idempotency/k-1", headers=ADMIN)
    assert (shown.status_code, shown.content) == (201, first.content)
    assert (await api.client.get("/idempotency/k-1")).status_code == 401


@pytest.mark.parametrize("roles", [Roles, AsyncRoles])
async def test_status_endpoint_hides_a_key_of_an_operation_that_is_not_allowed(
    make_api: MakeApi, roles: type[Roles]
) -> None:
    """Its operation is known only from the row: 404, as for a key that was never seen, since a 403 would tell."""
    asked = roles(**{ENDPOINT: True})
    api = make_api(authorize=asked)
    api.app.mount("/idempotency", status_app(api.once))
    await api.post("k-1", headers=ADMIN)
    known, unknown = [await api.client.get(f"/idempotency/{key}", headers=INTERN) for key in ("k-1", "k-2")]
    assert (known.status_code, known.content) == (404, unknown.content)
    assert list(known.headers) == list(unknown.headers)
    assert asked.asked[-3:] == [("intern", ENDPOINT), ("intern", "POST /payments"), ("intern", ENDPOINT)]


async def test_status_endpoint_authorizes_the_operation_that_is_named(make_api: MakeApi) -> None:
    roles = Roles(**{ENDPOINT: True})
    api = make_api(authorize=roles, policy=Policy(key_per="endpoint"))
    api.app.mount("/idempotency", status_app(api.once))
    await api.post("k-1", headers=ADMIN)
    asked = "/idempotency/k-1?operation=POST%20/payments"
    assert (await api.client.get(asked, headers=INTERN)).status_code == 403
    assert (await api.client.get(asked, headers=ADMIN)).status_code == 201


def test_wsgi_status_endpoint_authorizes_too() -> None:
    roles = Roles()
    app = Flask("secrets")

    @app.post("/secrets")
    def make() -> Any:
        return {"secret": "s3cr3t"}, 201

    with OnceKey("memory://", scope=SINGLE_TENANT, authorize=roles) as once:
        protect(app, once)
        client = Client(DispatcherMiddleware(app.wsgi_app, {"/idempotency": status_wsgi(once)}))
        client.post("/secrets", headers={**ADMIN, "Idempotency-Key": "k-1"})
        known, unknown = (client.get(f"/idempotency/{key}", headers=INTERN) for key in ("k-1", "k-2"))
        assert (known.status_code, known.data) == (403, unknown.data)
        assert client.get("/idempotency/k-1", headers=ADMIN).get_json() == {"secret": "s3cr3t"}
        roles.open = {ENDPOINT}
        known, unknown = (client.get(f"/idempotency/{key}", headers=INTERN) for key in ("k-1", "k-2"))
        assert (known.status_code, known.data) == (404, unknown.data)


def test_wsgi_status_endpoint_refuses_an_async_authorize() -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT, authorize=AsyncRoles()) as once:
        client = Client(status_wsgi(once))
        with pytest.raises(ConfigurationError, match="authorize function is async"):
            client.get("/k-1", headers=ADMIN)
