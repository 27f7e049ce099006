"""The apps that the HTTP tests protect, and the few helpers with which the tests drive them.

``Api`` is one protected app in this process: its handler counts its runs, and what it answers is the test's to say.
``create`` is the app that real uvicorn processes serve; ``Process`` starts one. Nothing here asserts.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.record import Record
from oncekey.stores.base import Store
from oncekey.stores.memory import MemoryStore
from oncekey.stores.urls import open_store
from oncekey.telemetry import events
from oncekey.testing.servers import free_port
from oncekey.web.asgi import IdempotencyMiddleware
from tests import databases

ROOT = Path(__file__).parents[2]
ONE = "single-tenant"
"""The scope of all keys of an app with SINGLE_TENANT and ``key_per="tenant"``."""
PAYMENT = {"amount": 1000, "currency": "EUR"}
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
                    "UPDATE idempotency_keys SET lease_until = lease_until - ?, expires_at = expires_at - ?"
                    " WHERE scope = ? AND key = ?",
                    [seconds, seconds, scope, key],
                )
                assert done.rowcount == 1, "no such key"
            connection.close()
        else:
            with databases.beside(self.url) as server:
                aged = server.execute(
                    "UPDATE idempotency_keys SET lease_until = lease_until - %s * interval '1 second',"
                    " expires_at = expires_at - %s * interval '1 second' WHERE scope = %s AND key = %s",
                    [seconds, seconds, scope, key],
                )
                assert aged.rowcount == 1, "no such key"

    def rows(self) -> int:
        """How many keys there are."""
        if self.url == "memory://":
            return len(self._memory._rows)
        count = "SELECT count(*) FROM idempotency_keys"
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


def same(first: httpx.Response, second: httpx.Response) -> bool:
    """Whether two answers are the same, byte for byte, apart from the mark that says which is the replay."""
    return first.status_code == second.status_code and first.content == second.content and _bare(first) == _bare(second)


def _bare(response: httpx.Response) -> list[tuple[str, str]]:
    marks = ("idempotency-replayed", "idempotent-replayed")
    return sorted((name.lower(), value) for name, value in response.headers.multi_items() if name.lower() not in marks)


# ---------------------------------------------------------------- ASGI by hand


class Wire:
    """One ASGI request, driven by hand: what the server would send in, and everything that came out."""

    def __init__(
        self,
        app: Any,
        *,
        key: str | None = "k-1",
        path: str = "/payments",
        body: bytes = b'{"amount":1000,"currency":"EUR"}',
        headers: Mapping[str, str] | None = None,
        spec_version: str = "2.3",
        extensions: Mapping[str, Any] | None = None,
    ) -> None:
        fields = {"content-type": "application/json", "host": "api.test", **(headers or {})}
        if key is not None:
            fields["idempotency-key"] = key
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in fields.items()],
            "client": ("127.0.0.1", 1),
            "server": ("api.test", 80),
            "state": {},
            "extensions": dict(extensions or {}),
        }
        self._app = app
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[dict[str, Any]] = []
        self.broken = False
        """From now on the client is gone: sending raises, as servers of ASGI 2.4 do."""

    def disconnect(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        if self.broken:
            raise OSError("the client has gone")
        self.sent.append(dict(message))

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._app(self.scope, self.incoming.get, self.send))

    @property
    def status(self) -> int:
        return next((message["status"] for message in self.sent if message["type"] == "http.response.start"), 0)

    @property
    def headers(self) -> dict[str, str]:
        start = next(message for message in self.sent if message["type"] == "http.response.start")
        return {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent if message["type"] == "http.response.body")

    @property
    def ended(self) -> bool:
        return any(m["type"] == "http.response.body" and not m.get("more_body", False) for m in self.sent)


# ---------------------------------------------------------------- a real server in this process


@contextmanager
def served(app: Any, http: str = "h11") -> Iterator[int]:
    """Serve an app with uvicorn, in a thread; its port."""
    port = free_port()
    config = uvicorn.Config(app, port=port, http=http, loop="asyncio", log_config=None, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="served")
    thread.start()
    try:
        deadline = time.monotonic() + SECONDS
        while not server.started:
            assert thread.is_alive(), "uvicorn did not start"
            assert time.monotonic() < deadline, "uvicorn did not start in time"
            time.sleep(0.005)
        yield port
    finally:
        server.should_exit = True
        thread.join(SECONDS)


def talk(port: int, *pieces: bytes, seconds: float = SECONDS) -> bytes:
    """Send raw bytes to a server and return all that it says until it closes.

    A server that answers before it has read everything, and closes, has the rest of our bytes answered with a reset:
    what it said before that counts.
    """
    said = b""
    with socket.create_connection(("127.0.0.1", port), seconds) as sock:
        with suppress(ConnectionError):
            for piece in pieces:
                sock.sendall(piece)
        with suppress(ConnectionError):
            while piece := sock.recv(65536):
                said += piece
    return said


# ---------------------------------------------------------------- real processes


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


def mark(path: Path, text: str) -> None:
    """Append a line, in one write that no other process can come between."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, f"{text}\n".encode())
    finally:
        os.close(file)


class Process:
    """One uvicorn process that serves :func:`create`."""

    def __init__(self, store: str, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "uvicorn", "--factory", "tests.web.apps:create", "--app-dir", str(ROOT)]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port), "--log-level", "warning", "--timeout-graceful-shutdown", "2"],
            env=os.environ | {"ONCEKEY_TEST_STORE": store, "ONCEKEY_TEST_FOLDER": str(folder)},
            cwd=ROOT,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def answers(self) -> bool:
        assert self._process.poll() is None, "the process has ended"
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """As ``kill -9`` does."""
        self._process.kill()
        self._process.wait(SECONDS)

    def stop(self) -> None:
        """As an operator does, and by force if that is not enough."""
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
