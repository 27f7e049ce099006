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
from tests.engine.phased_api import PHASED, PhasedApi

Handler = Callable[[], dict[str, Any]]


def connect(phased: PhasedApi) -> Any:
    """One that is used in its own thread only: a phase begins and ends in the handler's."""
    return sqlite3.connect(phased.shop.path) if phased.shop.kind == "sqlite" else psycopg.connect(phased.shop.url)


async def asgi(phased: PhasedApi, handler: Handler) -> tuple[int, Any]:
    def in_thread(_: Request) -> JSONResponse:
        return JSONResponse(handler(), 201)

    answer = await phased.shop.api(in_thread, PHASED).post()
    return answer.status_code, answer.json() if answer.status_code == 201 else None


async def wsgi(phased: PhasedApi, handler: Handler) -> tuple[int, Any]:
    def serve() -> tuple[int, Any]:
        app = Flask("phased")
        app.add_url_rule("/payments", view_func=lambda: (handler(), 201), methods=["POST"])
        with OnceKey(phased.shop.url, scope=SINGLE_TENANT, policy=PHASED) as once:
            flask_web.protect(app, once)
            answer = app.test_client().post("/payments", headers={"Idempotency-Key": "k-1"}, json={"cents": 5})
            return answer.status_code, answer.json if answer.status_code == 201 else None

    return await asyncio.to_thread(serve)


@pytest.fixture(params=[asgi, wsgi])
def post(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_sync_handler_resumes_after_its_last_step(phased: PhasedApi, post: Any) -> None:
    def handler() -> dict[str, Any]:
        op = current()
        with closing(connect(phased)) as connection:

            def pay(name: str) -> str:
                phased.calls[name] += 1
                connection.execute("INSERT INTO payments (key, cents) VALUES ('k-1', 5)")
                op.blocking.enqueue("receipt", {"of": name})
                return name

            row = op.blocking.phase("row", pay, "row", on=connection)
            charge = op.blocking.effect("charge", phased.call, "charge", repeatable=False)
            if op.attempt == 1:
                raise NotExecuted("stumbled")
            return {"row": row, "charge": charge, "note": op.blocking.phase("note", pay, name="note", on=connection)}

    assert (await post(phased, handler))[0] == 503
    assert phased.state is State.FAILED_RETRYABLE
    assert await post(phased, handler) == (201, {"row": "row", "charge": {"call": 1}, "note": "note"})
    assert (phased.calls, phased.shop.payments(), phased.state) == (
        {"row": 1, "charge": 1, "note": 1},
        2,
        State.COMPLETED,
    )
    keys = [key for _, key in phased.jobs()]
    assert len(set(keys)) == 2


async def test_sync_phase_that_raises_rolls_back(phased: PhasedApi, post: Any) -> None:
    def handler() -> dict[str, Any]:
        with closing(connect(phased)) as connection:

            def pay() -> dict[str, Any]:
                connection.execute("INSERT INTO payments (key, cents) VALUES ('k-1', 5)")
                raise ValueError("after the write")

            return current().blocking.phase("row", pay, on=connection)

    assert (await post(phased, handler))[0] == 500
    assert (phased.shop.payments(), phased.state, phased.is_free()) == (0, State.FAILED_RETRYABLE, True)


@pytest.mark.parametrize("kind", ["phase", "effect"])
async def test_async_functions_are_refused_before_anything_is_written(phased: PhasedApi, post: Any, kind: str) -> None:
    """Found out after the intent, the key would be unknown for nothing."""
    errors = []

    async def charge() -> None:
        phased.calls["charge"] += 1

    def handler() -> dict[str, Any]:
        with closing(connect(phased)) as connection:
            try:
                if kind == "effect":
                    current().blocking.effect("charge", charge, repeatable=False)  # type: ignore[unused-coroutine]
                else:
                    current().blocking.phase("row", charge, on=connection)  # type: ignore[unused-coroutine]
            except ApplicationError as error:
                errors.append(str(error))
                raise
        return {}

    assert (await post(phased, handler))[0] == 500
    assert "takes plain functions" in errors[0]
    assert (phased.calls, phased.state, phased.steps()) == ({}, State.FAILED_RETRYABLE, {})
