"""The end of an app: handlers first, then what the app itself closes, then the store; and what is used after that."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from litestar import Litestar
from litestar import post as litestar_post
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.states import State
from oncekey.testing.servers import PostgresServer
from oncekey.testing.servers.processes import wait_until
from oncekey.upkeep import Upkeep
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect
from oncekey.web.litestar import OnceKeyPlugin
from tests import databases
from tests.web.apps import Gate, soon, until

HEADERS = {"Idempotency-Key": "k-1"}


class Pool:
    """What the app opens when it starts, and closes in its own lifespan."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.closed = False

    async def pay(self) -> dict[str, bool]:
        self.gate.entered.set()
        await self.gate.go.wait()
        if self.closed:
            raise RuntimeError("pool closed")
        return {"paid": True}

    @asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.closed = True


def starlette_app(pool: Pool, once: OnceKey) -> Any:
    async def pay(_: Request) -> Response:
        return JSONResponse(await pool.pay(), 201)

    app = Starlette(routes=[Route("/payments", pay, methods=["POST"])], lifespan=pool.lifespan)
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def fastapi_app(pool: Pool, once: OnceKey) -> Any:
    app = FastAPI(lifespan=pool.lifespan)

    @app.post("/payments", status_code=201)
    async def pay() -> dict[str, bool]:
        return await pool.pay()

    protect(app, once)
    return app


def litestar_app(pool: Pool, once: OnceKey) -> Any:
    @litestar_post("/payments")
    async def pay() -> dict[str, bool]:
        return await pool.pay()

    return Litestar([pay], lifespan=[pool.lifespan], plugins=[OnceKeyPlugin(once)])


class Life:
    """The lifespan of an app as a server drives it."""

    def __init__(self, app: Any) -> None:
        self._asked: asyncio.Queue[Any] = asyncio.Queue()
        self._told: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._task = asyncio.create_task(app(scope, self._asked.get, self._told.put))

    async def start(self) -> None:
        self._asked.put_nowait({"type": "lifespan.startup"})
        assert (await soon(self._told.get()))["type"] == "lifespan.startup.complete"

    def ask_to_end(self) -> None:
        self._asked.put_nowait({"type": "lifespan.shutdown"})

    async def ended(self) -> str:
        said: str = (await soon(self._told.get()))["type"]
        await soon(self._task)
        return said


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


def state(once: OnceKey) -> State | None:
    (record,) = once.store.read([("single-tenant", "k-1")])
    once.store.disconnect()
    return None if record is None else record.state


@pytest.fixture
def once(store_url: str) -> OnceKey:
    return OnceKey(store_url, scope=SINGLE_TENANT, migrate=True)


@pytest.mark.parametrize("make", [starlette_app, fastapi_app, litestar_app])
async def test_running_handler_ends_before_the_app_closes_its_pool(
    once: OnceKey, make: Callable[[Pool, OnceKey], Any]
) -> None:
    """The client has left, or the server has given up waiting: the handler still gets its grace, and its pool."""
    pool = Pool()
    app = make(pool, once)
    life = Life(app)
    await life.start()
    async with client_of(app) as client:
        request = asyncio.create_task(client.post("/payments", headers=HEADERS))
        await soon(pool.gate.entered.wait())
        request.cancel()
        await asyncio.wait([request])
        life.ask_to_end()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not pool.closed
        pool.gate.go.set()
        assert await life.ended() == "lifespan.shutdown.complete"
    assert pool.closed
    assert state(once) is State.COMPLETED
    once.close()


async def test_handler_that_outlives_the_grace_is_logged_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The shutdown goes on. The handler then fails by its closed pool, and that can still be stored."""
    once = OnceKey(f"sqlite:///{tmp_path / 'keys.db'}", scope=SINGLE_TENANT, grace=0.05)
    pool = Pool()
    app = starlette_app(pool, once)
    life = Life(app)
    await life.start()
    async with client_of(app) as client:
        request = asyncio.create_task(client.post("/payments", headers=HEADERS))
        await soon(pool.gate.entered.wait())
        life.ask_to_end()
        assert await life.ended() == "lifespan.shutdown.complete"
        assert "1 requests are still running 0.05 s after the shutdown began" in caplog.text
        pool.gate.go.set()
        await asyncio.wait([request])
    assert state(once) is State.UNKNOWN
    await once.aclose()


async def test_upkeep_stops_after_the_handlers_and_before_the_app(once: OnceKey) -> None:
    """A resolver may use the app's pool, too."""
    pool, order = Pool(), list[str]()

    class Watched(Upkeep):
        async def astop(self, timeout: float = 10.0) -> bool:
            order.append(f"upkeep, {len(once.engine.tasks)} handlers, pool closed: {pool.closed}")
            return await super().astop(timeout)

    async def pay(_: Request) -> Response:
        return JSONResponse(await pool.pay(), 201)

    app = Starlette(routes=[Route("/payments", pay, methods=["POST"])], lifespan=pool.lifespan)
    app.add_middleware(IdempotencyMiddleware, once=once, upkeep=Watched(once))
    life = Life(app)
    await life.start()
    async with client_of(app) as client:
        request = asyncio.create_task(client.post("/payments", headers=HEADERS))
        await soon(pool.gate.entered.wait())
        life.ask_to_end()
        pool.gate.go.set()
        await life.ended()
        assert (await request).status_code == 201
    assert order == ["upkeep, 0 handlers, pool closed: False"]
    once.close()


async def test_store_is_let_go_when_the_apps_own_shutdown_fails(once: OnceKey) -> None:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        raise RuntimeError("the pool does not close")

    app = Starlette(lifespan=lifespan)
    app.add_middleware(IdempotencyMiddleware, once=once)
    life = Life(app)
    await life.start()
    life.ask_to_end()
    with pytest.raises(RuntimeError, match="does not close"):
        await life.ended()
    assert once.engine.closed


# ---------------------------------------------------------------- used again


def test_app_whose_lifespan_is_over_can_be_used_again(once: OnceKey, caplog: pytest.LogCaptureFixture) -> None:
    """A session of pytest: one test runs the lifespan, the next does not, and each has an event loop of its own, as
    with Starlette's TestClient. Nothing is left behind when it is closed."""

    async def pay(_: Request) -> Response:
        return JSONResponse({"paid": True}, 201)

    app = Starlette(routes=[Route("/payments", pay, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)

    async def post(key: str = "k-1") -> httpx.Response:
        async with client_of(app) as client:
            return await client.post("/payments", json={}, headers={"Idempotency-Key": key})

    async def with_lifespan() -> httpx.Response:
        life = Life(app)
        await life.start()
        answer = await post()
        life.ask_to_end()
        await life.ended()
        return answer

    assert asyncio.run(with_lifespan()).status_code == 201
    before = _threads()
    with caplog.at_level(logging.DEBUG, "oncekey"):
        again = asyncio.run(post())
        assert (again.status_code, again.headers.get("idempotency-replayed")) == (201, "true")
        assert asyncio.run(post("k-2")).status_code == 201
    assert caplog.text.count("a closed OnceKey is used, and so it opens again") == 1
    once.close()
    # A thread that was told to end may take a moment: those of before the reopening, too.
    assert wait_until(lambda: not Counter(_threads()) - Counter(before), 10)


async def test_lease_is_renewed_for_a_handler_that_began_after_a_close(once: OnceKey) -> None:
    """The keeper opens again, too."""
    pool = Pool()
    app = starlette_app(pool, once)
    await once.aclose()
    async with client_of(app) as client:
        request = asyncio.create_task(client.post("/payments", headers=HEADERS))
        await soon(pool.gate.entered.wait())
        assert any(thread.name == "oncekey-keeper" for thread in threading.enumerate())
        pool.gate.go.set()
        assert (await request).status_code == 201
    await once.aclose()


async def test_closing_again_closes_every_connection(postgres_server: PostgresServer, ready_url: str) -> None:
    pool = Pool()
    pool.gate.go.set()
    once = OnceKey(ready_url, scope=SINGLE_TENANT)
    app = starlette_app(pool, once)
    for number in range(3):
        async with client_of(app) as client:
            for key in range(3):
                headers = {"Idempotency-Key": f"k-{number}-{key}"}
                assert (await client.post("/payments", headers=headers)).status_code == 201
        assert databases.connected(postgres_server, ready_url) > 0
        await once.aclose()
        await until(lambda: databases.connected(postgres_server, ready_url) == 0, "every backend has ended")


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("oncekey-"))
