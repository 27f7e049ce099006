"""What is committed and what is sent, when middleware answers in the handler's place, or sends a second response."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import CurrentOperation, protect
from tests.engine.doubles import PATIENCE
from tests.web.retrying_client import PassesOn, answers, state
from tests.web.versions import MIDDLEWARE_WAITS

# ---------------------------------------------------------------- a transaction


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id)")
        connection.commit()
    return path


def rows_in(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        count: int = connection.execute("SELECT count(*) FROM orders").fetchone()[0]
        return count


@pytest.mark.skipif(not MIDDLEWARE_WAITS, reason="a session behind BaseHTTPMiddleware needs Starlette 1.7")
async def test_answer_in_its_place_waits_for_a_handler_with_an_open_transaction(orders: Path) -> None:
    """Its transaction was open when the timeout answered. The answer waits for the app's return, so that no retry runs
    beside it: what the handler commits in the end is refused, or is the one commit."""
    runs: list[int] = []
    entered, given_up = asyncio.Event(), asyncio.Event()

    class Impatient(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            calling = asyncio.ensure_future(call_next(request))
            if len(runs) < 2:
                await entered.wait()
                entered.clear()
                calling.cancel()
                given_up.set()
                return JSONResponse({}, 504)
            answer: Response = await calling
            return answer

    database = create_engine(f"sqlite:///{orders}", connect_args={"check_same_thread": False})
    policy = Policy(effects="transactional")
    with OnceKey(f"sqlite:///{orders}", scope=SINGLE_TENANT, policy=policy, migrate=True) as once:
        app = FastAPI()
        protect(app, once)
        app.user_middleware.append(Middleware(Impatient))

        async def session(operation: CurrentOperation) -> Any:
            with Session(database) as own:
                await operation.enlist(own, commit="caller")
                yield own
                own.commit()

        in_session = Depends(session)

        @app.post("/pay", status_code=201)
        async def pay(own: Session = in_session) -> None:
            runs.append(1)
            if len(runs) < 3:
                entered.set()
                await given_up.wait()
                given_up.clear()
                await asyncio.sleep(0.1)  # for the answer to go out, were it not held
            own.execute(text("INSERT INTO orders VALUES (1)"))

        assert await answers(app, 4) == [504, 504, 201, 201]
    assert (len(runs), rows_in(orders)) == (3, 1)


async def test_answer_that_waits_for_the_handler_tells_it_that_the_client_left(orders: Path) -> None:
    """The handler waits for a disconnect before it ends, and the client for its answer: neither would ever move."""
    entered = asyncio.Event()
    heard: list[str] = []

    class Impatient(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            calling = asyncio.ensure_future(call_next(request))
            await entered.wait()
            calling.cancel()
            return JSONResponse({}, 504)

    with OnceKey(f"sqlite:///{orders}", scope=SINGLE_TENANT, migrate=True) as once:

        async def pay(request: Request) -> Response:
            await current().enlist(sqlite3.connect(orders, check_same_thread=False))
            entered.set()
            while not heard or heard[-1] != "http.disconnect":
                heard.append((await outer[0]())["type"])
            return JSONResponse({}, 201)

        class Keeps:
            """Starlette's BaseHTTPMiddleware has a receive of its own; this is ours."""

            def __init__(self, app: Any) -> None:
                self.app = app

            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                outer.append(receive)
                await self.app(scope, receive, send)

        outer: list[Any] = []
        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, once=once)
        app.user_middleware += [Middleware(Keeps), Middleware(Impatient)]
        assert await asyncio.wait_for(answers(app, 1), PATIENCE) == [504]
    assert heard[-1] == "http.disconnect"


async def test_success_of_a_second_call_is_stored_with_its_rows(orders: Path) -> None:
    """Middleware calls again what raised, in one request: the second call returned, so its rows are committed."""
    tries: list[int] = []

    class TriesAgain:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            failed = False

            async def unless_failed(message: Any) -> None:
                nonlocal failed
                failed = failed or message.get("status") == 503
                if not failed:
                    await send(message)

            await self.app(scope, receive, unless_failed)
            if failed:
                await self.app(scope, receive, send)

    policy = Policy(effects="transactional")
    with OnceKey(f"sqlite:///{orders}", scope=SINGLE_TENANT, policy=policy, migrate=True) as once:
        app = FastAPI()
        protect(app, once)
        app.user_middleware.append(Middleware(TriesAgain))

        @app.post("/pay", status_code=201)
        async def pay() -> None:
            tries.append(1)
            if len(tries) == 1:
                raise HTTPException(503)
            connection = sqlite3.connect(orders, check_same_thread=False)
            await current().enlist(connection)
            connection.execute("INSERT INTO orders VALUES (1)")

        assert await answers(app, 3) == [201, 201, 201]
    assert (rows_in(orders), len(tries)) == (1, 2)


class GoesOnInExcept:
    """A cache is down, and the request goes on without it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            raise ConnectionError("the cache is down")
        except ConnectionError:
            await self.app(scope, receive, send)


@pytest.mark.parametrize("kind", ["fastapi", "plain"])
async def test_success_sent_inside_an_except_is_committed(orders: Path, kind: str) -> None:
    """A 201 whose writes were rolled back is a lie, and it would be replayed."""
    policy = Policy(effects="transactional")

    async def write() -> None:
        connection = sqlite3.connect(orders, check_same_thread=False)
        await current().enlist(connection)
        connection.execute("INSERT INTO orders VALUES (1)")

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        await write()
        await JSONResponse({}, 201)(scope, receive, send)

    with OnceKey(f"sqlite:///{orders}", scope=SINGLE_TENANT, policy=policy, migrate=True) as once:
        if kind == "plain":
            app: Any = IdempotencyMiddleware(GoesOnInExcept(plain), once)
        else:
            app = FastAPI()
            protect(app, once)
            app.user_middleware += [Middleware(GoesOnInExcept), Middleware(PassesOn)]
            app.post("/pay", status_code=201)(write)
        assert await answers(app, 2) == [201, 201]
    assert rows_in(orders) == 1


# ---------------------------------------------------------------- a second response


class Slow:
    """A client that reads nothing behind its first messages."""

    def __init__(self, messages: int) -> None:
        self.messages = messages
        self.sent: list[Any] = []
        self.stuck = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(message.get("status", message.get("body")))
        if len(self.sent) == self.messages:
            self.stuck.set()
            await asyncio.Event().wait()

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def ask(self, app: Any) -> None:
        headers = [(b"idempotency-key", b"k-1")]
        scope = {"type": "http", "method": "POST", "path": "/pay", "query_string": b"", "headers": headers}
        await app(scope, self.receive, self.send)


@pytest.mark.parametrize("messages", [1, 2])
async def test_second_response_of_the_app_is_not_sent(once: OnceKey, messages: int) -> None:
    """The app's own patience is over while its response is stored, and on its way to a client that reads slowly."""
    client = Slow(messages)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.ensure_future(JSONResponse({"paid": True}, 201)(scope, receive, send))
        await client.stuck.wait()
        sending.cancel()
        await asyncio.wait([sending])
        await JSONResponse({"error": "too slow"}, 504)(scope, receive, send)

    await client.ask(IdempotencyMiddleware(app, once))
    assert client.sent == [201, b'{"paid":true}'][:messages]
    assert state(once) is State.COMPLETED


async def test_second_response_raises_when_the_first_is_streaming(once: OnceKey) -> None:
    client = Slow(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await JSONResponse({"error": "too slow"}, 504)(scope, receive, send)

    with pytest.raises(RuntimeError, match="second response"):
        await client.ask(IdempotencyMiddleware(app, once))
    assert (client.sent, state(once)) == ([200, b"data: 1\n\n"], State.UNKNOWN)


async def test_response_that_replaces_an_unfinished_one_is_stored_alone(once: OnceKey) -> None:
    client = Slow(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b'{"half', "more_body": True})
        await JSONResponse({"error": "declined"}, 402)(scope, receive, send)

    for _ in range(2):
        await client.ask(IdempotencyMiddleware(app, once))
    assert client.sent == [402, b'{"error":"declined"}'] * 2
