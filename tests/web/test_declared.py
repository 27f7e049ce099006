"""``@once.policy`` at the handler, and ``only="declared"``: which requests are protected, and under which policy."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

from oncekey import Policy
from oncekey.errors import ConfigurationError
from oncekey.web import wsgi
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.declared import Only
from oncekey.web.fastapi import protect as protect_fastapi
from oncekey.web.starlette import protect
from tests.web.declaring_apps import DECLARED, FRAMEWORKS, ask, handle, new_once, record_of, shop, taken_under

# ---------------------------------------------------------------- the same in every framework


@pytest.mark.parametrize("above", [False, True], ids=["below", "above"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_declared_handler_runs_under_its_policy_and_others_under_the_apps(framework: str, above: bool) -> None:
    once = new_once()
    app = shop(framework, once, above=above)
    assert await taken_under(app, once) == DECLARED | {
        "POST /login": None,
        "POST /other": ("POST /other", "external"),
        "DELETE /other": None,
    }


@pytest.mark.parametrize("above", [False, True], ids=["below", "above"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_only_declared_protects_declared_handlers_alone(framework: str, above: bool) -> None:
    once = new_once()
    app = shop(framework, once, "declared", above=above)
    assert await taken_under(app, once) == DECLARED | {"POST /login": None, "POST /other": None, "DELETE /other": None}
    assert (await ask(app, "POST /pay")).status_code == 400  # its key is required
    assert (await ask(app, "POST /other")).status_code < 300


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_retry_of_declared_handler_is_replayed(framework: str) -> None:
    app = shop(framework, new_once(), "declared")
    first, again = [await ask(app, "POST /pay", "k") for _ in range(2)]
    assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
    assert again.content == first.content


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_undeclared_route_passes_as_if_oncekey_were_not_there(framework: str) -> None:
    """Neither its key is read nor its body held: both would be refused."""
    once = new_once(policy=Policy(max_request_bytes=10, key_format="uuid"))
    app = shop(framework, once, "declared")
    answer = await ask(app, "POST /other", "not a uuid", content=b"x" * 100)
    assert answer.status_code < 300
    assert not any(name.startswith("idempotency") for name in answer.headers)


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_only_declared_counts_listed_routes_too(framework: str) -> None:
    once = new_once(routes={"POST /other": Policy(effects="repeatable"), "DELETE /other": None})
    app = shop(framework, once, "declared")
    assert await taken_under(app, once) == DECLARED | {
        "POST /login": None,
        "POST /other": ("POST /other", "repeatable"),
        "DELETE /other": None,
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_unknown_path_and_wrong_method_of_declared_handler_use_no_key(framework: str) -> None:
    once = new_once()
    app = shop(framework, once, "declared")
    assert (await ask(app, "POST /nowhere", "k-1")).status_code == 404
    assert (await ask(app, "PATCH /pay", "k-2")).status_code == 405
    assert [record_of(once, key) for key in ("k-1", "k-2")] == [None, None]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_policy_returns_the_same_function(framework: str) -> None:
    once = new_once()

    def handler() -> None: ...

    assert once.policy(effects="repeatable")(handler) is handler
    assert list(vars(handler)) == ["__oncekey_declared__"]


# ---------------------------------------------------------------- what the decorator takes


def test_options_replace_the_apps_policy_as_a_whole_as_in_routes() -> None:
    once = new_once(policy=Policy(effects="transactional", key_format="uuid"))
    assert declared(once, once.policy(in_flight="wait")) == Policy(in_flight="wait")
    assert declared(once, once.policy(Policy(required=False))) == Policy(required=False)
    assert declared(once, once.policy()) == once.default_policy
    assert declared(once, once.policy(None)) is None
    assert declared(once, once.exempt) is None


def declared(once: Any, declare: Any) -> Policy | None:
    def handler() -> None: ...

    found = once.declarations.of(declare(handler), "POST")
    assert found is not None
    policy: Policy | None = found.policy
    return policy


def handler_for_refusals() -> None: ...


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda once: once.policy(handler_for_refusals), "with its parentheses"),
        (lambda once: once.policy(Policy(), effects="external"), "the options of a Policy, or one Policy"),
        (lambda once: once.policy(effect="external"), "unexpected keyword argument 'effect'"),
        (lambda once: once.policy(effects="nowhere"), "it takes one of external"),
        (lambda once: once.policy(in_flight="accepted"), r"OnceKey\(status_url="),
        (lambda once: once.policy()("pay"), "put it directly above the function"),
        (lambda once: once.policy()(once.policy()(lambda: None)), "one handler has one"),
    ],
)
def test_wrong_declaration_is_refused(declare: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        declare(new_once())


# ---------------------------------------------------------------- without protect()


async def test_plain_middleware_finds_the_handlers_of_a_starlette_app() -> None:
    for wrap in (True, False):
        once = new_once()

        @once.policy(effects="repeatable")
        async def pay(request: Any) -> Response:
            return await handle(request)

        app: Any = Starlette(routes=[Route("/pay", pay, methods=["POST"]), Route("/other", handle, methods=["POST"])])
        if wrap:
            app = IdempotencyMiddleware(app, once, only="declared")
        else:
            app.add_middleware(IdempotencyMiddleware, once=once, only="declared")
        assert await taken_under(app, once, ["POST /pay", "POST /other"]) == {
            "POST /pay": ("POST /pay", "repeatable"),
            "POST /other": None,
        }


async def test_only_declared_around_any_app_goes_by_listed_routes() -> None:
    seen: list[Any] = []

    async def raw(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive))
        await PlainTextResponse("handled")(scope, receive, send)

    once = new_once(routes={"POST /pay": Policy(effects="repeatable")})
    app = IdempotencyMiddleware(raw, once, only="declared")
    assert await taken_under(app, once, ["POST /pay", "POST /other"]) == {
        "POST /pay": ("POST /pay", "repeatable"),
        "POST /other": None,
    }

    async def receive() -> Any:
        raise AssertionError("the body of an unprotected request was read")

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "method": "POST", "path": "/other", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    assert seen[-1] == (scope, receive)
    assert seen[-1][0] is scope


def test_only_declared_around_a_wsgi_app_goes_by_listed_routes() -> None:
    def raw(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"handled"]

    once = new_once(routes={"POST /pay": Policy(effects="repeatable")})
    with httpx.Client(transport=httpx.WSGITransport(wsgi.IdempotencyMiddleware(raw, once, only="declared"))) as client:
        assert client.post("http://shop.test/other").status_code == 200
        assert client.post("http://shop.test/pay").status_code == 400
        assert client.post("http://shop.test/pay", headers={"Idempotency-Key": "k"}).status_code == 200


async def test_websocket_of_the_same_path_is_left_alone() -> None:
    once = new_once()

    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    @once.policy(effects="repeatable")
    async def pay(request: Any) -> Response:
        return await handle(request)

    app = Starlette(routes=[WebSocketRoute("/pay", socket), Route("/pay", pay, methods=["POST"])])
    protect(app, once, only="declared")
    assert await taken_under(app, once, ["POST /pay"]) == {"POST /pay": ("POST /pay", "repeatable")}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "websocket", "path": "/pay", "headers": [], "query_string": b""}, receive, send)
    assert sent == ["websocket.accept", "websocket.close"]


# ---------------------------------------------------------------- OpenAPI


@pytest.mark.parametrize("framework", ["fastapi", "litestar"])
async def test_openapi_declares_the_key_at_declared_operations_alone(framework: str) -> None:
    expected: list[tuple[Only | None, Any]] = [
        ("declared", DECLARED_OPERATIONS),
        (None, DECLARED_OPERATIONS | {("/other", "post")}),
    ]
    for only, protected in expected:
        app = shop(framework, new_once(), only)
        url = "/openapi.json" if framework == "fastapi" else "/schema/openapi.json"
        paths = (await ask(app, f"GET {url}")).json()["paths"]
        said = {
            (path, method): operation["x-idempotency"]["effects"]
            for path, item in paths.items()
            for method, operation in item.items()
            if "x-idempotency" in operation
        }
        assert set(said) == protected
        assert said["/orders/{id}", "post"] == "transactional"


DECLARED_OPERATIONS = {("/pay", "post"), ("/orders/{id}", "post"), ("/orders/{id}", "put")}


async def test_openapi_of_mounted_and_included_routes_follows_the_handler() -> None:
    once = new_once()
    app, mounted, router = FastAPI(), FastAPI(), APIRouter()
    protect_fastapi(app, once, only="declared")

    @router.post("/pay/{id:int}")
    @once.policy(effects="repeatable")
    async def pay(id: int) -> None: ...

    @mounted.post("/other")
    async def other() -> None: ...

    app.include_router(router, prefix="/v1")
    mounted.include_router(router)
    app.mount("/sub", mounted)
    for url, path, without in (("/openapi.json", "/v1/pay/{id}", None), ("/sub/openapi.json", "/pay/{id}", "/other")):
        paths = (await ask(app, f"GET {url}")).json()["paths"]
        assert "x-idempotency" in paths[path]["post"]
        assert without is None or "x-idempotency" not in paths[without]["post"]


async def test_status_and_settling_know_the_policy_of_a_declared_operation() -> None:
    once = new_once()
    app = shop("fastapi", once, "declared")
    await ask(app, "POST /pay", "k")
    assert once.policy_of("POST /orders/{id}") == Policy(effects="transactional")
    assert once.policy_of("POST /other") == once.default_policy
