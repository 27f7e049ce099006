"""Steps of handlers that are plain functions: in the thread pool of an ASGI app, and under WSGI."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
from flask import Flask
from starlette.requests import Request
from starlette.responses import JSONResponse

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, current
from oncekey.core.states import State
from oncekey.errors import ApplicationError
from oncekey.web import flask as flask_web
from tests.engine.desk import PHASED, Desk

Handler = Callable[[], dict[str, Any]]


def connect(desk: Desk) -> Any:
    """One that is used in its own thread only: a phase begins and ends in the handler's."""
    return sqlite3.connect(desk.shop.path) if desk.shop.kind == "sqlite" else psycopg.connect(desk.shop.url)


async def asgi(desk: Desk, handler: Handler) -> tuple[int, Any]:
    def in_thread(_: Request) -> JSONResponse:
        return JSONResponse(handler(), 201)

    answer = await desk.shop.api(in_thread, PHASED).post()
    return answer.status_code, answer.json() if answer.status_code == 201 else None


async def wsgi(desk: Desk, handler: Handler) -> tuple[int, Any]:
    def serve() -> tuple[int, Any]:
        app = Flask("desk")
        app.add_url_rule("/payments", view_func=lambda: (handler(), 201), methods=["POST"])
        with OnceKey(desk.shop.url, scope=SINGLE_TENANT, policy=PHASED) as once:
            flask_web.protect(app, once)
            answer = app.test_client().post("/payments", headers={"Idempotency-Key": "k-1"}, json={"cents": 5})
            return answer.status_code, answer.json if answer.status_code == 201 else None

    return await asyncio.to_thread(serve)


@pytest.fixture(params=[asgi, wsgi])
def post(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_resumed(desk: Desk, post: Any) -> None:
    def handler() -> dict[str, Any]:
        op = current()
        with closing(connect(desk)) as connection:

            def pay(name: str) -> str:
                desk.calls[name] += 1
                connection.execute("INSERT INTO payments (key, cents) VALUES ('k-1', 5)")
                op.blocking.enqueue("receipt", {"of": name})
                return name

            row = op.blocking.phase("row", pay, "row", on=connection)
            charge = op.blocking.effect("charge", desk.call, "charge", repeatable=False)
            if op.attempt == 1:
                raise NotExecuted("stumbled")
            return {"row": row, "charge": charge, "note": op.blocking.phase("note", pay, name="note", on=connection)}

    assert (await post(desk, handler))[0] == 503
    assert desk.state is State.FAILED_RETRYABLE
    assert await post(desk, handler) == (201, {"row": "row", "charge": {"call": 1}, "note": "note"})
    assert (desk.calls, desk.shop.payments(), desk.state) == (
        {"row": 1, "charge": 1, "note": 1},
        2,
        State.COMPLETED,
    )
    keys = [key for _, key in desk.jobs()]
    assert len(set(keys)) == 2


async def test_a_phase_that_raises(desk: Desk, post: Any) -> None:
    def handler() -> dict[str, Any]:
        with closing(connect(desk)) as connection:

            def pay() -> dict[str, Any]:
                connection.execute("INSERT INTO payments (key, cents) VALUES ('k-1', 5)")
                raise ValueError("after the write")

            return current().blocking.phase("row", pay, on=connection)

    assert (await post(desk, handler))[0] == 500
    assert (desk.shop.payments(), desk.state, desk.is_free()) == (0, State.FAILED_RETRYABLE, True)


@pytest.mark.parametrize("kind", ["phase", "effect"])
async def test_async_functions_are_refused_before_anything_is_written(desk: Desk, post: Any, kind: str) -> None:
    """Found out after the intent, the key would be unknown for nothing."""
    errors = []

    async def charge() -> None:
        desk.calls["charge"] += 1

    def handler() -> dict[str, Any]:
        with closing(connect(desk)) as connection:
            try:
                if kind == "effect":
                    current().blocking.effect("charge", charge, repeatable=False)  # type: ignore[unused-coroutine]
                else:
                    current().blocking.phase("row", charge, on=connection)  # type: ignore[unused-coroutine]
            except ApplicationError as error:
                errors.append(str(error))
                raise
        return {}

    assert (await post(desk, handler))[0] == 500
    assert "takes plain functions" in errors[0]
    assert (desk.calls, desk.state, desk.steps()) == ({}, State.FAILED_RETRYABLE, {})
