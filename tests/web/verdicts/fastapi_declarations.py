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
from tests.web.verdicts.bench import Bench
from tests.web.verdicts.declared import AfterFirstRequest, declared, decorated
from tests.web.versions import ASYNC_OBJECTS


def of_fastapi(bench: Bench) -> FastAPI:
    app = FastAPI(openapi_url=None)
    protect(app, bench.once)
    return app


@declared
def fastapi_before_protect(bench: Bench) -> Any:
    app = FastAPI(openapi_url=None)
    app.post("/payments", response_model=None)(endpoint_of(bench, True))
    protect(app, bench.once)
    return app


@declared
def fastapi_router(bench: Bench) -> Any:
    app, router = of_fastapi(bench), APIRouter(prefix="/payments")
    router.post("", response_model=None)(endpoint_of(bench, True))
    app.include_router(router)
    return app


@declared
def fastapi_nested_router(bench: Bench) -> Any:
    bench.prefix = "/v1"
    app, outer, inner = of_fastapi(bench), APIRouter(prefix="/v1"), APIRouter()
    inner.post("/payments", response_model=None)(endpoint_of(bench, False))
    outer.include_router(inner)
    app.include_router(outer)
    return app


@declared
def fastapi_mounted_fastapi(bench: Bench) -> Any:
    bench.prefix = "/v1"
    app, inner = of_fastapi(bench), FastAPI(openapi_url=None)
    inner.post("/payments", response_model=None)(endpoint_of(bench, True))
    app.mount("/v1", inner)
    return app


@declared
def fastapi_callable_object(bench: Bench) -> Any:
    class Pay:
        async def __call__(self, request: Request) -> Any:
            return await endpoint_of(bench, True)(request)

    if not ASYNC_OBJECTS:
        pytest.skip("an object as an endpoint needs FastAPI 0.123.5")
    app = of_fastapi(bench)
    app.add_api_route("/payments", Pay(), methods=["POST"], response_model=None)
    return app


@declared
def fastapi_decorated(bench: Bench) -> Any:
    app = of_fastapi(bench)
    app.post("/payments", response_model=None)(decorated(endpoint_of(bench, True)))
    return app


@declared
def fastapi_background(bench: Bench) -> Any:
    app = of_fastapi(bench)

    @app.post("/payments", response_model=None)
    async def pay(tasks: BackgroundTasks) -> Any:
        async with bench.working():
            tasks.add_task(lambda: None)
            return ended(bench)

    return app


@declared
def fastapi_plain_route(bench: Bench) -> Any:
    """Starlette's own route in a FastAPI app."""
    app = of_fastapi(bench)
    app.add_route("/payments", endpoint_of(bench, True), methods=["POST"])
    return app


def tax() -> int:
    return 19


@declared
def fastapi_overridden_dependency(bench: Bench) -> Any:
    app = of_fastapi(bench)

    @app.post("/payments", response_model=None)
    async def pay(rate: Annotated[int, Depends(tax)]) -> Any:
        assert rate == 7
        async with bench.working():
            return ended(bench)

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
def fastapi_route_class(bench: Bench) -> Any:
    app, router = of_fastapi(bench), APIRouter(route_class=TimedRoute)
    router.post("/payments", response_model=None)(endpoint_of(bench, True))
    app.include_router(router)
    return app


@declared
def fastapi_router_grows_after_first_request(bench: Bench) -> Any:
    """Where FastAPI copies the routes of an included router, the app includes it again."""
    app, router = of_fastapi(bench), APIRouter()
    app.include_router(router)

    def add() -> None:
        router.post("/payments", response_model=None)(endpoint_of(bench, True))
        if not any(getattr(route, "original_router", None) is router for route in app.router.routes):
            app.include_router(router)

    return AfterFirstRequest(app, add)
