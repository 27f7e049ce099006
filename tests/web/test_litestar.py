"""Litestar: which requests use up their key, which never began, and what the OpenAPI document says."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from litestar import Controller, Litestar, Request, Response, Router, get, post
from litestar.config.csrf import CSRFConfig
from litestar.di import Provide
from litestar.exceptions import HTTPException, NotAuthorizedException, ValidationException
from litestar.types import ASGIApp, Receive, Scope, Send

from oncekey import (
    SINGLE_TENANT,
    NotAuthenticated,
    NotExecuted,
    OnceKey,
    OnceKeyError,
    OutcomeUnknown,
    Policy,
    Refused,
)
from oncekey.core.record import Record
from oncekey.errors import ConfigurationError
from oncekey.web.litestar import CurrentOperation, OnceKeyPlugin
from tests.web.litestar_parameters import FromPath, HeaderParameter, JSONBody, NamedDependency

GOOD = {"amount": 10}
BAD = {"amount": "ten"}


@dataclass
class Payment:
    amount: int


@pytest.fixture(params=["memory", "sqlite"])
def once(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnceKey]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/keys.db"
    with OnceKey(url, scope=SINGLE_TENANT) as made:
        yield made


def fresh() -> str:
    return str(uuid.uuid4())


def make(once: OnceKey, *handlers: Any, **options: Any) -> Litestar:
    return Litestar(list(handlers), plugins=[OnceKeyPlugin(once)], logging_config=None, **options)


async def send(app: Any, key: str, path: str = "/payments", **request: Any) -> httpx.Response:
    if "content" not in request:
        request.setdefault("json", GOOD)
    headers = {"Idempotency-Key": key, **request.pop("headers", {})}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.request(request.pop("method", "POST"), path, headers=headers, **request)


def row(once: OnceKey, key: str) -> Record | None:
    return once.store.read([("single-tenant", key)])[0]


def state(once: OnceKey, key: str) -> str | None:
    found = row(once, key)
    return None if found is None else str(found.state)


@post("/payments")
async def pay(data: JSONBody[Payment], operation: CurrentOperation) -> dict[str, Any]:
    return {"paid": data.amount, "key": operation.key, "attempt": operation.attempt}


@post("/payments", sync_to_thread=True)
def pay_in_a_thread(data: JSONBody[Payment], operation: CurrentOperation) -> dict[str, Any]:
    return {"paid": data.amount, "key": operation.key, "attempt": operation.attempt}


class Payments(Controller):
    path = "/payments"

    @post()
    async def create(self, data: JSONBody[Payment], operation: CurrentOperation) -> dict[str, Any]:
        return {"paid": data.amount, "key": operation.key, "attempt": operation.attempt}


@pytest.mark.parametrize("handler", [pay, pay_in_a_thread, Payments, Router("/", route_handlers=[pay])])
@pytest.mark.parametrize(
    "bad",
    [{"json": BAD}, {"json": {}}, {"content": b'{"amount": '}, {"content": b""}],
    ids=["type", "less", "cut", "no"],
)
async def test_a_bad_body_does_not_use_up_the_key(once: OnceKey, handler: Any, bad: dict[str, Any]) -> None:
    """400 by validation leaves no row; the corrected body runs under the same key, and its retry is a replay."""
    app, key = make(once, handler), fresh()
    assert (await send(app, key, **bad)).status_code == 400
    assert row(once, key) is None
    first = await send(app, key)
    assert (first.status_code, first.json()) == (201, {"paid": 10, "key": key, "attempt": 1})
    again = await send(app, key)
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")


async def test_a_handler_that_raises_the_error_itself_did_begin(once: OnceKey) -> None:
    """ValidationException out of the handler is its answer: stored as final, and replayed."""
    calls = []

    @post("/payments")
    async def handler(data: JSONBody[Payment]) -> None:
        calls.append(data)
        raise ValidationException("too little")

    app, key = make(once, handler), fresh()
    first = await send(app, key)
    assert (first.status_code, (await send(app, key)).content, len(calls)) == (400, first.content, 1)
    assert state(once, key) == "failed"


async def test_a_handler_that_fails_in_litestars_code_did_begin(once: OnceKey) -> None:
    """litestar's own exception, raised below a handler's frame, is the handler's."""

    @post("/payments")
    async def handler(request: Request[Any, Any, Any]) -> None:
        request.app.asgi_router.handle_routing(path="/nowhere", method="POST")

    app, key = make(once, handler), fresh()
    assert (await send(app, key)).status_code == 404
    assert state(once, key) == "failed"


async def test_the_apps_own_exception_handler_is_kept(once: OnceKey) -> None:
    """Whatever the answer to a validation error looks like, the key is spared."""

    def mine(request: Any, error: Exception) -> Response[str]:
        return Response("mine", status_code=418)

    app, key = make(once, pay, exception_handlers={ValidationException: mine}), fresh()
    assert (await send(app, key, json=BAD)).text == "mine"
    assert row(once, key) is None


@pytest.mark.parametrize("body", [{"json": BAD}, {"content": b'{"amount": '}], ids=["type", "cut"])
async def test_validation_handler_that_fails_leaves_the_key_unused(once: OnceKey, body: dict[str, Any]) -> None:
    def fails(request: Any, error: Exception) -> Response[str]:
        raise RuntimeError("the page of this error is missing")

    app, key = make(once, pay, exception_handlers={400: fails}), fresh()
    with suppress(RuntimeError):
        assert (await send(app, key, **body)).status_code == 500
    assert row(once, key) is None
    assert (await send(app, key)).status_code == 201


async def test_a_dependency_that_used_a_verb_has_begun(once: OnceKey) -> None:
    """A verb before validation may have had effects: the 400 is stored, and the key used."""
    names = []

    async def charge(operation: CurrentOperation) -> str:
        names.append(operation.downstream_key("charge"))
        return names[-1]

    @post("/payments", dependencies={"charge": Provide(charge)})
    async def handler(charge: NamedDependency[str], data: JSONBody[Payment]) -> None: ...

    app, key = make(once, handler), fresh()
    assert (await send(app, key, json=BAD)).status_code == 400
    assert (await send(app, key, json=BAD)).headers["idempotency-replayed"] == "true"
    assert (state(once, key), len(names)) == ("failed", 1)


async def test_a_dependency_of_the_wrong_type_is_no_refusal(once: OnceKey) -> None:
    """litestar's 500 for a mistake of the app says nothing about the request: its outcome is unknown."""

    @post("/payments", dependencies={"charge": Provide(lambda: "charged", sync_to_thread=False)})
    async def handler(charge: NamedDependency[int]) -> None: ...

    app, key = make(once, handler), fresh()
    assert (await send(app, key)).status_code == 500
    assert state(once, key) == "unknown"


async def test_a_later_attempt_stays_retryable(once: OnceKey) -> None:
    """A refusal of the second attempt neither discards the key nor is final."""
    statuses = [429, 201]

    @post("/payments")
    async def handler(
        data: JSONBody[Payment], version: Annotated[int, HeaderParameter(name="version")]
    ) -> Response[None]:
        return Response(None, status_code=statuses.pop(0))

    app, key = make(once, handler), fresh()
    assert (await send(app, key, headers={"version": "1"})).status_code == 429
    assert (await send(app, key, headers={"version": "one"})).status_code == 400
    assert state(once, key) == "failed_retryable"
    assert (await send(app, key, headers={"version": "1"})).status_code == 201


@pytest.mark.parametrize(
    ("error", "status", "then"),
    [
        (Refused("not so", status=422), 422, None),
        (NotExecuted(), 503, "failed_retryable"),
        (OutcomeUnknown(), 409, "unknown"),
        (ValueError(), 500, "unknown"),
        (HTTPException(status_code=402), 402, "failed"),
        (NotAuthorizedException(), 401, "failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("catch_all", [False, True])
async def test_exceptions_of_oncekey_raised_by_a_handler_decide_its_key(
    once: OnceKey, error: Exception, status: int, then: str | None, catch_all: bool
) -> None:
    """Exceptions that speak to oncekey reach it although litestar answers every exception; others count as raised."""

    @post("/payments")
    async def handler() -> None:
        raise error

    mine = {OnceKeyError: lambda request, error: Response("mine", status_code=500)} if catch_all else {}
    app, key = make(once, handler, exception_handlers=mine), fresh()
    assert (await send(app, key)).status_code == status
    assert state(once, key) == then


@pytest.mark.parametrize(
    ("policy", "then"),
    [
        (Policy(), "unknown"),
        (Policy(on_server_error="retry"), "failed_retryable"),
        (Policy(effects="transactional"), "failed_retryable"),
        (Policy(effects="phased"), "failed_retryable"),
        (Policy(effects="repeatable"), "failed_retryable"),
    ],
    ids=["external", "external-retry", "transactional", "phased", "repeatable"],
)
async def test_returned_500_follows_the_effects(policy: Policy, then: str) -> None:
    @post("/payments")
    async def handler() -> Response[None]:
        return Response(None, status_code=500)

    with OnceKey("memory://", scope=SINGLE_TENANT, policy=policy) as once:
        app, key = make(once, handler), fresh()
        assert (await send(app, key)).status_code == 500
        assert state(once, key) == then


def refusing(app: ASGIApp) -> ASGIApp:
    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        raise NotAuthorizedException("not you")

    return middleware


async def test_401_of_middleware_before_the_handler_leaves_the_key_unused(once: OnceKey) -> None:

    @post("/payments", middleware=[refusing])
    async def handler() -> None: ...

    app, key = make(once, handler), fresh()
    assert (await send(app, key)).status_code == 401
    assert row(once, key) is None


async def test_csrf_leaves_no_row(once: OnceKey) -> None:
    """litestar's own middleware refuses before the operation begins."""
    app, key = make(once, pay, csrf_config=CSRFConfig(secret="s")), fresh()
    assert (await send(app, key)).status_code == 403
    assert row(once, key) is None


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/nowhere", 404), ("PATCH", "/payments", 405)])
async def test_request_without_a_route_leaves_no_row(once: OnceKey, method: str, path: str, status: int) -> None:
    """Routing comes before middleware: unknown paths and methods leave no row."""
    app, key = make(once, pay), fresh()
    assert (await send(app, key, path, method=method)).status_code == status
    assert row(once, key) is None


async def test_scope_function_sees_the_authenticated_user() -> None:
    """Our middleware runs inside the app's own, so the scope function sees the user. A request without one gets 401."""

    def authenticating(app: ASGIApp) -> ASGIApp:
        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            scope["user"] = dict(scope["headers"]).get(b"user", b"").decode()
            await app(scope, receive, send)

        return middleware

    def tenant(request: Any) -> str:
        if not request.raw["user"]:
            raise NotAuthenticated
        return str(request.raw["user"])

    with OnceKey("memory://", scope=tenant) as once:
        app, key = make(once, pay, middleware=[authenticating]), fresh()
        assert (await send(app, key)).status_code == 401
        assert (await send(app, key, headers={"user": "ann"})).status_code == 201
        assert once.store.read([("ann", key)])[0] is not None


def test_openapi_document_declares_protected_operations(tmp_path: Path) -> None:
    """Protected operations declare the key in a valid document; others, and the shared default config, do not."""

    @get("/payments")
    async def listing() -> None: ...

    @post("/payments/{payment_id:int}/refund")
    async def refund(payment_id: FromPath[int], operation: CurrentOperation) -> None: ...

    @post("/login")
    async def login() -> None: ...

    routes: dict[str, Policy | None] = {"POST /login": None, "POST /payments/{id}/refund": Policy(required=False)}
    with OnceKey("memory://", scope=SINGLE_TENANT, routes=routes) as once:
        made: dict[str, Any] = make(once, pay, listing, refund, login).openapi_schema.to_schema()
    paths = made["paths"]
    assert "x-idempotency" in paths["/payments"]["post"]
    assert [item["name"] for item in paths["/payments"]["post"]["parameters"]] == ["Idempotency-Key"]
    refunding = [item["name"] for item in paths["/payments/{payment_id}/refund"]["post"]["parameters"]]
    assert refunding == ["payment_id", "Idempotency-Key"]
    assert paths["/payments/{payment_id}/refund"]["post"]["x-idempotency"]["required"] is False
    assert set(paths["/payments"]["post"]["responses"]["400"]["content"]) == {
        "application/json",
        "application/problem+json",
    }
    for method, path in (("get", "/payments"), ("post", "/login")):
        assert "x-idempotency" not in paths[path][method]
    assert "x-idempotency" not in str(Litestar([pay_alone]).openapi_schema.to_schema())
    pytest.importorskip("openapi_spec_validator").OpenAPIV31SpecValidator(made).validate()


@post("/payments")
async def pay_alone(data: JSONBody[Payment]) -> None: ...


async def test_served_document_declares_protected_operations(once: OnceKey) -> None:
    """/schema/openapi.json is the declared document, also where the app has no lifespan."""
    served = await send(make(once, pay), fresh(), "/schema/openapi.json", method="GET")
    assert "x-idempotency" in served.json()["paths"]["/payments"]["post"]
    assert make(once, pay, openapi_config=None).openapi_config is None


async def test_the_lifespan_checks_the_store_and_lets_it_go(tmp_path: Path) -> None:
    """Startup creates the tables of a SQLite file; shutdown closes the engine."""
    once = OnceKey(f"sqlite:///{tmp_path}/new.db", scope=SINGLE_TENANT)
    app = make(once, pay)
    async with app.lifespan():
        assert (tmp_path / "new.db").exists()
        assert (await send(app, fresh())).status_code == 201
    assert once.engine.closed


@pytest.mark.parametrize("name", ["operation", "op"])
async def test_the_name_of_the_dependency(once: OnceKey, name: str) -> None:
    """It can be chosen, and one that the app has already is an error at start."""
    own: dict[str, Callable[[], str]] = {name: lambda: "mine"}
    plugin = OnceKeyPlugin(once, dependency=name)
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        Litestar(
            [], plugins=[plugin], dependencies={key: Provide(value, sync_to_thread=False) for key, value in own.items()}
        )


async def test_no_operation_on_an_exempt_route(once: OnceKey) -> None:
    """Asking for the operation of a route that has none is the developer's mistake: 500, and the log says why."""
    exempt = OnceKey(once.store, scope=SINGLE_TENANT, routes={"POST /payments": None})
    app = make(exempt, pay, debug=True)
    answer = await send(app, fresh())
    assert (answer.status_code, "the route is not protected" in answer.text) == (500, True)
    exempt.close()
