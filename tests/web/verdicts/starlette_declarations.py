"""The ways in which an app declares an endpoint in Starlette, each as a small protected app. Nothing here asserts."""

from __future__ import annotations

import functools
from typing import Any

from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Mount, Route
from starlette.routing import Router as StarletteRouter

from oncekey.web.asgi import IdempotencyMiddleware
from tests.web.verdicts.asgi_apps import endpoint_of, raw_endpoint
from tests.web.verdicts.case_runner import CaseRunner
from tests.web.verdicts.declared import AfterFirstRequest, HandsOn, declared, decorated, foreign


def of_starlette(*routes: Any, runner: CaseRunner) -> Any:
    app = Starlette(routes=list(routes))
    app.add_middleware(IdempotencyMiddleware, once=runner.once)
    return app


@declared
def starlette_class(runner: CaseRunner) -> Any:
    class Payments(HTTPEndpoint):
        async def post(self, request: Request) -> Any:
            return await endpoint_of(runner, True)(request)

    return of_starlette(Route("/payments", Payments), runner=runner)


@declared
def starlette_sync_class(runner: CaseRunner) -> Any:
    class Payments(HTTPEndpoint):
        def post(self, request: Request) -> Any:
            return endpoint_of(runner, False)(request)

    return of_starlette(Route("/payments", Payments), runner=runner)


@declared
def starlette_partial(runner: CaseRunner) -> Any:
    async def pay(extra: str, request: Request) -> Any:
        return await endpoint_of(runner, True)(request)

    return of_starlette(Route("/payments", functools.partial(pay, "extra"), methods=["POST"]), runner=runner)


@declared
def starlette_method(runner: CaseRunner) -> Any:
    class Payments:
        async def pay(self, request: Request) -> Any:
            return await endpoint_of(runner, True)(request)

    return of_starlette(Route("/payments", Payments().pay, methods=["POST"]), runner=runner)


@declared
def starlette_decorated(runner: CaseRunner) -> Any:
    return of_starlette(Route("/payments", decorated(endpoint_of(runner, True)), methods=["POST"]), runner=runner)


@declared
def starlette_mount_of_routes(runner: CaseRunner) -> Any:
    runner.prefix = "/v1"
    inner = [Route("/payments", endpoint_of(runner, True), methods=["POST"])]
    return of_starlette(Mount("/v1", routes=inner), runner=runner)


@declared
def starlette_mounted_app(runner: CaseRunner) -> Any:
    runner.prefix = "/v1"
    inner = Starlette(routes=[Route("/payments", endpoint_of(runner, True), methods=["POST"])])
    return of_starlette(Mount("/v1", app=inner), runner=runner)


@declared
def starlette_mounted_router(runner: CaseRunner) -> Any:
    runner.prefix = "/v1"
    inner = StarletteRouter(routes=[Route("/payments", endpoint_of(runner, True), methods=["POST"])])
    return of_starlette(Mount("/v1", app=inner), runner=runner)


@declared
def starlette_added_later(runner: CaseRunner) -> Any:
    app = of_starlette(runner=runner)
    app.router.routes.append(Route("/payments", endpoint_of(runner, True), methods=["POST"]))
    return app


@declared
def starlette_around(runner: CaseRunner) -> Any:
    """The middleware is put around the finished app by hand."""
    app = Starlette(routes=[Route("/payments", endpoint_of(runner, True), methods=["POST"])])
    return IdempotencyMiddleware(app, runner.once)


@declared
def starlette_route_with_middleware(runner: CaseRunner) -> Any:
    route = Route("/payments", endpoint_of(runner, True), methods=["POST"], middleware=[Middleware(HandsOn)])
    return of_starlette(route, runner=runner)


@declared
def starlette_replaced_after_first_request(runner: CaseRunner) -> Any:
    async def other(request: Request) -> Any:
        raise AssertionError("not reached")

    app = of_starlette(Route("/payments", other, methods=["POST"]), runner=runner)

    def replace() -> None:
        app.router.routes[0] = Route("/payments", endpoint_of(runner, True), methods=["POST"])

    return AfterFirstRequest(app, replace)


@foreign
def starlette_own_dispatch(runner: CaseRunner) -> Any:
    """A class that answers every method in one place."""

    class Payments(HTTPEndpoint):
        async def dispatch(self) -> None:
            request = Request(self.scope, self.receive)
            response = await endpoint_of(runner, True)(request)
            await response(self.scope, self.receive, self.send)

    return of_starlette(Route("/payments", Payments), runner=runner)


@foreign
def starlette_asgi_object(runner: CaseRunner) -> Any:
    class Payments:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await raw_endpoint(runner)(scope, receive, send)

    return of_starlette(Route("/payments", Payments(), methods=["POST"]), runner=runner)


@foreign
def starlette_function_as_middleware(runner: CaseRunner) -> Any:
    """A closure around the endpoint, as decorators for ASGI apps make it."""

    def hands_on(app: Any) -> Any:
        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)

        return inner

    route = Route("/payments", endpoint_of(runner, True), methods=["POST"], middleware=[Middleware(hands_on)])
    return of_starlette(route, runner=runner)


@foreign
def starlette_own_default(runner: CaseRunner) -> Any:
    """The router hands what it does not know to an app of its own."""
    app = of_starlette(runner=runner)
    app.router.default = raw_endpoint(runner)
    return app
