"""A path with a line break is no way around a protected ``{name:path}`` in the frameworks that route it."""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request, put
from litestar.testing import TestClient

from oncekey import SINGLE_TENANT, OnceKey, Policy

PATH = "/files/%0Ax"
ROUTES = {"PUT /files/{name:path}": Policy(methods=frozenset({"PUT"}))}


def test_flask_refuses_a_keyless_put_to_a_path_with_a_line_break() -> None:
    from flask import Flask

    from oncekey.web.flask import protect

    app = Flask("files")
    written: list[str] = []

    @app.put("/files/<path:name>")
    def put(name: str) -> str:
        written.append(name)
        return name

    with OnceKey("memory://", scope=SINGLE_TENANT, routes=dict(ROUTES)) as once:
        protect(app, once)
        client = app.test_client()
        assert (client.put(PATH).status_code, written) == (400, [])
        assert client.put(PATH, headers={"Idempotency-Key": "k-1"}).status_code == 200
        assert len(written) == 1


def test_litestar_refuses_a_keyless_put_to_a_path_with_a_line_break() -> None:
    from oncekey.web.litestar import OnceKeyPlugin

    written: list[str] = []

    @put("/files/{name:path}")
    async def put_file(request: Request[Any, Any, Any]) -> str:
        written.append(request.url.path)
        return "written"

    once = OnceKey("memory://", scope=SINGLE_TENANT, routes=dict(ROUTES))
    with TestClient(Litestar([put_file], plugins=[OnceKeyPlugin(once)])) as client:
        assert (client.put(PATH).status_code, written) == (400, [])
        assert client.put(PATH, headers={"Idempotency-Key": "k-1"}).status_code == 200
        assert len(written) == 1
