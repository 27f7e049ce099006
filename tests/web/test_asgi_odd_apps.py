"""Apps and middleware that do what ASGI allows and few do.

Timeouts around us and inside of us, calls from an ``except``, headers that can be read once, more than one lifespan.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import CurrentOperation, protect
from tests.web.apps import Api, Gate, World, soon, until
from tests.web.asgi_server import AsgiServer

MakeApi = Callable[..., Api]


@pytest.fixture
def framework() -> str:
    return "starlette"


@asynccontextmanager
async def lived(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A lifespan of an app, and a client to it."""
    asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, asked.get, told.put))
    asked.put_nowait({"type": "lifespan.startup"})
    assert (await soon(told.get()))["type"] == "lifespan.startup.complete"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api.test") as client:
        yield client
    asked.put_nowait({"type": "lifespan.shutdown"})
    assert (await soon(told.get()))["type"] == "lifespan.shutdown.complete"
    await soon(life)


class Strict(AsgiServer):
    """A server that minds: nothing may be sent after the app's callable has ended, as with uvicorn."""

    over = False

    async def send(self, message: Any) -> None:
        if self.over:
            raise RuntimeError(f"Unexpected ASGI message {message['type']!r} sent, after response already completed.")
        await super().send(message)

    async def cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        self.over = True


# ---------------------------------------------------------------- a timeout further out


async def test_handler_is_not_disturbed_by_a_disconnect(make_api: MakeApi) -> None:
    """Its background task runs, and what it has done is not undone: the retry is told that it happened."""
    gate = Gate()
    printed: list[int] = []

    async def respond(request: Request, run: int) -> Response:
        gate.entered.set()
        await gate.go.wait()
        return JSONResponse({"run": run}, 201, background=BackgroundTask(printed.append, run))

    api = make_api(respond)
    server = Strict(api.app)
    task = server.start()
    await soon(gate.entered.wait())
    await server.cancel(task)
    gate.go.set()
    await until(lambda: printed == [1], "the receipt is printed")
    retry = Strict(api.app)
    await soon(retry.start())
    assert (retry.status, retry.body) == (201, b'{"run":1}')


async def test_dependency_commits_after_a_disconnect(tmp_path: Path) -> None:
    """FastAPI's usual session: commit after ``yield``, roll back on an error. Without its write a 201 is a lie."""
    gate = Gate()
    ended: list[str] = []

    async def session() -> Any:
        try:
            yield
        except BaseException as error:
            ended.append(f"rolled back because of {error!r}")
            raise
        ended.append("committed")

    in_session = Depends(session)
    app = FastAPI()
    once = OnceKey(f"sqlite:///{tmp_path}/keys.db", scope=SINGLE_TENANT, migrate=True)
    protect(app, once)

    @app.post("/payments", status_code=201)
    async def pay(_: None = in_session) -> dict[str, int]:
        gate.entered.set()
        await gate.go.wait()
        return {"id": 1}

    server = Strict(app)
    task = server.start()
    await soon(gate.entered.wait())
    await server.cancel(task)
    gate.go.set()
    await until(lambda: ended, "the dependency has ended")
    assert ended == ["committed"]
    await once.aclose(grace=2.0)


async def test_large_stream_completes_after_a_disconnect(make_api: MakeApi, world: World) -> None:
    gate = Gate()

    async def pieces() -> Any:
        yield b"x" * 2_000_000
        gate.entered.set()
        await gate.go.wait()
        yield b"y"

    api = make_api(lambda request, run: StreamingResponse(pieces(), 201))
    server = Strict(api.app)
    task = server.start()
    await soon(gate.entered.wait())
    await server.cancel(task)
    gate.go.set()
    await until(lambda: (row := world.record("k-1")) and row.state is not State.IN_PROGRESS, "it is over")
    assert world.record("k-1").state is State.COMPLETED  # type: ignore[union-attr]


# ---------------------------------------------------------------- a timeout inside of us


async def test_an_app_that_gives_up_while_its_answer_is_stored(make_api: MakeApi, world: World) -> None:
    """It said 201 and then, by a timeout of its own, 504: the 201 is stored, and this client is told to ask again."""
    api = make_api()
    storing, go = asyncio.Event(), asyncio.Event()
    run = api.once.engine.run

    async def slow(flow: Any, timeout: float) -> Any:
        if storing.is_set() or api.runs == 0:
            return await run(flow, timeout)
        storing.set()
        await go.wait()
        return await run(flow, timeout)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        api.runs += 1
        api.once.engine.run = slow  # type: ignore[method-assign]
        answering = asyncio.ensure_future(JSONResponse({"id": 1}, 201)(scope, receive, send))
        await storing.wait()
        answering.cancel()
        try:
            await answering
        except asyncio.CancelledError:
            for _ in range(2):
                await JSONResponse({"error": "too slow"}, 504)(scope, receive, send)

    server = AsgiServer(IdempotencyMiddleware(app, once=api.once))
    await soon(server.start())
    assert [message["type"] for message in server.sent] == ["http.response.start", "http.response.body"]
    assert (server.status, b"not-stored" in server.body) == (503, True)
    await until(lambda: (row := world.record("k-1")) and row.state is State.COMPLETED, "it is stored later")


# ---------------------------------------------------------------- middleware that goes on in an ``except``


class Without:
    """Looks something up, fails, and does without it, all in one ``except``."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            raise ConnectionError("the cache is down")
        except ConnectionError:
            await self.app(scope, receive, send)


@pytest.mark.parametrize("handler", ["async", "sync", "blocking"])
@pytest.mark.parametrize("ending", ["returned", "raised", "raised the same"])
async def test_an_error_around_the_handler_is_not_the_handlers(tmp_path: Path, ending: str, handler: str) -> None:
    """What it returned is committed. What it raised, in that very ``except``, is still rolled back."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as own:
        own.execute("CREATE TABLE orders (item TEXT)")
        own.commit()
    app = FastAPI()
    app.add_middleware(Without)
    once = OnceKey(f"sqlite:///{path}", scope=SINGLE_TENANT, policy=Policy(effects="transactional"), migrate=True)
    protect(app, once)

    async def database() -> Any:
        connection = sqlite3.connect(path, check_same_thread=False)
        yield connection
        connection.close()

    opened = Depends(database)

    class Declined(Exception):
        pass

    @app.exception_handler(Declined)
    async def declined(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "declined"}, 402)

    def sync_order(operation: CurrentOperation, connection: Any = opened) -> dict[str, str]:
        if handler == "blocking":
            operation.blocking.enlist(connection)
        else:
            operation.enlist(connection)
        connection.execute("INSERT INTO orders VALUES ('x')")
        if ending != "returned":
            raise Declined
        return {"item": "x"}

    async def order(operation: CurrentOperation, connection: Any = opened) -> dict[str, str]:
        if ending == "raised the same":
            try:
                raise Declined
            except Declined:
                await operation.enlist(connection)
                connection.execute("INSERT INTO orders VALUES ('x')")
                raise
        await operation.enlist(connection)
        connection.execute("INSERT INTO orders VALUES ('x')")
        if ending == "raised":
            raise Declined
        return {"item": "x"}

    app.post("/orders", status_code=201)(order if handler == "async" else sync_order)
    async with lived(app) as client:
        answers = [await client.post("/orders", headers={"Idempotency-Key": "k-1"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201 if ending == "returned" else 402] * 2
    with closing(sqlite3.connect(path)) as own:
        assert own.execute("SELECT count(*) FROM orders").fetchone() == (int(ending == "returned"),)


class Logs:
    """Answers for what was raised, in its ``except``, after it has read the request's body for its log."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.app(scope, receive, send)
        except RuntimeError:
            await Request(scope, receive).body()
            await JSONResponse({"error": "logged"}, 500)(scope, receive, send)


class Catches(BaseHTTPMiddleware):
    """Answers for what was raised, behind its ``except``."""

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        try:
            answer: Response = await call_next(request)
        except RuntimeError:
            pass
        else:
            return answer
        return JSONResponse({"error": "caught"}, 500)


@pytest.mark.parametrize("middleware", [Logs, Catches])
async def test_exception_makes_key_unknown_even_if_middleware_responds(make_api: MakeApi, middleware: type) -> None:
    """The default: it may have charged. A returned 500 would be tried again (I1)."""

    def respond(request: Request, run: int) -> Response:
        raise RuntimeError("after the charge")

    api = make_api(respond, prepare=lambda app: app.add_middleware(middleware))
    assert [(await api.post()).status_code for _ in range(3)] == [500, 409, 409]
    assert api.runs == 1


# ---------------------------------------------------------------- messages


async def test_a_method_in_small_letters_is_protected(make_api: MakeApi) -> None:
    """uvicorn hands it over as it came, and what is inside may take it for a POST."""
    api = make_api()
    runs: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(scope["method"])
        await JSONResponse({}, 201)(scope, receive, send)

    for method in ("POST", "post", "Post"):
        server = AsgiServer(IdempotencyMiddleware(app, once=api.once))
        server.scope["method"] = method
        await soon(server.start())
        assert server.status == 201
    assert runs == ["POST"]


async def test_headers_that_can_be_read_once(make_api: MakeApi) -> None:
    """ASGI says Iterable: the first answer has them as well as the replay."""
    api = make_api()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = iter([(b"content-type", b"text/plain"), (b"location", b"/orders/1")])
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"done"})

    protected = IdempotencyMiddleware(app, once=api.once)
    for _ in range(2):
        server = AsgiServer(protected)
        await soon(server.start())
        assert (server.headers["content-type"], server.headers["location"]) == ("text/plain", "/orders/1")


async def test_every_media_type_counts(make_api: MakeApi) -> None:
    """An app may read either of two Content-Type headers, so a difference in either is a different request."""
    api = make_api()
    for types, status in ((["a/a", "b/b"], 201), (["c/c", "b/b"], 422), (["a/a", "c/c"], 422), (["a/a", "b/b"], 201)):
        server = AsgiServer(api.app)
        server.scope["headers"] = [item for item in server.scope["headers"] if item[0] != b"content-type"]
        server.scope["headers"] += [(b"content-type", each.encode()) for each in types]
        await soon(server.start())
        assert server.status == status, types


# ---------------------------------------------------------------- lifespans


@pytest.mark.parametrize("url", ["memory://", "sqlite", "postgres"])
async def test_an_app_may_live_more_than_once(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One app for many tests, each with ``with TestClient(app)``: what the first has closed is open for the second."""
    if url == "sqlite":
        url = f"sqlite:///{tmp_path}/keys.db"
    elif url == "postgres":
        url = request.getfixturevalue("ready_url")
    app = FastAPI()
    once = OnceKey(url, scope=SINGLE_TENANT, migrate=True)
    protect(app, once)

    @app.post("/payments")
    def pay() -> dict[str, int]:
        return {"attempt": current().attempt}

    for life in range(3):
        async with lived(app) as client:
            answers = [await client.post("/payments", headers={"Idempotency-Key": f"k-{life}"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert "idempotency-replayed" in answers[1].headers
    assert once.engine.keeper._closing
