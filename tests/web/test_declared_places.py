"""Declared handlers in each framework's own places: prefixes, controllers, blueprints, dependencies, optional keys."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI
from flask import Blueprint, Flask
from flask.views import MethodView
from litestar import Controller, Litestar, post
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Mount, Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from oncekey.web import flask as on_flask
from oncekey.web.fastapi import protect as protect_fastapi
from oncekey.web.litestar import OnceKeyPlugin
from oncekey.web.starlette import protect
from tests.web.declaring_apps import ask, handle, new_once, record_of, taken_under
from tests.web.litestar_parameters import FromPath


async def test_flask_app_under_a_prefix_goes_by_its_own_rules() -> None:
    once = new_once()
    app = Flask(__name__)
    app.post("/pay")(once.policy(effects="repeatable")(lambda: "handled"))
    app.post("/other", endpoint="other")(lambda: "handled")
    on_flask.protect(app, once, only="declared")
    outer = Flask("outer")
    outer.wsgi_app = DispatcherMiddleware(outer.wsgi_app, {"/api": app})  # type: ignore[method-assign]
    assert await taken_under(outer, once, ["POST /api/pay", "POST /api/other"]) == {
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
    assert await taken_under(app, once, ["POST /api/pay", "POST /api/other"]) == {
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
    assert await taken_under(app, once, routes) == expected
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
    assert await taken_under(app, once, routes) == {
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
