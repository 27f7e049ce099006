"""The same small shop in Starlette, FastAPI, Litestar and Flask, with policies at its handlers.

``POST /pay`` is declared repeatable, ``POST /orders/{id}`` transactional, ``PUT /orders/{id}`` repeatable,
``POST /login`` exempt; ``POST /other`` and ``DELETE /other`` are not declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
from fastapi import FastAPI
from flask import Flask
from litestar import Litestar, delete, post, put
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.record import Record
from oncekey.web import fastapi as on_fastapi
from oncekey.web import flask as on_flask
from oncekey.web import starlette as on_starlette
from oncekey.web.declared import Only
from oncekey.web.litestar import OnceKeyPlugin
from tests.web.litestar_parameters import FromPath

FRAMEWORKS = ("starlette", "fastapi", "litestar", "flask")
ROUTES = ("POST /pay", "POST /orders/7", "PUT /orders/7", "POST /login", "POST /other", "DELETE /other")
DECLARED = {
    "POST /pay": ("POST /pay", "repeatable"),
    "POST /orders/7": ("POST /orders/{id}", "transactional"),
    "PUT /orders/7": ("PUT /orders/{id}", "repeatable"),
}
"""Route -> operation and effects."""


def new_once(**options: Any) -> OnceKey:
    return OnceKey("memory://", scope=SINGLE_TENANT, **options)


def shop(framework: str, once: OnceKey, only: Only | None = None, *, above: bool = False) -> Any:
    """``above``: ``@once.policy`` stands above the framework's decorator, where it has one."""
    return _SHOPS[framework](once, only, above)


def _fastapi(once: OnceKey, only: Only | None, above: bool) -> FastAPI:
    app = FastAPI()
    on_fastapi.protect(app, once, only=only)

    def add(route: Callable[[Any], Any], declare: Callable[[Any], Any]) -> None:
        def handle() -> str:
            return "handled"

        declare(route(handle)) if above else route(declare(handle))

    add(app.post("/pay"), once.policy(effects="repeatable"))
    add(app.post("/orders/{id}"), once.policy(Policy(effects="transactional")))
    add(app.put("/orders/{id}"), once.policy(effects="repeatable"))
    add(app.post("/login"), once.exempt)
    add(app.post("/other"), lambda handler: handler)
    add(app.delete("/other"), lambda handler: handler)
    return app


def _starlette(once: OnceKey, only: Only | None, _: bool) -> Starlette:
    def handler(declare: Callable[[Any], Any] = lambda handler: handler) -> Any:
        async def handle(request: Any) -> Response:
            return PlainTextResponse("handled")

        return declare(handle)

    app = Starlette(
        routes=[
            Route("/pay", handler(once.policy(effects="repeatable")), methods=["POST"]),
            Route("/orders/{id:int}", handler(once.policy(Policy(effects="transactional"))), methods=["POST"]),
            Route("/orders/{id:int}", handler(once.policy(effects="repeatable")), methods=["PUT"]),
            Route("/login", handler(once.policy(None)), methods=["POST"]),
            Route("/other", handler(), methods=["POST", "DELETE"]),
        ]
    )
    on_starlette.protect(app, once, only=only)
    return app


def _litestar(once: OnceKey, only: Only | None, above: bool) -> Litestar:
    def made(route: Callable[[Any], Any], declare: Callable[[Any], Any]) -> Any:
        async def handle() -> str:
            return "handled"

        async def nothing() -> None: ...

        given = nothing if isinstance(route, delete) else handle
        return declare(route(given)) if above else route(declare(given))

    async def order(id: FromPath[int]) -> str:
        return "handled"

    async def change(id: FromPath[int]) -> str:
        return "handled"

    def ordered(route: Callable[[Any], Any], declare: Callable[[Any], Any], function: Any) -> Any:
        return declare(route(function)) if above else route(declare(function))

    handlers = [
        made(post("/pay"), once.policy(effects="repeatable")),
        ordered(post("/orders/{id:int}"), once.policy(Policy(effects="transactional")), order),
        ordered(put("/orders/{id:int}"), once.policy(effects="repeatable"), change),
        made(post("/login"), once.exempt),
        made(post("/other"), lambda handler: handler),
        made(delete("/other"), lambda handler: handler),
    ]
    return Litestar(handlers, plugins=[OnceKeyPlugin(once, only=only)])


def _flask(once: OnceKey, only: Only | None, above: bool) -> Flask:
    app = Flask(__name__)
    on_flask.protect(app, once, only=only)

    def add(name: str, route: Callable[[Any], Any], declare: Callable[[Any], Any]) -> None:
        def handle(**_: Any) -> str:
            return "handled"

        handle.__name__ = name
        declare(route(handle)) if above else route(declare(handle))

    add("pay", app.post("/pay"), once.policy(effects="repeatable"))
    add("order", app.post("/orders/<int:id>"), once.policy(Policy(effects="transactional")))
    add("change", app.put("/orders/<int:id>"), once.policy(effects="repeatable"))
    add("login", app.post("/login"), once.exempt)
    add("other", app.post("/other"), lambda handler: handler)
    add("remove", app.delete("/other"), lambda handler: handler)
    return app


_SHOPS: dict[str, Callable[[OnceKey, Only | None, bool], Any]] = {
    "starlette": _starlette,
    "fastapi": _fastapi,
    "litestar": _litestar,
    "flask": _flask,
}


async def ask(
    app: Any, route: str, key: str | None = None, *, content: bytes = b"", headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """One request: ``ask(app, "POST /pay", "k-1")``."""
    method, path = route.split(" ")
    sent = dict(headers or {}) | ({} if key is None else {"Idempotency-Key": key})
    url = f"http://shop.test{path}"
    if isinstance(app, Flask):
        with httpx.Client(transport=httpx.WSGITransport(app)) as blocking:
            return blocking.request(method, url, headers=sent, content=content)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        return await client.request(method, url, headers=sent, content=content)


def record_of(once: OnceKey, key: str) -> Record | None:
    return once.store.read([("single-tenant", key)])[0]


async def handle(request: Any) -> Response:
    return PlainTextResponse("handled")


async def taken_under(app: Any, once: Any, routes: Any = ROUTES) -> dict[str, tuple[str, str] | None]:
    """Of each route: the operation and the effects under which its key was taken; None: it was not taken."""
    found = {}
    for number, route in enumerate(routes):
        answer = await ask(app, route, f"key-{number}")
        assert answer.status_code < 300, (route, answer.status_code, answer.text)
        record = record_of(once, f"key-{number}")
        found[route] = None if record is None else (record.operation, str(record.effects))
    return found
