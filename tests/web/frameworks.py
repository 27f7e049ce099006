"""One small payments API in every framework, and one client that drives all of them alike.

``Payments`` is what the API does: it counts its effects, and ``?m=`` says how a request ends. ``STACKS`` names the
frameworks, with async and sync handlers where a framework has both; ``Stack`` is one protected app of such a name.
``serve_flask`` and ``serve_starlette`` are what real gunicorn and uvicorn processes serve. Nothing here asserts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, OutcomeUnknown, Policy, Refused, current
from oncekey.core.record import Found, Record, Reservation, Swap
from oncekey.errors import NoOperation, StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.telemetry import events

ONE = "single-tenant"
"""The scope of all keys of an app with SINGLE_TENANT and ``key_per="tenant"``."""
NOW = 1_800_000_000.0
"""The time in every Stack's store, which stands still: so Idempotency-Expires is the same everywhere."""
SECONDS = 10.0
"""How long a test waits for what must happen before it says that it did not."""
PAYMENT = {"amount": 1000, "currency": "EUR"}
MAX_RESPONSE = 4096
"""The ``max_response_bytes`` of every Stack: above it stand the modes "large" and "stream-large"."""

ASGI_STACKS = (
    "asgi",
    "starlette-async",
    "starlette-sync",
    "fastapi-async",
    "fastapi-sync",
    "litestar-async",
    "litestar-sync",
)
WSGI_STACKS = ("wsgi", "flask")
STACKS = (*ASGI_STACKS, *WSGI_STACKS)
RAW = ("asgi", "wsgi")
"""No framework: nothing tells a 500 that was raised from one that was returned, and there is no exception for a 4xx."""


def until(holds: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Poll until ``holds()`` is true, and return what it said."""
    deadline = time.monotonic() + seconds
    while not (said := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)
    return said


# ---------------------------------------------------------------- what the API does


@dataclass(frozen=True)
class Reply:
    """A response before it has a framework. ``streamed``: in these pieces, without a length."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str | None = "application/json"
    streamed: tuple[bytes, ...] | None = None
    breaks: bool = False
    """Whether the stream raises in the place of its end."""

    @property
    def header_list(self) -> list[tuple[str, str]]:
        """With the content type in front."""
        return ([("content-type", self.content_type)] if self.content_type else []) + list(self.headers)


class Abort(Exception):
    """Each framework turns it into its own HTTP exception."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True)
class Run:
    """One effect: what a handler saw of itself."""

    key: str
    attempt: int
    downstream_key: str | None
    thread: str


@dataclass
class Payments:
    """The API without its framework: ``handle`` and its async twin are all that a handler calls."""

    runs: list[Run] = field(default_factory=list)
    healed: bool = False
    """From now on every mode is "ok"."""
    raising: bool = False
    """From now on every mode is "raise"."""
    entered: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    """The mode "slow" says ``entered`` and waits for ``go``."""

    def handle(self, mode: str) -> Reply:
        run = self._ran(mode)
        if mode == "slow":
            self.entered.set()
            self.go.wait(30.0)
        return self._end(mode, run)

    async def handle_async(self, mode: str) -> Reply:
        run = self._ran(mode)
        if mode == "slow":
            self.entered.set()
            await asyncio.to_thread(self.go.wait, 30.0)
        return self._end(mode, run)

    def _ran(self, mode: str) -> int:
        operation = current()
        # A verb: who uses one has begun, and "refused" must not have.
        downstream = None if mode == "refused" else operation.downstream_key("charge")
        self.runs.append(Run(operation.key, operation.attempt, downstream, threading.current_thread().name))
        return len(self.runs)

    def _end(self, mode: str, run: int) -> Reply:
        if self.healed:
            mode = "ok"
        if self.raising:
            mode = "raise"
        verb, _, status = mode.partition("-")
        match verb:
            case "return":
                return Reply(int(status), b'{"error":"returned"}')
            case "abort":
                raise Abort(int(status))
            case "raise":
                raise RuntimeError("the handler broke")
            case "not":
                raise NotExecuted("the bank is closed")
            case "unknown":
                raise OutcomeUnknown("the bank did not answer")
            case "refused":
                raise Refused("not today", status=int(status or 400))
            case "204":
                return Reply(204, content_type=None)
            case "large":
                return Reply(201, b"x" * (MAX_RESPONSE + 1), (("location", f"/payments/pay_{run}"),))
            case "stream":
                pieces: tuple[bytes, ...] = (b'{"id":', b'"pay_%d"' % run, b"}")
                if status == "large":
                    pieces = tuple(b"x" * 1000 for _ in range(10))
                where = (("location", f"/payments/pay_{run}"),)
                return Reply(201, headers=where, streamed=pieces, breaks=status == "broken")
            case "events":
                # With a charset, which Litestar adds to all text and the others do not.
                kind = "text/event-stream; charset=utf-8"
                return Reply(200, content_type=kind, streamed=(b"data: 1\n\n", b"data: 2\n\n"))
        return Reply(
            201,
            b'{"id":"pay_%d","status":"paid"}' % run,
            (
                ("location", f"/payments/pay_{run}"),
                ("etag", f'"{run}"'),
                ("cache-control", "no-store"),
                ("x-trace", f"of this run, {run}"),
                ("set-cookie", "session=secret"),
            ),
        )


def unprotected() -> Reply:
    """What GET and exempt routes answer: whether an Operation is seen where none runs."""
    try:
        return Reply(200, json.dumps({"operation": current().key}).encode())
    except NoOperation:
        return Reply(200, b'{"operation":null}')


def pieces_of(reply: Reply) -> Iterator[bytes]:
    yield from reply.streamed or ()
    if reply.breaks:
        raise RuntimeError("the stream broke")


async def async_pieces_of(reply: Reply) -> AsyncIterator[bytes]:
    for piece in pieces_of(reply):
        yield piece


# ---------------------------------------------------------------- the API in each framework
#
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


def starlette(payments: Payments, once: OnceKey, asynchronous: bool) -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oncekey.web.asgi import IdempotencyMiddleware

    pay, other = starlette_endpoints(payments, asynchronous)
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


def fastapi(payments: Payments, once: OnceKey, asynchronous: bool) -> Any:
    from fastapi import FastAPI

    from oncekey.web.fastapi import protect

    pay, other = starlette_endpoints(payments, asynchronous)
    app = FastAPI(openapi_url=None)
    app.add_api_route("/payments", pay, methods=["POST"], response_model=None)
    app.add_api_route("/payments/{id}/refunds", pay, methods=["POST"], response_model=None)
    app.add_api_route("/login", other, methods=["POST"], response_model=None)
    app.add_api_route("/status", other, methods=["GET"], response_model=None)
    protect(app, once)
    return app


def litestar(payments: Payments, once: OnceKey, asynchronous: bool) -> Any:
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


def flask(payments: Payments, once: OnceKey) -> Any:
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

    app.add_url_rule("/payments", "pay", pay, methods=["POST"])
    app.add_url_rule("/payments/<id>/refunds", "refund", pay, methods=["POST"])
    app.add_url_rule("/login", "login", other, methods=["POST"])
    app.add_url_rule("/status", "status", other, methods=["GET"])
    protect(app, once)
    return app


def make_app(name: str, payments: Payments, once: OnceKey) -> Any:
    """The protected app of one of STACKS."""
    framework, _, kind = name.partition("-")
    asynchronous = kind == "async"
    match framework:
        case "asgi":
            return raw_asgi(payments, once)
        case "wsgi":
            return raw_wsgi(payments, once)
        case "starlette":
            return starlette(payments, once, asynchronous)
        case "fastapi":
            return fastapi(payments, once, asynchronous)
        case "litestar":
            return litestar(payments, once, asynchronous)
    return flask(payments, once)


# ---------------------------------------------------------------- one protected app, and a client to it


def as_a_server(app: Any) -> Any:
    """What an app raises becomes a bare 500, as every WSGI server does; ASGITransport does it by itself."""

    def outer(environ: Any, start_response: Any) -> Any:
        try:
            return app(environ, start_response)
        except Exception:
            start_response("500 Internal Server Error", [("content-type", "text/plain")], sys.exc_info())
            return [b"Internal Server Error"]

    return outer


class FlakyStore(MemoryStore):
    """A store whose verbs fail while they are named in ``down``."""

    def __init__(self) -> None:
        super().__init__(lambda: NOW)
        self.down: set[str] = set()

    def _ask(self, verb: str) -> None:
        if verb in self.down:
            raise StoreUnavailable("the test has switched it off")

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        self._ask("reserve")
        return super().reserve(batch)

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        self._ask("swap")
        return super().swap(batch)

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        self._ask("read")
        return super().read(keys)

    def steal(self, key: str = "k-1") -> None:
        """Somebody took the key over: the next attempt runs, elsewhere."""
        with self._lock:
            row = self._rows[ONE, key]
            self._rows[ONE, key] = replace(row, owner="somebody else", attempt=row.attempt + 1)


class Loop:
    """An event loop in a thread of its own, so that tests are the same for sync and async apps."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop")
        self._thread.start()

    def start(self, awaitable: Awaitable[Any]) -> Future[Any]:
        async def run() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def close(self) -> None:
        self.start(self._loop.shutdown_default_executor()).result(SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


class Stack:
    """One protected app of STACKS in this process."""

    def __init__(
        self,
        name: str,
        *,
        store: FlakyStore | None = None,
        policy: Policy | None = None,
        effects: Any = "external",
        **options: Any,
    ) -> None:
        self.name = name
        self.is_async = name in ASGI_STACKS
        self.payments = Payments()
        self.events: list[events.Event] = []
        self.store = store or FlakyStore()
        options.setdefault("scope", SINGLE_TENANT)
        self.once = OnceKey(
            self.store,
            policy=policy or Policy(effects=effects, max_response_bytes=MAX_RESPONSE),
            on_event=self.events.append,
            **options,
        )
        self.app = make_app(name, self.payments, self.once)
        self._loop = Loop() if self.is_async else None
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="test-client")

    @property
    def runs(self) -> int:
        return len(self.payments.runs)

    def post(self, key: str | Sequence[str] | None = "k-1", m: str = "ok", **more: Any) -> httpx.Response:
        """One request; ``m`` is how the handler ends. Several keys are several headers."""
        return self.together([request(key, m, **more)])[0]

    def start(self, key: str | None = "k-1", m: str = "ok", **more: Any) -> Future[httpx.Response]:
        """The same, without waiting for it."""
        return self._threads.submit(self.post, key, m, **more)

    def together(self, requests: list[dict[str, Any]]) -> list[httpx.Response]:
        """One request after the other in the same task or thread, as a server with one worker handles them."""
        if self._loop is not None:
            answers: list[httpx.Response] = self._loop.start(self._ask_async(requests)).result(30.0)
            return answers
        with httpx.Client(
            transport=httpx.WSGITransport(as_a_server(self.app), raise_app_exceptions=False), base_url="http://api.test"
        ) as client:
            return [client.request(**_joined(asked)) for asked in requests]

    async def _ask_async(self, requests: list[dict[str, Any]]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
            return [await client.request(**asked) for asked in requests]

    def record(self, key: str = "k-1", scope: str = ONE) -> Record | None:
        return self.store.read([(scope, key)])[0]

    def saw(self, kind: type[events.Event]) -> list[Any]:
        """The events of one kind so far."""
        return [event for event in list(self.events) if type(event) is kind]

    def close(self) -> None:
        self.payments.go.set()
        self._threads.shutdown()
        if self._loop is None:
            self.once.close()
        else:
            self._loop.start(self.once.aclose(grace=2.0)).result(SECONDS)
            self._loop.close()


def request(
    key: str | Sequence[str] | None = "k-1",
    m: str = "ok",
    *,
    method: str = "POST",
    path: str = "/payments",
    body: Any = PAYMENT,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    sent: list[tuple[str, str]] = list((headers or {}).items())
    for value in [key] if isinstance(key, str) else key or []:
        sent.append(("Idempotency-Key", value))
    if "content" not in more and method != "GET":
        more["json"] = body
    return {"method": method, "url": path, "params": {"m": m} if m != "ok" else None, "headers": sent, **more}


def _joined(asked: dict[str, Any]) -> dict[str, Any]:
    """Repeated headers as one, as WSGI servers hand them over; httpx would keep the last one only."""
    headers: dict[str, str] = {}
    for name, value in asked["headers"]:
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return asked | {"headers": headers}


# ---------------------------------------------------------------- what real servers serve


def mark(path: Path, text: str) -> None:
    """Append a line, in one write that no other process can come between."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, f"{text}\n".encode())
    finally:
        os.close(file)


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
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    from oncekey.web.asgi import IdempotencyMiddleware

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
