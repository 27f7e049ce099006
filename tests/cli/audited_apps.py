"""Apps of every framework for ``oncekey routes`` to look at: protected, exempt and unprotected routes in each."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, FastAPI
from flask import Blueprint, Flask
from litestar import Litestar, WebSocket, asgi, get, post, put, websocket
from litestar import Router as LitestarRouter
from litestar.middleware import DefineMiddleware
from litestar.types import Receive, Scope, Send
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Host, Match, Mount, Route, Router, WebSocketRoute
from starlette.staticfiles import StaticFiles
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.web import wsgi
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect as protect_fastapi
from oncekey.web.flask import protect as protect_flask
from oncekey.web.litestar import OnceKeyPlugin

OWN = Policy(effects="repeatable")


def once(routes: dict[str, Policy | None] | None = None, **options: Any) -> OnceKey:
    return OnceKey("memory://", scope=SINGLE_TENANT, routes=routes, **options)


def ours(routes: dict[str, Policy | None] | None = None) -> Middleware:
    return Middleware(IdempotencyMiddleware, once=once(routes))


async def handle(request: Any) -> Response:
    return PlainTextResponse("handled")


async def raw(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("handled")(scope, receive, send)


class Anything:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await raw(scope, receive, send)


class Things(HTTPEndpoint):
    async def get(self, request: Any) -> Response:
        return await handle(request)

    post = delete = get


class OwnRoute(BaseRoute):
    """A kind of route that the app defines."""

    path = "/own/kind"

    def matches(self, scope: Any) -> tuple[Match, Any]:
        return (Match.FULL if scope.get("path") == self.path else Match.NONE), {}

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        await raw(scope, receive, send)


def wsgi_in_asgi(app: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of a package that works alike
        from starlette.middleware.wsgi import WSGIMiddleware
    return WSGIMiddleware(app)


# ---------------------------------------------------------------- the apps


def starlette() -> Any:
    protected_inside = Starlette(
        routes=[Route("/pay", handle, methods=["POST"]), Route("/pay", handle, methods=["PUT"])],
        middleware=[ours({"POST /pay": OWN, "PUT /pay": OWN})],
    )
    routes = [
        Route("/payments/{id:int}", handle, methods=["POST", "GET"]),
        Route("/login", handle, methods=["POST"]),
        Route("/things", Things),
        Route("/anything", Anything()),
        Route("/one", handle, methods=["DELETE"], middleware=[ours({"DELETE /one": OWN})]),
        Route("/files/{name:path}", handle, methods=["PUT"]),
        Route("/purge", handle, methods=["PURGE"]),
        Mount("/sub", routes=[Route("/x", handle, methods=["PUT"]), Mount("/{deep}", routes=[Route("/y", Things)])]),
        Mount("/inside", app=protected_inside),
        Mount("/around", routes=[Route("/pay", handle, methods=["PUT"])], middleware=[ours({"PUT /pay": OWN})]),
        Mount("/router", app=Router([Route("/x", Things)], middleware=[ours({"DELETE /x": OWN})])),
        Mount("/raw", app=raw),
        Mount("/static", app=StaticFiles(directory=Path(__file__).parent)),
        WebSocketRoute("/socket", handle),
        OwnRoute(),
        Host("api.test", Router([Route("/hosted", handle, methods=["POST", "PUT"])])),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(CORSMiddleware)])
    listed = {"POST /login": None, "PUT /files/{name}": OWN, "PUT /sub/x": OWN, "DELETE /sub/{deep}/y": None}
    app.add_middleware(IdempotencyMiddleware, once=once(listed))
    return app


def starlette_from_outside() -> Any:
    """Middleware around the app, ours and others', and an app of last resort."""
    router = Router([Route("/x", Things)], default=raw)
    return CORSMiddleware(IdempotencyMiddleware(router, once({"DELETE /x": OWN})))


def fastapi() -> Any:
    inner = APIRouter(prefix="/inner")
    inner.add_api_route("/x/{id}", lambda id: "handled", methods=["POST", "PUT"])
    outer = APIRouter(prefix="/outer")
    outer.add_api_route("/x", lambda: "handled", methods=["PATCH", "DELETE", "GET"])
    outer.include_router(inner)
    mounted = FastAPI()
    mounted.add_api_route("/x", lambda: "handled", methods=["POST", "PUT"])
    app = FastAPI()
    app.include_router(outer, prefix="/api")
    app.mount("/mounted", mounted)
    protect_fastapi(app, once({"PUT /api/outer/inner/x/{id}": OWN, "PUT /mounted/x": None}))
    return app


def fastapi_in_part() -> Any:
    """Only a mounted app is protected."""
    mounted = FastAPI()
    mounted.add_api_route("/x", lambda: "handled", methods=["POST", "PUT"])
    protect_fastapi(mounted, once({"PUT /x": OWN, "POST /mounted/x": None}))
    app = FastAPI()
    app.add_api_route("/x", lambda: "handled", methods=["POST"])
    app.mount("/mounted", mounted)
    return app


def litestar() -> Any:
    @post("/pay/{id:int}")
    async def pay() -> str:
        return "handled"

    @put("/pay")
    async def put_pay() -> str:
        return "handled"

    @get("/")
    async def home() -> str:
        return "handled"

    @websocket("/socket")
    async def socket(socket: WebSocket[Any, Any, Any]) -> None: ...

    @asgi("/mounted", is_mount=True, copy_scope=True)
    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await raw(scope, receive, send)

    @asgi("/exact", copy_scope=True)
    async def exact(scope: Scope, receive: Receive, send: Send) -> None:
        await raw(scope, receive, send)

    listed = {"PUT /v1/pay": None, "PUT /exact": OWN, "PUT /mounted/{path:path}": OWN, "DELETE /{path:path}": OWN}
    return Litestar(
        [LitestarRouter("/v1", route_handlers=[pay, put_pay]), home, socket, mounted, exact],
        middleware=[DefineMiddleware(cast("Any", IdempotencyMiddleware), once=once({"DELETE /exact": None}))],
        plugins=[OnceKeyPlugin(once(listed))],
    )


def flask(name: str = "shop") -> Flask:
    app = Flask(name)
    blueprint = Blueprint("billing", name, url_prefix="/billing")
    blueprint.add_url_rule("/<int:id>/charge", "charge", lambda id: "handled", methods=["POST", "PUT"])
    blueprint.add_url_rule("/<id>/refund", "refund", lambda id: "handled", methods=["POST"])
    app.register_blueprint(blueprint)
    app.add_url_rule("/files/<path:name>", "files", lambda name: "handled", methods=["PUT", "DELETE", "PURGE"])
    return app


def protected_flask() -> Any:
    app = flask()
    listed = {"POST /billing/{id}/refund": None, "PUT /files/{name}": OWN, "DELETE /files/{name:path}": OWN}
    app.wsgi_app = ProxyFix(app.wsgi_app)  # type: ignore[method-assign]
    protect_flask(app, once(listed))
    app.wsgi_app = ProxyFix(app.wsgi_app)  # type: ignore[method-assign]
    return app


def dispatched() -> Any:
    """Two Flask apps under one roof; one of them protects itself, and our middleware there sees the whole path."""
    mounted = flask("mounted")
    protect_flask(mounted, once({"PUT /v2/billing/{id}/charge": OWN, "PUT /billing/{id}/charge": OWN}))
    return DispatcherMiddleware(flask(), {"/v2": mounted})


def around_wsgi() -> Any:
    return wsgi.IdempotencyMiddleware(flask(), once())


def flask_in_starlette() -> Any:
    mounted = flask()
    routes = {"PUT /old/billing/{id}/charge": OWN, "POST /billing/{id}/refund": None, "PUT /files/{name:path}": OWN}
    protect_flask(mounted, once(routes))
    return Starlette(routes=[Mount("/old", app=wsgi_in_asgi(mounted))])


APPS = [
    starlette,
    starlette_from_outside,
    fastapi,
    fastapi_in_part,
    litestar,
    protected_flask,
    dispatched,
    around_wsgi,
    flask_in_starlette,
]
WSGI_APPS = [protected_flask, dispatched, around_wsgi]
