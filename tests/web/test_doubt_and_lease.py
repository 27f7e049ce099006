"""From when the quarantine of an unknown key counts: from its doubt where the handler is over, else one lease later."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from flask import Flask

from oncekey import SINGLE_TENANT, OnceKey, OutcomeUnknown, Policy, Refuted, current
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.verdicts import Outcome
from oncekey.web import flask as once_flask
from oncekey.web.fastapi import protect

LEASE = timedelta(seconds=60)
KEY = "doubted-1"


class Impatient:
    """Answers in the place of one endpoint."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/answered-for":
            await self.app(scope, receive, send)
            return
        try:
            await asyncio.wait_for(self.app(scope, receive, send), 0.2)
        except TimeoutError:
            await JSONResponse({}, 504)(scope, receive, send)


class Api:
    """One endpoint for each way to end. ``let_go`` ends the threads that outlive their request."""

    def __init__(self, url: str) -> None:
        self.once = OnceKey(
            url,
            scope=SINGLE_TENANT,
            policy=Policy(lease=LEASE, quarantine=timedelta(milliseconds=1)),
            routes={"POST /thread": Policy(effects="phased", lease=LEASE)},
            migrate=True,
        )
        self.let_go = threading.Event()
        app = self.app = FastAPI()

        app.add_middleware(Impatient)
        protect(app, self.once)

        @app.post("/raises")
        async def raises() -> None:
            raise ValueError("no such currency")

        @app.post("/raises-in-a-thread")
        def raises_in_a_thread() -> None:
            raise ValueError("no such currency")

        @app.post("/says-so")
        async def says_so() -> None:
            raise OutcomeUnknown("the provider did not answer")

        @app.post("/returns")
        async def returns() -> JSONResponse:
            return JSONResponse({}, 504)

        @app.post("/answered-for")
        async def answered_for() -> None:
            await asyncio.sleep(10)  # and then cancelled, which says nothing of what it has started

        @app.post("/breaks-off")
        async def breaks_off() -> StreamingResponse:
            def body() -> Iterator[bytes]:
                yield b"half"
                raise ConnectionError

            return StreamingResponse(body())

        @app.post("/thread")
        async def thread() -> None:
            """The call is given up, and its thread cannot be: it may still send."""
            called = threading.Event()

            def charge() -> None:
                called.set()
                self.let_go.wait(10)

            call = asyncio.ensure_future(current().effect("charge", charge, repeatable=False))
            await asyncio.to_thread(called.wait, 10)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            raise TimeoutError

    async def post(self, path: str) -> Record:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            with contextlib.suppress(ConnectionError):
                await client.post(path, headers={"Idempotency-Key": KEY})
        self.let_go.set()
        (record,) = self.once.store.read([("single-tenant", KEY)])
        self.once.store.disconnect()
        assert record is not None
        assert record.state is State.UNKNOWN
        return record


@pytest.fixture(params=["sqlite", "postgres"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    sqlite = request.param == "sqlite"
    api = Api(f"sqlite:///{tmp_path}/keys.db" if sqlite else request.getfixturevalue("postgres_url"))
    with api.once:
        yield api


@pytest.mark.parametrize("path", ["/raises", "/raises-in-a-thread", "/says-so", "/returns"])
async def test_quarantine_counts_from_becoming_unknown_if_the_handler_ended(api: Api, path: str) -> None:
    record = await api.post(path)
    assert record.lease_over
    await asyncio.sleep(0.002)  # the quarantine of the route
    settled = await api.once.ingest(Refuted("nothing was sent"), key=KEY)
    assert settled.outcome is Outcome.SETTLED


@pytest.mark.parametrize("path", ["/answered-for", "/breaks-off", "/thread"])
async def test_quarantine_counts_from_the_end_of_a_lease_where_the_handler_may_still_run(api: Api, path: str) -> None:
    record = await api.post(path)
    assert record.lease_until - record.now == pytest.approx(LEASE.total_seconds(), abs=10)
    settled = await api.once.ingest(Refuted("nothing was sent"), key=KEY)
    assert settled.outcome is Outcome.TOO_EARLY
    assert settled.retry_in is not None
    assert settled.retry_in > LEASE.total_seconds() - 10


@pytest.mark.parametrize("path", ["/raises", "/returns"])
def test_quarantine_of_a_flask_app_counts_from_becoming_unknown(tmp_path: Path, path: str) -> None:
    policy = Policy(lease=LEASE, quarantine=timedelta(milliseconds=1))
    once = OnceKey(f"sqlite:///{tmp_path}/keys.db", scope=SINGLE_TENANT, policy=policy)
    app = Flask("shop")

    @app.post("/raises")
    def raises() -> str:
        raise ValueError("no such currency")

    @app.post("/returns")
    def returns() -> tuple[str, int]:
        return "", 504

    once_flask.protect(app, once)
    with once:
        app.test_client().post(path, headers={"Idempotency-Key": KEY})
        (record,) = once.store.read([("single-tenant", KEY)])
        once.store.disconnect()
        assert record is not None
        assert (record.state, record.lease_over) == (State.UNKNOWN, True)
