"""One small payments API in every framework.

``Payments`` (oncekey.testing.http) is what the API does. ``STACKS`` names the frameworks, with async and sync handlers
where a framework has both; ``framework_of`` is such a framework for ``oncekey.testing.framework_suite``. Nothing here
asserts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any
from urllib.parse import parse_qs

from oncekey import OnceKey
from oncekey.testing.framework_suite import (
    Abort,
    Framework,
    Payments,
    Reply,
    async_pieces_of,
    pieces_of,
    unprotected,
)

ASGI_STACKS = (
    "asgi",
    "starlette-async",
    "starlette-sync",
    "fastapi-async",
    "fastapi-sync",
    "litestar-async",
    "litestar-sync",
    "django-async",
    "django-sync",
    "django-drf-asgi",
)
WSGI_STACKS = ("wsgi", "flask", "django", "django-drf")
STACKS = (*ASGI_STACKS, *WSGI_STACKS)
RAW = ("asgi", "wsgi")
"""No framework: nothing tells a 500 that was raised from one that was returned, and there is no exception for a 4xx."""

# The routes are the same everywhere: POST /payments, POST /payments/{id}/refunds, POST /login, GET /status. (Not GET
# /payments: with two methods on one path, litestar 2.25 sends a sync handler to a thread twice, and fails.)


def raw_asgi(payments: Payments, once: OnceKey) -> Any:
    from oncekey.web.asgi import IdempotencyMiddleware

    async def app(scope: Any, receive: Any, send: Any) -> None:
        mode = _mode(scope["query_string"].decode())
        path, method = scope["path"], scope["method"]
        if method != "POST" or path == "/login":
            reply = unprotected() if method in ("GET", "POST") else Reply(405)
        elif path == "/payments" or path.endswith("/refunds"):
            reply = await payments.handle_async(mode)
        else:
            reply = Reply(404)
        headers = [(name.encode(), value.encode()) for name, value in reply.header_list]
        if reply.streamed is None:
            headers.append((b"content-length", str(len(reply.body)).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        async for piece in async_pieces_of(reply):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})

    return IdempotencyMiddleware(app, once)


def raw_wsgi(payments: Payments, once: OnceKey) -> Any:
    from oncekey.web.wsgi import IdempotencyMiddleware

    def app(environ: Any, start_response: Any) -> Any:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if method != "POST" or path == "/login":
            reply = unprotected() if method in ("GET", "POST") else Reply(405)
        elif path == "/payments" or path.endswith("/refunds"):
            reply = payments.handle(_mode(environ["QUERY_STRING"]))
        else:
            reply = Reply(404)
        length = [] if reply.streamed is not None else [("content-length", str(len(reply.body)))]
        start_response(f"{reply.status} Status", reply.header_list + length)
        return [reply.body] if reply.streamed is None else pieces_of(reply)

    return IdempotencyMiddleware(app, once)


def _mode(query: str) -> str:
    return parse_qs(query).get("m", ["ok"])[0]


def starlette_response(reply: Reply, pieces: Any = pieces_of) -> Any:
    from starlette.responses import Response, StreamingResponse

    if reply.streamed is not None:
        made: Response = StreamingResponse(pieces(reply), reply.status)
    else:
        made = Response(reply.body, reply.status)
    for name, value in reply.header_list:
        made.headers.append(name, value)
    return made


def starlette_endpoints(payments: Payments, asynchronous: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The same two endpoints for Starlette and FastAPI: the payment, and the unprotected one."""
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    async def pay_async(request: Request) -> Any:
        try:
            return starlette_response(await payments.handle_async(_mode(request.url.query)), async_pieces_of)
        except Abort as abort:
            raise HTTPException(abort.status) from abort

    def pay_sync(request: Request) -> Any:
        try:
            return starlette_response(payments.handle(_mode(request.url.query)))
        except Abort as abort:
            raise HTTPException(abort.status) from abort

    async def other_async(request: Request) -> Any:
        return starlette_response(unprotected())

    def other_sync(request: Request) -> Any:
        return starlette_response(unprotected())

    # FastAPI reads annotations where the function was defined, and Request is local here.
    for endpoint in (pay_async, pay_sync, other_async, other_sync):
        endpoint.__annotations__ = {"request": Request}
    return (pay_async, other_async) if asynchronous else (pay_sync, other_sync)


def starlette(payments: Payments, once: OnceKey, asynchronous: bool, declaring: bool) -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oncekey.web.asgi import IdempotencyMiddleware

    pay, other = starlette_endpoints(payments, asynchronous)
    if declaring:
        app = Starlette(
            routes=[
                Route("/declared/{id}", once.policy(effects="repeatable")(pay), methods=["POST"]),
                Route("/exempt", once.exempt(other), methods=["POST"]),
            ]
        )
        app.add_middleware(IdempotencyMiddleware, once=once)
        app.add_route("/late", starlette_endpoints(payments, asynchronous)[0], methods=["POST"])
        return app
    app = Starlette(
        routes=[
            Route("/payments", pay, methods=["POST"]),
            Route("/payments/{id}/refunds", pay, methods=["POST"]),
            Route("/login", other, methods=["POST"]),
            Route("/status", other, methods=["GET"]),
        ]
    )
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def fastapi(payments: Payments, once: OnceKey, asynchronous: bool, declaring: bool) -> Any:
    from fastapi import FastAPI

    from oncekey.web.fastapi import protect

    pay, other = starlette_endpoints(payments, asynchronous)
    app = FastAPI(openapi_url=None)
    if declaring:
        app.post("/declared/{id}", response_model=None)(once.policy(effects="repeatable")(pay))
        app.post("/exempt", response_model=None)(once.exempt(other))
        protect(app, once)
        app.post("/late", response_model=None)(starlette_endpoints(payments, asynchronous)[0])
        return app
    app.add_api_route("/payments", pay, methods=["POST"], response_model=None)
    app.add_api_route("/payments/{id}/refunds", pay, methods=["POST"], response_model=None)
    app.add_api_route("/login", other, methods=["POST"], response_model=None)
    app.add_api_route("/status", other, methods=["GET"], response_model=None)
    protect(app, once)
    return app


def litestar(payments: Payments, once: OnceKey, asynchronous: bool, declaring: bool) -> Any:
    from litestar import Litestar, Request, Response, get, post
    from litestar.exceptions import HTTPException
    from litestar.response import Stream

    from oncekey.web.litestar import OnceKeyPlugin

    def respond(reply: Reply, pieces: Any = pieces_of) -> Any:
        kind = reply.content_type and reply.content_type.removesuffix("; charset=utf-8")
        more: Any = {"status_code": reply.status, "headers": dict(reply.headers), "media_type": kind}
        return Response(reply.body, **more) if reply.streamed is None else Stream(pieces(reply), **more)

    async def pay_async(request: Request) -> Response:
        try:
            return respond(await payments.handle_async(_mode(request.url.query)), async_pieces_of)
        except Abort as abort:
            raise HTTPException(status_code=abort.status) from abort

    def pay_sync(request: Request) -> Response:
        try:
            return respond(payments.handle(_mode(request.url.query)))
        except Abort as abort:
            raise HTTPException(status_code=abort.status) from abort

    async def other_async() -> Response:
        return respond(unprotected())

    def other_sync() -> Response:
        return respond(unprotected())

    # Litestar reads annotations where the function was defined, and these names are local here.
    for takes_request in (pay_async, pay_sync):
        takes_request.__annotations__ = {"request": Request, "return": Response}
    for takes_nothing in (other_async, other_sync):
        takes_nothing.__annotations__ = {"return": Response}
    pay, other = (pay_async, other_async) if asynchronous else (pay_sync, other_sync)
    threads: dict[str, Any] = {} if asynchronous else {"sync_to_thread": True}
    if declaring:
        late = post("/late", **threads)(FunctionType(pay.__code__, pay.__globals__, "late", None, pay.__closure__))
        late.fn.__annotations__ = pay.__annotations__
        app = Litestar(
            route_handlers=[
                post("/declared/{id:str}", **threads)(once.policy(effects="repeatable")(pay)),
                post("/exempt", **threads)(once.exempt(other)),
            ],
            openapi_config=None,
            logging_config=None,
            plugins=[OnceKeyPlugin(once)],
        )
        app.register(late)
        return app
    return Litestar(
        route_handlers=[
            post("/payments", **threads)(pay),
            post("/payments/{id:str}/refunds", **threads)(pay),
            post("/login", **threads)(other),
            get("/status", **threads)(other),
        ],
        openapi_config=None,
        logging_config=None,
        plugins=[OnceKeyPlugin(once)],
    )


def flask(payments: Payments, once: OnceKey, declaring: bool) -> Any:
    from flask import Flask, Response, abort, request

    from oncekey.web.flask import protect

    app = Flask("payments")

    def respond(reply: Reply) -> Response:
        body: Any = reply.body if reply.streamed is None else pieces_of(reply)
        made = Response(body, reply.status, list(reply.headers), content_type=reply.content_type)
        if reply.content_type is None:
            made.headers.pop("content-type", None)
        return made

    def pay(**_: Any) -> Response:
        try:
            return respond(payments.handle(_mode(request.query_string.decode())))
        except Abort as error:
            abort(error.status)

    def other() -> Response:
        return respond(unprotected())

    if declaring:
        app.post("/declared/<id>")(once.policy(effects="repeatable")(pay))
        app.post("/exempt")(once.exempt(other))
        protect(app, once)
        app.add_url_rule("/late", "late", lambda: pay(), methods=["POST"])  # noqa: PLW0108 - pay has a declaration
        return app
    app.add_url_rule("/payments", "pay", pay, methods=["POST"])
    app.add_url_rule("/payments/<id>/refunds", "refund", pay, methods=["POST"])
    app.add_url_rule("/login", "login", other, methods=["POST"])
    app.add_url_rule("/status", "status", other, methods=["GET"])
    protect(app, once)
    return app


def django(payments: Payments, once: OnceKey, kind: str, declaring: bool) -> Any:
    from tests.web.django_apps import django_app

    return django_app(payments, once, kind, declaring)


def make_app(name: str, payments: Payments, once: OnceKey, *, declaring: bool = False) -> Any:
    """The protected app of one of STACKS. ``declaring``: the app of the suite's declarations."""
    framework, _, kind = name.partition("-")
    asynchronous = kind == "async"
    match framework:
        case "asgi":
            return raw_asgi(payments, once)
        case "wsgi":
            return raw_wsgi(payments, once)
        case "starlette":
            return starlette(payments, once, asynchronous, declaring)
        case "fastapi":
            return fastapi(payments, once, asynchronous, declaring)
        case "litestar":
            return litestar(payments, once, asynchronous, declaring)
        case "django":
            return django(payments, once, kind, declaring)
    return flask(payments, once, declaring)


def framework_of(name: str) -> Framework:
    """One of STACKS, for the suite."""
    return Framework(
        partial(make_app, name),
        is_async=name in ASGI_STACKS,
        async_handlers=name == "asgi" or name.endswith("-async"),
        reports_endpoints=name not in RAW,
        name=name,
        make_declaring_app=None if name in RAW else partial(make_app, name, declaring=True),
    )
