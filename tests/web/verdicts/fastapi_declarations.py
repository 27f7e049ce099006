"""The ways in which an app declares an endpoint in FastAPI, each as a small protected app. Nothing here asserts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request

from oncekey.web.fastapi import protect
from tests.web.verdicts.asgi_apps import ended, endpoint_of
from tests.web.verdicts.case_runner import CaseRunner
from tests.web.verdicts.declared import AfterFirstRequest, declared, decorated
from tests.web.versions import ASYNC_OBJECTS


def of_fastapi(runner: CaseRunner) -> FastAPI:
    app = FastAPI(openapi_url=None)
    protect(app, runner.once)
    return app


@declared
def fastapi_before_protect(runner: CaseRunner) -> Any:
    app = FastAPI(openapi_url=None)
    app.post("/payments", response_model=None)(endpoint_of(runner, True))
    protect(app, runner.once)
    return app


@declared
def fastapi_router(runner: CaseRunner) -> Any:
    app, router = of_fastapi(runner), APIRouter(prefix="/payments")
    router.post("", response_model=None)(endpoint_of(runner, True))
    app.include_router(router)
    return app


@declared
def fastapi_nested_router(runner: CaseRunner) -> Any:
    runner.prefix = "/v1"
    app, outer, inner = of_fastapi(runner), APIRouter(prefix="/v1"), APIRouter()
    inner.post("/payments", response_model=None)(endpoint_of(runner, False))
    outer.include_router(inner)
    app.include_router(outer)
    return app


@declared
def fastapi_mounted_fastapi(runner: CaseRunner) -> Any:
    runner.prefix = "/v1"
    app, inner = of_fastapi(runner), FastAPI(openapi_url=None)
    inner.post("/payments", response_model=None)(endpoint_of(runner, True))
    app.mount("/v1", inner)
    return app


@declared
def fastapi_callable_object(runner: CaseRunner) -> Any:
    class Pay:
        async def __call__(self, request: Request) -> Any:
            return await endpoint_of(runner, True)(request)

    if not ASYNC_OBJECTS:
        pytest.skip("an object as an endpoint needs FastAPI 0.123.5")
    app = of_fastapi(runner)
    app.add_api_route("/payments", Pay(), methods=["POST"], response_model=None)
    return app


@declared
def fastapi_decorated(runner: CaseRunner) -> Any:
    app = of_fastapi(runner)
    app.post("/payments", response_model=None)(decorated(endpoint_of(runner, True)))
    return app


@declared
def fastapi_background(runner: CaseRunner) -> Any:
    app = of_fastapi(runner)

    @app.post("/payments", response_model=None)
    async def pay(tasks: BackgroundTasks) -> Any:
        async with runner.working():
            tasks.add_task(lambda: None)
            return ended(runner)

    return app


@declared
def fastapi_plain_route(runner: CaseRunner) -> Any:
    """Starlette's own route in a FastAPI app."""
    app = of_fastapi(runner)
    app.add_route("/payments", endpoint_of(runner, True), methods=["POST"])
    return app


def tax() -> int:
    return 19


@declared
def fastapi_overridden_dependency(runner: CaseRunner) -> Any:
    app = of_fastapi(runner)

    @app.post("/payments", response_model=None)
    async def pay(rate: Annotated[int, Depends(tax)]) -> Any:
        assert rate == 7
        async with runner.working():
            return ended(runner)

    app.dependency_overrides[tax] = lambda: 7
    return app


class TimedRoute(APIRoute):
    """As FastAPI's documentation has it."""

    def get_route_handler(self) -> Callable[..., Any]:
        original = super().get_route_handler()

        async def timed(request: Request) -> Any:
            return await original(request)

        return timed


@declared
def fastapi_route_class(runner: CaseRunner) -> Any:
    app, router = of_fastapi(runner), APIRouter(route_class=TimedRoute)
    router.post("/payments", response_model=None)(endpoint_of(runner, True))
    app.include_router(router)
    return app


@declared
def fastapi_router_grows_after_first_request(runner: CaseRunner) -> Any:
    """Where FastAPI copies the routes of an included router, the app includes it again."""
    app, router = of_fastapi(runner), APIRouter()
    app.include_router(router)

    def add() -> None:
        router.post("/payments", response_model=None)(endpoint_of(runner, True))
        if not any(getattr(route, "original_router", None) is router for route in app.router.routes):
            app.include_router(router)

    return AfterFirstRequest(app, add)
