"""The apps that the HTTP tests protect, and the few helpers with which the tests drive them.

``Api`` is one protected app in this process: its handler counts its runs, and what it answers is the test's to say.
``World`` is where its keys are. One ASGI request by hand is in tests/web/asgi_server.py, real servers are in
tests/web/processes.py. Nothing here asserts.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.record import Record
from oncekey.stores.api import Store
from oncekey.stores.memory import MemoryStore
from oncekey.stores.registry import open_store
from oncekey.telemetry import events
from oncekey.web.asgi import IdempotencyMiddleware
from tests import databases
from tests.stores import dynamo_rows, redis_rows
from tests.stores.mysql import older, run

ONE = "single-tenant"
"""The scope of all keys of an app with SINGLE_TENANT and ``key_per="tenant"``."""
PAYMENT = {"amount": 1000, "currency": "EUR"}
PATIENCE = Policy(begin_timeout=timedelta(seconds=0.3))
"""For an app whose store fails: it is not waited for any longer than this."""
ATTENTIVE = Policy(begin_timeout=timedelta(seconds=0.3), lease=timedelta(seconds=1.2))
"""The same, and its keeper looks every tenth of a second: twelve times a lease."""
ROUTES = (
    "POST /payments",
    "PATCH /payments",
    "PUT /payments",
    "DELETE /payments",
    "GET /payments",
    "HEAD /payments",
    "OPTIONS /payments",
    "POST /refunds",
    "POST /files/{rest:path}",
)
SECONDS = 10.0
"""How long a test waits for what must happen before it says that it did not."""

Respond = Callable[[Request, int], Response | Awaitable[Response]]


# ---------------------------------------------------------------- waiting


async def until(holds: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Poll until ``holds()`` is true, and return what it said."""
    deadline = time.monotonic() + seconds
    while not (said := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.005)
    return said


async def soon(awaitable: Awaitable[Any], seconds: float = SECONDS) -> Any:
    """The same, within a limit: a test that hangs says nothing."""
    return await asyncio.wait_for(awaitable, seconds)


class Gate:
    """A handler waits in it: the test sees that it has come, and lets it go on."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go = asyncio.Event()

    async def wait(self) -> None:
        self.entered.set()
        await soon(self.go.wait(), 30.0)


# ---------------------------------------------------------------- where keys are kept


class Clock:
    """The host's time, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class World:
    """One place where keys are kept, and time that can be let pass in it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._clock = Clock()
        self._memory = MemoryStore(self._clock)

    def store(self) -> Store:
        """A store object on this place: as another process would open it, except in memory, where there is one."""
        return self._memory if self.url == "memory://" else open_store(self.url)

    def age(self, key: str, seconds: float, scope: str = ONE) -> None:
        """Let time pass for one key; for all of them in memory."""
        if self.url == "memory://":
            self._clock.ahead += seconds
        elif self.url.startswith("sqlite"):
            with sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=5.0) as connection:
                done = connection.execute(
                    "UPDATE idempotency_keys SET lease_until = lease_until - ?, expires_at = expires_at - ?,"
                    " created_at = created_at - ? WHERE scope = ? AND key = ?",
                    [seconds, seconds, seconds, scope, key],
                )
                assert done.rowcount == 1, "no such key"
            connection.close()
        elif self.url.startswith("redis"):
            redis_rows.age(self.url, [(scope, key)], seconds)
        elif self.url.startswith("dynamodb"):
            dynamo_rows.age(self.url, [(scope, key)], seconds)
        elif self.url.startswith("mysql"):
            older(self.url, seconds, scope, key)
        else:
            with databases.beside(self.url) as server:
                aged = server.execute(
                    "UPDATE idempotency_keys SET lease_until = lease_until - %s * interval '1 second',"
                    " expires_at = expires_at - %s * interval '1 second',"
                    " created_at = created_at - %s * interval '1 second' WHERE scope = %s AND key = %s",
                    [seconds, seconds, seconds, scope, key],
                )
                assert aged.rowcount == 1, "no such key"

    def change(self, key: str, scope: str = ONE, **columns: Any) -> None:
        """Write into the row of a key, as another version would have."""
        if self.url == "memory://":
            self._memory._rows[scope, key] = replace(self._memory._rows[scope, key], **columns)
            return
        where = [*columns.values(), scope, key]
        if self.url.startswith("sqlite"):
            text = ", ".join(f"{name} = ?" for name in columns)
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=5.0)) as connection, connection:
                done = connection.execute(f"UPDATE idempotency_keys SET {text} WHERE scope = ? AND key = ?", where)
                assert done.rowcount == 1, "no such key"
        elif self.url.startswith("redis"):
            redis_rows.change(self.url, scope, key, columns)
        elif self.url.startswith("dynamodb"):
            dynamo_rows.change(self.url, scope, key, columns)
        elif self.url.startswith("mysql"):
            text = ", ".join(f"{name} = %({name})s" for name in columns)
            named = {**columns, "at_scope": scope, "at_key": key}
            run(
                self.url,
                f"UPDATE idempotency_keys SET {text} WHERE scope = %(at_scope)s AND `key` = %(at_key)s",
                **named,
            )
        else:
            text = ", ".join(f"{name} = %s" for name in columns)
            with databases.beside(self.url) as server:
                written = server.execute(
                    f"UPDATE idempotency_keys SET {text} WHERE scope = %s AND key = %s".encode(), where
                )
                assert written.rowcount == 1, "no such key"

    def rows(self) -> int:
        """How many keys there are."""
        if self.url == "memory://":
            return len(self._memory._rows)
        if self.url.startswith("redis"):
            return redis_rows.count(self.url)
        if self.url.startswith("dynamodb"):
            return dynamo_rows.count(self.url)
        count = "SELECT count(*) FROM idempotency_keys"
        if self.url.startswith("mysql"):
            return int(run(self.url, count)[0][0])
        if self.url.startswith("sqlite"):
            path = self.url.removeprefix("sqlite:///")
            if not Path(path).exists():
                return 0
            connection = sqlite3.connect(path)
            try:
                return connection.execute(count).fetchone()[0]
            finally:
                connection.close()
        with databases.beside(self.url) as server:
            row = server.execute(count).fetchone()
            return row[0] if row else 0

    def record(self, key: str, scope: str = ONE) -> Record | None:
        """The row of a key."""
        store = self.store()
        try:
            return store.read([(scope, key)])[0]
        finally:
            store.disconnect()


# ---------------------------------------------------------------- an app in this process


def paid(request: Request, run: int) -> Response:
    """What a handler answers unless a test says otherwise: every run says something else."""
    del request
    return JSONResponse({"id": f"pay_{run}"}, 201, headers={"location": f"/payments/pay_{run}"})


def held(gate: Gate, answer: Callable[[Request, int], Response] = paid) -> Callable[[Request, int], Any]:
    """A handler that waits in a gate before it answers."""

    async def respond(request: Request, run: int) -> Response:
        await gate.wait()
        return answer(request, run)

    return respond


def raising(error: Callable[[], Exception]) -> Callable[[Request, int], Response]:
    """A handler whose first run raises; any other says which attempt it is."""

    def respond(request: Request, run: int) -> Response:
        if run == 1:
            raise error()
        return JSONResponse({"attempt": current().attempt}, 201)

    return respond


def make_app(framework: str, endpoint: Callable[..., Any], routes: tuple[str, ...] = ROUTES) -> Starlette:
    """One endpoint behind every route, in either framework."""
    app: Starlette = FastAPI(openapi_url=None) if framework == "fastapi" else Starlette()
    for text in routes:
        method, path = text.split(" ")
        if isinstance(app, FastAPI):
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
        else:
            app.router.routes.append(Route(path, endpoint, methods=[method]))
    return app


class Api:
    """One protected app and a client to it."""

    def __init__(
        self,
        world: World,
        framework: str,
        respond: Respond = paid,
        *,
        policy: Policy | None = None,
        store: Store | str | None = None,
        prepare: Callable[[Starlette], None] | None = None,
        behind: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        """``prepare`` changes the app before our middleware is added; ``behind`` wraps it in front of all."""
        self.world = world
        self.runs = 0
        self.events: list[events.Event] = []
        self.requests: list[Request] = []
        self._respond = respond
        options.setdefault("scope", SINGLE_TENANT)
        options.setdefault("migrate", True)
        self.once = OnceKey(store or world.store(), policy=policy, on_event=self.events.append, **options)
        app = make_app(framework, self._endpoint)
        if prepare is not None:
            prepare(app)
        app.add_middleware(IdempotencyMiddleware, once=self.once)
        self.app = behind(app) if behind else app
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://api.test")

    async def _endpoint(self, request: Request) -> Response:
        self.runs += 1
        self.requests.append(request)
        answer = self._respond(request, self.runs)
        return await answer if inspect.isawaitable(answer) else answer

    async def post(
        self,
        key: str | bytes | None = "k-1",
        path: str = "/payments",
        *,
        method: str = "POST",
        body: Any = PAYMENT,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> httpx.Response:
        """Send a JSON body, or ``content=`` bytes, under a key."""
        sent: list[tuple[Any, Any]] = list((headers or {}).items())
        if key is not None:
            sent.append(("Idempotency-Key", key))
        if "content" not in more:
            more["json"] = body
        return await soon(self.client.request(method, path, headers=sent, **more), 30.0)

    def start(self, *args: Any, **more: Any) -> asyncio.Task[httpx.Response]:
        """The same, in a task of its own."""
        return asyncio.create_task(self.post(*args, **more))

    def saw(self, kind: type[events.Event]) -> list[Any]:
        """The events of one kind so far."""
        return [event for event in list(self.events) if type(event) is kind]

    async def close(self) -> None:
        await self.client.aclose()
        await self.once.aclose(grace=2.0)


MakeApi = Callable[..., Api]
JSON = {"content-type": "application/json"}


def protected(app: Any, api: Api) -> Any:
    """Another ASGI app, protected by the ``OnceKey`` of this API."""
    return IdempotencyMiddleware(app, once=api.once)


def same(first: httpx.Response, second: httpx.Response) -> bool:
    """Whether two answers are the same, byte for byte, apart from the mark that says which is the replay."""
    return first.status_code == second.status_code and first.content == second.content and _bare(first) == _bare(second)


def _bare(response: httpx.Response) -> list[tuple[str, str]]:
    marks = ("idempotency-replayed", "idempotent-replayed")
    return sorted((name.lower(), value) for name, value in response.headers.multi_items() if name.lower() not in marks)
