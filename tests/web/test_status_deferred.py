"""A request that leaves the rest to a job, in ASGI and in WSGI: 202 with Retry-After, then the worker's answer."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fastapi
import httpx
import psycopg
import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import JSONResponse
from flask import Flask

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.outbox import Response, Worker
from oncekey.stores.api import Outbox
from oncekey.stores.registry import open_store
from oncekey.web.fastapi import CurrentOperation, protect
from oncekey.web.flask import protect as protect_flask
from oncekey.web.status import status_app, status_path

Send = Callable[..., Awaitable[Any]]
POLICY = Policy(effects="transactional", retry_after=timedelta(seconds=7))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    store: str = request.getfixturevalue("postgres_url")
    return store


@pytest.fixture
async def once(url: str) -> AsyncIterator[OnceKey]:
    store = open_store(url)
    store.migrate()
    store.disconnect()
    made = OnceKey(store, scope=SINGLE_TENANT, policy=POLICY)
    yield made
    await made.aclose()


def connect(url: str) -> Any:
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=10, check_same_thread=False)
    return psycopg.connect(url)


async def work(url: str) -> None:
    """Do all that is due."""
    worker = Worker(url)

    @worker.task()
    def book(ctx: Any, payload: Any) -> Response:
        return Response(201, {"booked": payload}, headers={"Location": "/rides/7"})

    assert (await worker.serve(until="drained")).done == 1


def fastapi_client(once: OnceKey, url: str, headers: dict[str, str]) -> Send:
    app = FastAPI()

    def connection() -> Iterator[Any]:
        with closing(connect(url)) as db:
            yield db

    opened = Depends(connection)

    @app.post("/rides", status_code=202)
    def ride(op: CurrentOperation, db: Any = opened, refuse: bool = False) -> JSONResponse:
        op.blocking.enlist(db)
        op.blocking.defer("book", "a ride")
        if refuse:
            raise HTTPException(402)
        return JSONResponse({}, 202, headers={"Location": status_path("/idempotency", op), **headers})

    protect(app, once)
    app.mount("/idempotency", status_app(once))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rides.test")
    return client.request


def flask_client(once: OnceKey, url: str, headers: dict[str, str]) -> Send:
    app = Flask("rides")
    protect_flask(app, once)
    opened: list[Any] = []

    @app.post("/rides")
    def ride() -> Any:
        opened.append(connect(url))
        current().blocking.enlist(opened[-1])
        current().blocking.defer("book", "a ride")
        return {}, 202, {"Location": "/idempotency/k-1", **headers}

    @app.teardown_request
    def close(error: BaseException | None) -> None:
        while opened:
            opened.pop().close()

    async def send(method: str, path: str, **more: Any) -> Any:
        return await asyncio.to_thread(lambda: app.test_client().open(path, method=method, **more))

    return send


@pytest.mark.parametrize("make", [fastapi_client, flask_client])
async def test_the_first_202_says_when_to_ask_again(once: OnceKey, url: str, make: Callable[..., Send]) -> None:
    """As those for the retries do; then all get what the worker settled it with."""
    send, key = make(once, url, {}), {"Idempotency-Key": "k-1"}
    first, second = [await send("POST", "/rides", headers=key) for _ in range(2)]
    for answer in (first, second):
        assert (answer.status_code, answer.headers["retry-after"]) == (202, "7")
        assert answer.headers["location"] == "/idempotency/k-1"
    await work(url)
    for _ in range(2):
        done = await send("POST", "/rides", headers=key)
        assert (done.status_code, done.headers["location"]) == (201, "/rides/7")
        assert "retry-after" not in done.headers


@pytest.mark.parametrize("make", [fastapi_client, flask_client])
async def test_a_handler_may_know_better(once: OnceKey, url: str, make: Callable[..., Send]) -> None:
    """Its own Retry-After is kept, and is the only one."""
    send = make(once, url, {"Retry-After": "120"})
    answer = await send("POST", "/rides", headers={"Idempotency-Key": "k-1"})
    assert (answer.status_code, answer.headers["retry-after"]) == (202, "120")


async def test_an_error_after_all_promises_nothing(once: OnceKey, url: str) -> None:
    """The job is rolled back with it, and the client is not told to come back for its result."""
    send = fastapi_client(once, url, {})
    answer = await send("POST", "/rides?refuse=yes", headers={"Idempotency-Key": "k-1"})
    assert (answer.status_code, "retry-after" in answer.headers) == (402, False)
    store = open_store(url)
    assert isinstance(store, Outbox)
    assert store.outbox_health().ready == 0
    store.disconnect()


async def test_status_of_a_deferred_request_is_202_until_the_worker_is_done(once: OnceKey, url: str) -> None:
    """202 at the place that Location names, until the worker is done."""
    send = fastapi_client(once, url, {})
    place = (await send("POST", "/rides", headers={"Idempotency-Key": '"k/1 2"'})).headers["location"]
    assert place == "/idempotency/k%2F1%202"
    assert (await send("GET", place)).status_code == 202
    await work(url)
    done = await send("GET", place)
    assert (done.status_code, done.json()) == (201, {"booked": "a ride"})


async def test_code_of_the_page_runs_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/background.md, run as it stands there."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "background.md").read_text()
    handler, task, accepted = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    async def connection() -> AsyncIterator[Any]:
        with closing(sqlite3.connect("shop.db")) as db:
            yield db

    class Provider:
        keys: ClassVar[list[str]] = []

        async def charge(self, cents: int, *, idempotency_key: str) -> Any:
            self.keys.append(idempotency_key)
            return SimpleNamespace(id=f"ch_{cents}")

    names: dict[str, Any] = {"__name__": "page", "app": FastAPI(), "tenant_of": lambda request: "ada"}
    names |= {"Response": fastapi.Response, "Depends": Depends, "connection": connection}
    exec(handler, names)
    with closing(sqlite3.connect("shop.db")) as db:
        db.execute("CREATE TABLE payments (cents INTEGER, status TEXT)")
    jobs: dict[str, Any] = {"__name__": "page", "provider": Provider()}
    exec(task, jobs)
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://page.test") as client:
        key = {"Idempotency-Key": "k-1"}
        first = await client.post("/payments", headers=key, json={"cents": 5})
        assert (first.status_code, first.headers["location"]) == (202, "/idempotency/k-1")
        assert first.headers["retry-after"] == "1"
        assert (await client.get("/idempotency/k-1")).status_code == 202
        assert (await jobs["worker"].serve(until="drained")).done == 1
        for answer in (
            await client.get("/idempotency/k-1"),
            await client.post("/payments", headers=key, json={"cents": 5}),
        ):
            assert (answer.status_code, answer.json()) == (201, {"charge": "ch_5"})
    assert len(Provider.keys) == 1
    await names["once"].aclose()
    await _is_accepted(accepted)


async def _is_accepted(example: str) -> None:
    """The page's last example: a duplicate in flight is 202, and its Location answers."""
    names: dict[str, Any] = {"app": FastAPI()}
    exec(example, names)
    begun, end = asyncio.Event(), asyncio.Event()

    @names["app"].post("/reports")
    async def report() -> str:
        begun.set()
        await end.wait()
        return "done"

    protect(names["app"], names["once"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(names["app"]), base_url="http://page.test") as client:
        key = {"Idempotency-Key": "k-2"}
        first = asyncio.create_task(client.post("/reports", headers=key))
        await begun.wait()
        busy = await client.post("/reports", headers=key)
        assert (busy.status_code, busy.json()["state"]) == (202, "in_progress")
        end.set()
        assert (await first).json() == "done"
        assert (await client.get(busy.headers["location"])).json() == "done"
    await names["once"].aclose()
