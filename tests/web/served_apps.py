"""The apps that real gunicorn and uvicorn processes serve, by their import string. Nothing here asserts."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.web.asgi import IdempotencyMiddleware


def mark(path: Path, text: str) -> None:
    """Append a line, in one write that no other process can come between."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, f"{text}\n".encode())
    finally:
        os.close(file)


# ---------------------------------------------------------------- Starlette, for test_two_processes.py


def create() -> Starlette:
    """What a uvicorn process of the tests serves. Effects are lines in a file; handlers wait for a file named go."""
    folder = Path(os.environ["ONCEKEY_TEST_FOLDER"])

    async def effect(request: Request) -> Response:
        name = request.path_params["name"]
        mark(folder / f"{name}.effects", str(os.getpid()))
        while not (folder / f"{name}.go").exists():
            await asyncio.sleep(0.01)
        number = len((folder / f"{name}.effects").read_text().splitlines())
        return JSONResponse({"effect": number, "by": os.getpid()}, 201)

    def policy(**more: Any) -> Policy:
        return Policy(wait=timedelta(seconds=20), **more)

    routes = {
        "POST /conflict/{name}": policy(),
        "POST /wait/{name}": policy(in_flight="wait"),
        "POST /repeatable/{name}": policy(effects="repeatable"),
    }
    app = Starlette(routes=[Route("/{kind}/{name}", effect, methods=["POST"])])
    once = OnceKey(os.environ["ONCEKEY_TEST_STORE"], scope=SINGLE_TENANT, routes=dict(routes), migrate=True)
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


# ---------------------------------------------------------------- Flask and Starlette, for test_real_servers.py


def _served_once() -> OnceKey:
    """Made where the server imports the app: with ``gunicorn --preload``, before it forks."""
    return OnceKey(
        os.environ["ONCEKEY_TEST_STORE"],
        scope=SINGLE_TENANT,
        routes={
            "POST /wait/{name}": Policy(in_flight="wait", wait=timedelta(seconds=20)),
            "POST /lease/{name}": Policy(lease=timedelta(seconds=1)),
        },
        migrate=True,
    )


def _effect(folder: Path, name: str) -> Path:
    """Write the effect down; the file that the handler waits for, where there is a gate in front of it."""
    mark(folder / f"{name}.effects", f"{os.getpid()} {current().key} {current().attempt}")
    return folder / f"{name}.go"


def serve_flask() -> Any:
    """POST /pay/{name} appends its effect to a file; if {name}.gate exists, it then waits for {name}.go."""
    from flask import Flask

    from oncekey.web.flask import protect

    folder = Path(os.environ["ONCEKEY_TEST_FOLDER"])
    app = Flask("served")

    def pay(name: str) -> Any:
        go = _effect(folder, name)
        while (folder / f"{name}.gate").exists() and not go.exists():
            time.sleep(0.005)
        return {"paid": name, "by": os.getpid()}, 201

    app.add_url_rule("/pay/<name>", "pay", pay, methods=["POST"])
    app.add_url_rule("/wait/<name>", "wait", pay, methods=["POST"])
    app.add_url_rule("/lease/<name>", "lease", pay, methods=["POST"])
    app.add_url_rule("/", "up", lambda: "up")
    protect(app, _served_once())
    if os.environ.get("ONCEKEY_TEST_WARM"):
        # Lanes, keeper and connections exist before the fork: a child that used them would break.
        first = app.test_client().post("/pay/warm", json={}, headers={"Idempotency-Key": "warm"})
        mark(folder / "warm.pid", f"{os.getpid()} {first.status_code}")
    return app


def serve_starlette() -> Any:
    """The same in Starlette, for uvicorn."""
    folder = Path(os.environ["ONCEKEY_TEST_FOLDER"])

    async def pay(asked: Any) -> Any:
        name = asked.path_params["name"]
        go = _effect(folder, name)
        while (folder / f"{name}.gate").exists() and not go.exists():
            await asyncio.sleep(0.005)
        return JSONResponse({"paid": name, "by": os.getpid()}, 201)

    async def up(asked: Any) -> Any:
        return PlainTextResponse("up")

    app = Starlette(
        routes=[
            Route("/pay/{name}", pay, methods=["POST"]),
            Route("/wait/{name}", pay, methods=["POST"]),
            Route("/lease/{name}", pay, methods=["POST"]),
            Route("/", up),
        ]
    )
    app.add_middleware(IdempotencyMiddleware, once=_served_once())
    return app


def serve_django(*, asgi: bool = False, drf: bool = False) -> Any:
    """The same in Django, for gunicorn; with async views for uvicorn. ``drf``: with views of REST framework."""
    from django.http import HttpResponse, JsonResponse
    from django.urls import path

    from tests.web.django_apps import configure, make_handler, urls

    configure()
    folder = Path(os.environ["ONCEKEY_TEST_FOLDER"])

    def pay(asked: Any, name: str) -> Any:
        go = _effect(folder, name)
        while (folder / f"{name}.gate").exists() and not go.exists():
            time.sleep(0.005)
        return JsonResponse({"paid": name, "by": os.getpid()}, status=201)

    async def pay_async(asked: Any, name: str) -> Any:
        go = _effect(folder, name)
        while (folder / f"{name}.gate").exists() and not go.exists():
            await asyncio.sleep(0.005)
        return JsonResponse({"paid": name, "by": os.getpid()}, status=201)

    view: Any = pay_async if asgi else pay
    if drf:
        from rest_framework.decorators import api_view

        view = api_view(["POST"])(pay)
    patterns = [path(f"{kind}/<name>", view) for kind in ("pay", "wait", "lease")]
    app = make_handler(urls(*patterns, path("", lambda asked: HttpResponse("up"))), _served_once(), asgi=asgi)
    if os.environ.get("ONCEKEY_TEST_WARM") and not asgi:
        import httpx

        with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://served") as client:
            first = client.post("/pay/warm", json={}, headers={"Idempotency-Key": "warm"})
        mark(folder / "warm.pid", f"{os.getpid()} {first.status_code}")
    return app


def serve_django_asgi() -> Any:
    return serve_django(asgi=True)
