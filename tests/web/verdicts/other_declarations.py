"""The ways in which an app declares an endpoint in Litestar and Flask, each as a small protected app.

Nothing here asserts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Blueprint, Flask
from flask.views import MethodView
from litestar import Controller, Litestar, Router, post

from oncekey.web import flask as flask_web
from oncekey.web.litestar import OnceKeyPlugin
from tests.web.verdicts.asgi_apps import litestar_ended
from tests.web.verdicts.bench import Bench
from tests.web.verdicts.declared import declared
from tests.web.verdicts.wsgi_apps import flask_ended


def of_litestar(bench: Bench, *handlers: Any) -> Any:
    return Litestar(list(handlers), openapi_config=None, logging_config=None, plugins=[OnceKeyPlugin(bench.once)])


@declared
def litestar_controller(bench: Bench) -> Any:
    class Payments(Controller):
        path = "/payments"

        @post("/")
        async def pay(self) -> Any:
            async with bench.working():
                return litestar_ended(bench)

    return of_litestar(bench, Payments)


@declared
def litestar_router(bench: Bench) -> Any:
    @post("/payments", sync_to_thread=False)
    def pay() -> Any:
        with bench.working_blocking():
            return litestar_ended(bench)

    bench.prefix = "/v1"
    return of_litestar(bench, Router("/v1", route_handlers=[pay]))


@declared
def litestar_registered_later(bench: Bench) -> Any:
    @post("/payments")
    async def pay() -> Any:
        async with bench.working():
            return litestar_ended(bench)

    app = of_litestar(bench)
    app.register(pay)
    return app


@declared
def litestar_after_request(bench: Bench) -> Any:
    """A hook that hands the response on."""

    async def hand_on(response: Any) -> Any:
        return response

    @post("/payments", after_request=hand_on)
    async def pay() -> Any:
        async with bench.working():
            return litestar_ended(bench)

    return of_litestar(bench, pay)


def view_of(bench: Bench) -> Callable[..., Any]:
    def pay() -> Any:
        with bench.working_blocking():
            return flask_ended(bench)

    return pay


def of_flask(bench: Bench) -> Flask:
    app = Flask("payments")
    flask_web.protect(app, bench.once)
    return app


@declared
def flask_before_protect(bench: Bench) -> Any:
    app = Flask("payments")
    app.post("/payments")(view_of(bench))
    flask_web.protect(app, bench.once)
    return app


@declared
def flask_class(bench: Bench) -> Any:
    class Payments(MethodView):
        def post(self) -> Any:
            return view_of(bench)()

    app = of_flask(bench)
    app.add_url_rule("/payments", view_func=Payments.as_view("payments"))
    return app


@declared
def flask_blueprint(bench: Bench) -> Any:
    app, blueprint = of_flask(bench), Blueprint("payments", __name__)
    blueprint.post("/payments")(view_of(bench))
    app.register_blueprint(blueprint)
    return app


@declared
def flask_replaced_view(bench: Bench) -> Any:
    """As extensions do that put their own function around every view."""
    app = of_flask(bench)
    app.post("/payments", endpoint="pay")(view_of(bench))
    inner: Any = app.view_functions["pay"]

    def around(**arguments: Any) -> Any:
        return app.make_response(inner(**arguments))

    app.view_functions["pay"] = around
    return app


@declared
def flask_async_view(bench: Bench) -> Any:
    """A coroutine function: Flask runs it in a loop of its own."""
    pytest.importorskip("asgiref")
    app = of_flask(bench)

    @app.post("/payments")
    async def pay() -> Any:
        with bench.working_blocking():
            return flask_ended(bench)

    return app
