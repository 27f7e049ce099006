"""Endpoints of routers, mounted apps and other route classes: oncekey finds all of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from oncekey import OnceKey
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import CurrentOperation, protect
from tests.web.fastapi_payments import Pay, Payment, app, assert_spared, fresh, once, pay, post, row

__all__ = ["app", "once", "pay"]


async def test_included_routers_and_sync_endpoints(once: OnceKey) -> None:
    """A router in a router, with an endpoint that runs in a thread, spares keys too."""
    app, outer, inner = FastAPI(), APIRouter(prefix="/v1"), APIRouter(prefix="/api")

    @inner.post("/payments", status_code=201)
    def pay(payment: Payment, op: CurrentOperation) -> str:
        return op.key

    outer.include_router(inner)
    app.include_router(outer)
    protect(app, once)
    await assert_spared(app, once, "/v1/api/payments")


@pytest.mark.parametrize("how", ["directly", "in a router", "behind middleware"])
async def test_handlers_of_mounted_apps_are_wrapped(once: OnceKey, pay: Pay, how: str) -> None:
    """An app mounted in the protected one has handlers of its own, and they are watched as well."""
    app, mounted, router = FastAPI(), FastAPI(), APIRouter()
    mounted.post("/payments", status_code=201)(pay.__call__)
    protect(app, once)
    if how == "in a router":
        router.mount("/sub", mounted)
        app.mount("", router)
    else:
        app.mount("/sub", mounted if how == "directly" else Outside(mounted))
    await assert_spared(app, once, "/sub/payments")
    key = fresh()
    assert (await post(app, "/sub/nowhere", key)).status_code == 404
    assert row(once, key) is None


class Outside:
    """Middleware around a mounted app; it copies the scope, as some do."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(dict(scope), receive, send)


async def test_middleware_around_a_fastapi_app_finds_its_endpoints(once: OnceKey, pay: Pay) -> None:
    inner = FastAPI()
    inner.post("/payments", status_code=201)(pay.__call__)
    await assert_spared(IdempotencyMiddleware(inner, once), once)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["async", "sync", "partial", "object"])
async def test_the_apps_own_handler_is_kept(once: OnceKey, pay: Pay, when: str, kind: str) -> None:
    """A handler for validation errors, registered on either side of protect(), still writes the answer."""

    async def asynchronous(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"mine": True}, 418)

    def synchronous(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"mine": True}, 418)

    class Handler:
        async def __call__(self, request: Request, error: Exception) -> JSONResponse:
            return await asynchronous(request, error)

    handler: Any = {
        "async": asynchronous,
        "sync": synchronous,
        "partial": functools.partial(asynchronous),
        "object": Handler(),
    }[kind]
    app = FastAPI()
    app.post("/payments", status_code=201)(pay.__call__)
    if when == "before":
        app.add_exception_handler(RequestValidationError, handler)
    protect(app, once)
    if when == "after":
        app.add_exception_handler(RequestValidationError, handler)
    await assert_spared(app, once, status=418)


async def test_a_route_class_that_translates_the_error(once: OnceKey) -> None:
    """The documented recipe of catching the error in a route class and raising another spares the key too."""

    class Translating(APIRoute):
        def get_route_handler(self) -> Any:
            original = super().get_route_handler()

            async def handle(request: Request) -> Any:
                try:
                    return await original(request)
                except RequestValidationError as error:
                    raise HTTPException(400, "not so") from error

            return handle

    app = FastAPI()
    app.router.route_class = Translating
    protect(app, once)

    @app.post("/payments", status_code=201)
    async def pay(payment: Payment) -> None:
        pass

    await assert_spared(app, once, status=400)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/nowhere", 404), ("PATCH", "/payments", 405), ("PATCH", "/v1/more", 405), ("POST", "/sub/no", 404)],
)
@pytest.mark.parametrize("own", [False, True], ids=["", "own 404 page"])
async def test_request_without_a_route_leaves_the_key_unused(
    app: FastAPI, once: OnceKey, method: str, path: str, status: int, own: bool
) -> None:
    """404 and 405 by a router, with or without a handler of the app's own for them, leave the key unused."""
    router = APIRouter(prefix="/v1")
    router.post("/more")(lambda: None)
    app.include_router(router)
    app.mount("/sub", FastAPI())
    if own:
        for code in (404, 405):
            app.add_exception_handler(code, lambda request, error: JSONResponse("mine", error.status_code))
    key = fresh()
    assert (await post(app, path, key, method=method)).status_code == status
    assert row(once, key) is None


@pytest.mark.parametrize("prefix", ["", "/v1", "/sub"])
async def test_the_routers_redirect_leaves_the_key_to_the_request_that_follows(
    once: OnceKey, pay: Pay, prefix: str
) -> None:
    """307 to the path without the slash: the client sends the same key there, and it runs."""
    app, mounted, router = FastAPI(), FastAPI(), APIRouter(prefix="/v1")
    for part in (app, mounted, router):
        part.post("/payments", status_code=201)(pay.__call__)
    app.include_router(router)
    app.mount("/sub", mounted)
    protect(app, once)
    key = fresh()
    redirected = await post(app, f"{prefix}/payments/", key)
    assert redirected.status_code == 307
    followed = await post(app, redirected.headers["location"], key)
    assert (followed.status_code, pay.calls) == (201, 1)
