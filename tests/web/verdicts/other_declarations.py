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
from tests.web.verdicts.case_runner import CaseRunner
from tests.web.verdicts.declared import declared
from tests.web.verdicts.wsgi_apps import flask_ended


def of_litestar(runner: CaseRunner, *handlers: Any) -> Any:
    return Litestar(list(handlers), openapi_config=None, logging_config=None, plugins=[OnceKeyPlugin(runner.once)])


@declared
def litestar_controller(runner: CaseRunner) -> Any:
    class Payments(Controller):
        path = "/payments"

        @post("/")
        async def pay(self) -> Any:
            async with runner.working():
                return litestar_ended(runner)

    return of_litestar(runner, Payments)


@declared
def litestar_router(runner: CaseRunner) -> Any:
    @post("/payments", sync_to_thread=False)
    def pay() -> Any:
        with runner.working_blocking():
            return litestar_ended(runner)

    runner.prefix = "/v1"
    return of_litestar(runner, Router("/v1", route_handlers=[pay]))


@declared
def litestar_registered_later(runner: CaseRunner) -> Any:
    @post("/payments")
    async def pay() -> Any:
        async with runner.working():
            return litestar_ended(runner)

    app = of_litestar(runner)
    app.register(pay)
    return app


@declared
def litestar_after_request(runner: CaseRunner) -> Any:
    """A hook that hands the response on."""

    async def hand_on(response: Any) -> Any:
        return response

    @post("/payments", after_request=hand_on)
    async def pay() -> Any:
        async with runner.working():
            return litestar_ended(runner)

    return of_litestar(runner, pay)


def view_of(runner: CaseRunner) -> Callable[..., Any]:
    def pay() -> Any:
        with runner.working_blocking():
            return flask_ended(runner)

    return pay


def of_flask(runner: CaseRunner) -> Flask:
    app = Flask("payments")
    flask_web.protect(app, runner.once)
    return app


@declared
def flask_before_protect(runner: CaseRunner) -> Any:
    app = Flask("payments")
    app.post("/payments")(view_of(runner))
    flask_web.protect(app, runner.once)
    return app


@declared
def flask_class(runner: CaseRunner) -> Any:
    class Payments(MethodView):
        def post(self) -> Any:
            return view_of(runner)()

    app = of_flask(runner)
    app.add_url_rule("/payments", view_func=Payments.as_view("payments"))
    return app


@declared
def flask_blueprint(runner: CaseRunner) -> Any:
    app, blueprint = of_flask(runner), Blueprint("payments", __name__)
    blueprint.post("/payments")(view_of(runner))
    app.register_blueprint(blueprint)
    return app


@declared
def flask_replaced_view(runner: CaseRunner) -> Any:
    """As extensions do that put their own function around every view."""
    app = of_flask(runner)
    app.post("/payments", endpoint="pay")(view_of(runner))
    inner: Any = app.view_functions["pay"]

    def around(**arguments: Any) -> Any:
        return app.make_response(inner(**arguments))

    app.view_functions["pay"] = around
    return app


@declared
def flask_async_view(runner: CaseRunner) -> Any:
    """A coroutine function: Flask runs it in a loop of its own."""
    pytest.importorskip("asgiref")
    app = of_flask(runner)

    @app.post("/payments")
    async def pay() -> Any:
        with runner.working_blocking():
            return flask_ended(runner)

    return app
