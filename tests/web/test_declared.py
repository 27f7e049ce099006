"""``@once.policy`` at the handler, and ``only="declared"``: which requests are protected, and under which policy."""

from __future__ import annotations

import functools
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, WebSocket
from flask import Blueprint, Flask
from flask.views import MethodView
from litestar import Controller, HttpMethod, Litestar, post
from litestar.handlers import HTTPRouteHandler
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Host, Mount, Route, Router, WebSocketRoute
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from oncekey import Policy
from oncekey.errors import ConfigurationError
from oncekey.web import flask as on_flask
from oncekey.web import wsgi
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.declared import Only
from oncekey.web.fastapi import protect as protect_fastapi
from oncekey.web.litestar import OnceKeyPlugin
from oncekey.web.starlette import protect
from tests.web.declaring_apps import FRAMEWORKS, ROUTES, ask, new_once, record_of, shop
from tests.web.litestar_parameters import FromPath

DECLARED = {
    "POST /pay": ("POST /pay", "repeatable"),
    "POST /orders/7": ("POST /orders/{id}", "transactional"),
    "PUT /orders/7": ("PUT /orders/{id}", "repeatable"),
}


async def handle(request: Any) -> Response:
    return PlainTextResponse("handled")


async def met(app: Any, once: Any, routes: Any = ROUTES) -> dict[str, tuple[str, str] | None]:
    """Of each route: the operation and the effects under which its key was taken; None: it was not taken."""
    found = {}
    for number, route in enumerate(routes):
        answer = await ask(app, route, f"key-{number}")
        assert answer.status_code < 300, (route, answer.status_code, answer.text)
        record = record_of(once, f"key-{number}")
        found[route] = None if record is None else (record.operation, str(record.effects))
    return found


# ---------------------------------------------------------------- the same in every framework


@pytest.mark.parametrize("above", [False, True], ids=["below", "above"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_declared_handler_runs_under_its_policy_and_others_under_the_apps(framework: str, above: bool) -> None:
    once = new_once()
    app = shop(framework, once, above=above)
    assert await met(app, once) == DECLARED | {
        "POST /login": None,
        "POST /other": ("POST /other", "external"),
        "DELETE /other": None,
    }


@pytest.mark.parametrize("above", [False, True], ids=["below", "above"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_only_declared_protects_declared_handlers_alone(framework: str, above: bool) -> None:
    once = new_once()
    app = shop(framework, once, "declared", above=above)
    assert await met(app, once) == DECLARED | {"POST /login": None, "POST /other": None, "DELETE /other": None}
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
    assert await met(app, once) == DECLARED | {
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


# ---------------------------------------------------------------- the declaration follows the handler


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_declaration_counts_for_its_handler_and_not_for_others_that_fit_the_path(framework: str) -> None:
    """A fixed path beside a pattern: each request has the policy of the handler that answers it."""
    once = new_once()

    def special(*_: Any) -> str:
        return "handled"

    def general(*_: Any, **__: Any) -> str:
        return "handled"

    once.policy(effects="repeatable")(general)
    app = with_two(framework, once, special, general)
    assert await met(app, once, ["POST /a/special", "POST /a/7"]) == {
        "POST /a/special": None,
        "POST /a/7": ("POST /a/{name}", "repeatable"),
    }


def with_two(framework: str, once: Any, special: Any, general: Any) -> Any:
    if framework == "flask":
        flask_app = Flask(__name__)
        flask_app.post("/a/<name>", endpoint="general")(general)
        flask_app.post("/a/special", endpoint="special")(special)
        return on_flask.protect(flask_app, once, only="declared")
    if framework == "litestar":

        @post("/a/special")
        async def one() -> str:
            return "handled"

        @post("/a/{name:str}")
        @once.policy(effects="repeatable")
        async def any_other(name: FromPath[str]) -> str:
            return "handled"

        return Litestar([one, any_other], plugins=[OnceKeyPlugin(once, only="declared")])
    if framework == "fastapi":
        api = FastAPI()

        @api.post("/a/special")
        def first() -> str:
            return "handled"

        @api.post("/a/{name}")
        @once.policy(effects="repeatable")
        def second(name: str) -> str:
            return "handled"

        protect_fastapi(api, once, only="declared")
        return api

    @once.policy(effects="repeatable")
    def last(request: Any) -> Response:
        return PlainTextResponse("handled")

    app = Starlette(
        routes=[Route("/a/special", handle, methods=["POST"]), Route("/a/{name}", last, methods=["POST"])],
    )
    protect(app, once, only="declared")
    return app


async def test_converters_decide_which_handler_is_meant() -> None:
    """``{id:int}`` does not fit ``x``: the next route has that request, and its declaration."""
    once = new_once()

    @once.policy(effects="repeatable")
    async def by_name(request: Any) -> Response:
        return await handle(request)

    routes = [Route("/a/{id:int}", handle, methods=["POST"]), Route("/a/{name}", by_name, methods=["POST"])]
    app = Starlette(routes=routes)
    protect(app, once, only="declared")
    assert await met(app, once, ["POST /a/7", "POST /a/x"]) == {
        "POST /a/7": None,
        "POST /a/x": ("POST /a/{name}", "repeatable"),
    }


async def test_function_on_two_paths_is_declared_once_for_both() -> None:
    once = new_once()
    router = APIRouter()

    @router.post("/pay")
    @once.policy(effects="repeatable")
    async def pay() -> str:
        return "handled"

    app = FastAPI()
    app.include_router(router, prefix="/v1")
    app.include_router(router, prefix="/v2")
    protect_fastapi(app, once, only="declared")
    assert await met(app, once, ["POST /v1/pay", "POST /v2/pay"]) == {
        "POST /v1/pay": ("POST /v1/pay", "repeatable"),
        "POST /v2/pay": ("POST /v2/pay", "repeatable"),
    }


async def test_nested_routers_and_route_added_after_first_request() -> None:
    once = new_once()
    inner, outer, app = APIRouter(), APIRouter(), FastAPI()

    @inner.post("/pay/{id}")
    @once.policy(effects="repeatable")
    async def pay(id: str) -> str:
        return "handled"

    outer.include_router(inner, prefix="/inner")
    protect_fastapi(app, once, only="declared")
    app.include_router(outer, prefix="/outer")
    assert (await ask(app, "POST /late", "early")).status_code == 404

    @app.post("/late")
    @once.policy(effects="repeatable")
    async def late() -> str:
        return "handled"

    assert await met(app, once, ["POST /late", "POST /outer/inner/pay/3"]) == {
        "POST /late": ("POST /late", "repeatable"),
        "POST /outer/inner/pay/3": ("POST /outer/inner/pay/{id}", "repeatable"),
    }


async def test_handlers_of_mounted_apps_hosts_and_class_endpoints_are_found() -> None:
    once = new_once()

    class Things(HTTPEndpoint):
        async def get(self, request: Any) -> Response:
            return await handle(request)

        @once.policy(effects="repeatable")
        async def post(self, request: Any) -> Response:
            return await handle(request)

        async def delete(self, request: Any) -> Response:
            return await handle(request)

    @once.policy(effects="transactional")
    class Others(HTTPEndpoint):
        async def post(self, request: Any) -> Response:
            return await handle(request)

        @once.policy(effects="repeatable")
        async def put(self, request: Any) -> Response:
            return await handle(request)

    class Heirs(Others):
        async def post(self, request: Any) -> Response:  # does something else, perhaps
            return await handle(request)

    @once.policy(effects="repeatable")
    def hosted(request: Any) -> Response:
        return PlainTextResponse("handled")

    nothing = Middleware(Anything)
    app = Starlette(
        routes=[
            Mount("/sub/{tenant}", routes=[Route("/things", Things)], middleware=[nothing]),
            Mount("/app", app=Starlette(routes=[Route("/others", Others), Route("/heirs", Heirs)])),
            Host("shop.test", app=Router([Route("/hosted", functools.partial(hosted), methods=["POST"])])),
            Route("/hosted", handle, methods=["POST"]),
        ]
    )
    protect(app, once, only="declared")
    routes = ["POST /sub/a/things", "DELETE /sub/a/things", "GET /sub/a/things", "POST /app/others", "PUT /app/others"]
    assert await met(app, once, [*routes, "POST /app/heirs", "PUT /app/heirs", "POST /hosted"]) == {
        "POST /sub/a/things": ("POST /sub/{tenant}/things", "repeatable"),
        "DELETE /sub/a/things": None,
        "GET /sub/a/things": None,
        "POST /app/others": ("POST /app/others", "transactional"),
        "PUT /app/others": ("PUT /app/others", "repeatable"),
        "POST /app/heirs": None,
        "PUT /app/heirs": ("PUT /app/heirs", "repeatable"),
        "POST /hosted": ("POST /hosted", "repeatable"),
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        other_host = await client.post("http://other.test/hosted", headers={"Idempotency-Key": "other"})
    assert (other_host.status_code, record_of(once, "other")) == (200, None)


class Anything:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


async def test_object_that_is_called_has_the_declaration_of_its_method_or_its_class() -> None:
    once = new_once()
    app = FastAPI()

    class Pay:
        @once.policy(effects="repeatable")
        def __call__(self) -> str:
            return "handled"

    @once.policy(effects="repeatable")
    class Refund:
        def __call__(self) -> str:
            return "handled"

        def method(self) -> str:
            return "handled"

    app.post("/pay")(Pay())
    app.post("/refund")(Refund())
    app.post("/method")(Refund().method)
    protect_fastapi(app, once, only="declared")
    assert await met(app, once, ["POST /pay", "POST /refund", "POST /method"]) == {
        "POST /pay": ("POST /pay", "repeatable"),
        "POST /refund": ("POST /refund", "repeatable"),
        "POST /method": None,
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_safe_methods_of_a_declared_handler_pass(framework: str) -> None:
    once = new_once()
    methods = ["GET", "HEAD", "OPTIONS", "POST"]
    app: Any
    if framework == "starlette":
        app = Starlette(routes=[Route("/both", once.policy(effects="repeatable")(by_itself), methods=methods)])
        protect(app, once)
    elif framework == "fastapi":
        app = FastAPI()
        app.api_route("/both", methods=methods)(once.policy(effects="repeatable")(lambda: "handled"))
        protect_fastapi(app, once)
    elif framework == "litestar":

        @HTTPRouteHandler("/both", http_method=[HttpMethod.GET, HttpMethod.HEAD, HttpMethod.POST], status_code=200)
        @once.policy(effects="repeatable")
        async def both() -> None: ...

        app = Litestar([both], plugins=[OnceKeyPlugin(once)])
    else:
        app = Flask(__name__)
        app.route("/both", methods=methods)(once.policy(effects="repeatable")(lambda: "handled"))
        on_flask.protect(app, once)
    for method in ("GET", "HEAD", "OPTIONS"):
        assert (await ask(app, f"{method} /both")).status_code < 300, method
    assert (await ask(app, "POST /both")).status_code == 400


def by_itself(request: Any) -> Response:
    return PlainTextResponse("handled")


async def test_flask_app_under_a_prefix_goes_by_its_own_rules() -> None:
    once = new_once()
    app = Flask(__name__)
    app.post("/pay")(once.policy(effects="repeatable")(lambda: "handled"))
    app.post("/other", endpoint="other")(lambda: "handled")
    on_flask.protect(app, once, only="declared")
    outer = Flask("outer")
    outer.wsgi_app = DispatcherMiddleware(outer.wsgi_app, {"/api": app})  # type: ignore[method-assign]
    assert await met(outer, once, ["POST /api/pay", "POST /api/other"]) == {
        "POST /api/pay": ("POST /pay", "repeatable"),
        "POST /api/other": None,
    }


async def test_app_mounted_in_an_unprotected_one_goes_by_its_own_paths() -> None:
    once = new_once()

    @once.policy(effects="repeatable")
    async def pay(request: Any) -> Response:
        return await handle(request)

    inner = Starlette(routes=[Route("/pay", pay, methods=["POST"]), Route("/other", handle, methods=["POST"])])
    protect(inner, once, only="declared")
    app = Starlette(routes=[Mount("/api", app=inner)])
    assert await met(app, once, ["POST /api/pay", "POST /api/other"]) == {
        "POST /api/pay": ("POST /pay", "repeatable"),
        "POST /api/other": None,
    }


async def test_litestar_controllers_sync_handlers_and_late_routes() -> None:
    once = new_once()

    class Payments(Controller):
        path = "/payments"

        @post("/a")
        @once.policy(effects="repeatable")
        async def first(self) -> str:
            return "handled"

        @once.policy(effects="repeatable")
        @post("/b/{id:int}", sync_to_thread=True)
        def second(self, id: FromPath[int]) -> str:
            return "handled"

        @post("/c")
        async def third(self) -> str:
            return "handled"

    @post("/late")
    @once.policy(effects="repeatable")
    async def late() -> str:
        return "handled"

    app = Litestar([Payments], plugins=[OnceKeyPlugin(once, only="declared")])
    routes = ["POST /payments/a", "POST /payments/b/7", "POST /payments/c"]
    expected: dict[str, Any] = {
        "POST /payments/a": ("POST /payments/a", "repeatable"),
        "POST /payments/b/7": ("POST /payments/b/{id}", "repeatable"),
        "POST /payments/c": None,
    }
    assert await met(app, once, routes) == expected
    app.register(late)
    assert (await ask(app, "POST /late", "late")).status_code == 201
    record = record_of(once, "late")
    assert record is not None
    assert record.operation == "POST /late"


async def test_flask_blueprints_method_views_and_late_routes() -> None:
    once = new_once()
    blueprint = Blueprint("billing", __name__)

    @blueprint.post("/pay/<path:rest>")
    @once.policy(effects="repeatable")
    def pay(rest: str) -> str:
        return "handled"

    class Things(MethodView):
        @once.policy(effects="repeatable")
        def post(self) -> str:
            return "handled"

        def delete(self) -> str:
            return "handled"

    @once.policy(effects="transactional")
    class Others(MethodView):
        def post(self) -> str:
            return "handled"

    app = Flask(__name__)
    on_flask.protect(app, once, only="declared")
    app.register_blueprint(blueprint, url_prefix="/v1")
    app.register_blueprint(blueprint, url_prefix="/v2", name="again")
    app.add_url_rule("/things", view_func=Things.as_view("things"))
    app.add_url_rule("/others/", view_func=Others.as_view("others"))
    routes = ["POST /v1/pay/a/b", "POST /v2/pay/a", "POST /things", "DELETE /things", "POST /others/"]
    assert await met(app, once, routes) == {
        "POST /v1/pay/a/b": ("POST /v1/pay/{rest}", "repeatable"),
        "POST /v2/pay/a": ("POST /v2/pay/{rest}", "repeatable"),
        "POST /things": ("POST /things", "repeatable"),
        "DELETE /things": None,
        "POST /others/": ("POST /others/", "transactional"),
    }


async def test_dependencies_of_a_declared_handler_run_and_its_refusals_use_no_key() -> None:
    once = new_once()
    app = FastAPI()
    protect_fastapi(app, once, only="declared")
    ran: list[str] = []

    async def dependency() -> str:
        ran.append("dependency")
        return "given"

    @app.post("/pay")
    @once.policy(effects="repeatable")
    async def pay(amount: int, given: str = Depends(dependency)) -> str:
        return given

    assert (await ask(app, "POST /pay?amount=x", "k")).status_code == 422
    assert record_of(once, "k") is None
    assert (await ask(app, "POST /pay?amount=1", "k")).json() == "given"
    assert (await ask(app, "POST /pay?amount=1", "k")).json() == "given"
    assert ran == ["dependency"] * 2  # of the refused one, and of the first; not of the replay


async def test_optional_key_at_the_handler_lets_requests_without_one_pass() -> None:
    once = new_once()
    app = FastAPI()
    protect_fastapi(app, once, only="declared")

    @app.post("/pay")
    @once.policy(effects="repeatable", required=False)
    async def pay() -> str:
        return "handled"

    assert (await ask(app, "POST /pay")).status_code == 200
    assert (await ask(app, "POST /pay", "k")).headers["idempotency-key"] == "k"


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
        assert await met(app, once, ["POST /pay", "POST /other"]) == {
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
    assert await met(app, once, ["POST /pay", "POST /other"]) == {
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
    assert await met(app, once, ["POST /pay"]) == {"POST /pay": ("POST /pay", "repeatable")}
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
