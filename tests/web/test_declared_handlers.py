"""The declaration follows the handler: which handlers it counts for, however the framework finds them."""

from __future__ import annotations

import functools
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from flask import Flask
from litestar import HttpMethod, Litestar, post
from litestar.handlers import HTTPRouteHandler
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Host, Mount, Route, Router

from oncekey.web import flask as on_flask
from oncekey.web.fastapi import protect as protect_fastapi
from oncekey.web.litestar import OnceKeyPlugin
from oncekey.web.starlette import protect
from tests.web.declaring_apps import FRAMEWORKS, ask, handle, new_once, record_of, taken_under
from tests.web.litestar_parameters import FromPath


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
    assert await taken_under(app, once, ["POST /a/special", "POST /a/7"]) == {
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
    assert await taken_under(app, once, ["POST /a/7", "POST /a/x"]) == {
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
    assert await taken_under(app, once, ["POST /v1/pay", "POST /v2/pay"]) == {
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

    assert await taken_under(app, once, ["POST /late", "POST /outer/inner/pay/3"]) == {
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
    assert await taken_under(app, once, [*routes, "POST /app/heirs", "PUT /app/heirs", "POST /hosted"]) == {
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
    assert await taken_under(app, once, ["POST /pay", "POST /refund", "POST /method"]) == {
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
