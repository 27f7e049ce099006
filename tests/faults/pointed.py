"""An app with the three ways that must survive kill -9, a bank whose ledger is on disk, and processes that use them.

``/orders``      transactional: a row and a receipt by the outbox, one commit
``/rides``       phased: a row, a charge, a receipt
``/background``  deferred: a row and a job that charges and settles the key

A child is forked from the warm test process and serves itself over ASGI: it dies at its fault, or answers.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.outbox import Context, Response, Worker
from oncekey.stores.urls import open_store
from oncekey.testing import faults
from oncekey.testing.company import Child
from oncekey.web.asgi import IdempotencyMiddleware

LEASE = timedelta(seconds=1)
PATIENCE = 30.0
TABLES = ("orders", "rides", "receipts", "background")

for _point in faults.POINTS:
    faults.places_of(_point)  # imports every driver, once: children are forked from a process that has them


class Bank:
    """One file per charge. It honours keys, or makes a new charge for every call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def charge(self, customer: str, downstream_key: str, honours: bool = True) -> str:
        name = downstream_key if honours else f"{downstream_key}.{uuid.uuid4().hex}"
        try:
            with (self.folder / name).open("x") as ledger:
                ledger.write(customer)
        except FileExistsError:
            pass
        return f"ch_{name}"

    def charges(self) -> Counter[str]:
        return Counter(file.read_text() for file in self.folder.iterdir())


class Town:
    """The database with the keys and the business tables, and the bank."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.path = url.removeprefix("sqlite:///") if url.startswith("sqlite") else None
        self.bank = Bank(folder / "bank")
        store = open_store(url)
        store.migrate()
        store.close()
        for table in TABLES:
            self.ask(f"CREATE TABLE IF NOT EXISTS {table} (key text NOT NULL)")

    def ask(self, sql: str) -> list[Any]:
        if self.path is not None:
            with closing(sqlite3.connect(self.path, timeout=30)) as own, own:
                return own.execute(sql).fetchall()
        with psycopg.connect(self.url) as server:
            cursor = server.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def rows(self, table: str) -> Counter[str]:
        return Counter(key for (key,) in self.ask(f"SELECT key FROM {table}"))

    def state(self, key: str) -> State:
        return State(self.ask(f"SELECT state FROM idempotency_keys WHERE key = '{key}'")[0][0])

    def jobs_left(self) -> int:
        return int(self.ask("SELECT count(*) FROM idempotency_outbox WHERE state IN ('ready', 'running')")[0][0])

    async def connect(self) -> Any:
        if self.path is not None:
            return sqlite3.connect(self.path, check_same_thread=False, timeout=30)
        return await psycopg.AsyncConnection.connect(self.url)


async def _now(done: Any) -> Any:
    return await done if inspect.isawaitable(done) else done


async def _insert(connection: Any, table: str, key: str) -> dict[str, str]:
    await _now(connection.execute(f"INSERT INTO {table} (key) VALUES ('{key}')"))
    return {"row": table}


class Service:
    """The app, its worker, and a client inside of the same process."""

    def __init__(self, town: Town) -> None:
        self.town = town
        routes = {
            "POST /orders": Policy(effects="transactional", lease=LEASE),
            "POST /rides": Policy(effects="phased", lease=LEASE),
            "POST /background": Policy(effects="transactional", lease=LEASE),
        }
        self.once = OnceKey(town.url, scope=SINGLE_TENANT, routes=routes)
        handlers = {"/orders": self.order, "/rides": self.ride, "/background": self.background}
        app = Starlette(routes=[Route(path, handler, methods=["POST"]) for path, handler in handlers.items()])
        app.add_middleware(IdempotencyMiddleware, once=self.once)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://town", timeout=PATIENCE)
        self.worker = Worker(town.url, lease=LEASE.total_seconds(), poll=0.02)
        limits: Any = {"max_attempts": 1_000, "backoff": 0.01, "max_backoff": 0.05}  # it will be killed often
        self.worker.task("receipt", **limits)(self.receipt)
        self.worker.task("charge_later", **limits)(self.charge_later)

    # handlers

    async def order(self, request: Request) -> JSONResponse:
        op, body, connection = current(), await request.json(), await self.town.connect()
        await op.enlist(connection)
        await _insert(connection, "orders", op.key)
        await op.enqueue("receipt", {"customer": op.key})
        if body.get("fails") and op.attempt == 1:
            raise NotExecuted("after all")
        return JSONResponse({"order": op.key}, 201, background=BackgroundTask(lambda: _now(connection.close())))

    async def ride(self, request: Request) -> JSONResponse:
        op, body, connection = current(), await request.json(), await self.town.connect()
        try:
            await op.phase("ride", _insert, connection, "rides", op.key, on=connection)
            if body.get("stumbles") and op.attempt == 1:
                raise NotExecuted("between two steps")
            charge = await op.effect("charge", self.charge, body["honours"], repeatable=body["honours"])
            await op.phase("receipt", _insert, connection, "receipts", op.key, on=connection)
        finally:
            await _now(connection.close())
        return JSONResponse({"ride": op.key, **charge}, 201)

    async def charge(self, honours: bool) -> dict[str, str]:
        op = current()
        return {"charge": self.town.bank.charge(op.key, op.downstream_key("charge"), honours)}

    async def background(self, request: Request) -> JSONResponse:
        op, body, connection = current(), await request.json(), await self.town.connect()
        await op.enlist(connection)
        await _insert(connection, "background", op.key)
        await op.defer("charge_later", body)
        close = BackgroundTask(lambda: _now(connection.close()))
        return JSONResponse({"taken": op.key}, 202, {"location": f"/status/{op.key}"}, background=close)

    # tasks

    def receipt(self, ctx: Context, payload: Any) -> None:
        self.town.bank.charge(payload["customer"], ctx.downstream_key)

    async def charge_later(self, ctx: Context, payload: Any) -> Response:
        charge = self.town.bank.charge(ctx.key, ctx.downstream_key)
        await ctx.record(charge)
        await asyncio.sleep(payload.get("seconds", 0.0))
        return Response(201, {"charge": charge})

    # the client

    async def post(self, path: str, key: str, body: Any) -> httpx.Response:
        return await self.http.post(path, headers={"Idempotency-Key": key}, json=body)

    async def work(self) -> None:
        await self.worker.serve(until="drained")

    async def until_settled(self, path: str, key: str, body: Any) -> list[Any]:
        """Retry by the rules: the same key after 409, 503 and 202, until the answer is final and came twice."""
        seen: list[Any] = []
        async with asyncio.timeout(PATIENCE):
            while len(seen) < 2:
                answer = await self.post(path, key, body)
                if answer.status_code == 201:
                    seen.append([201, answer.text])
                elif answer.status_code == 409 and "outcome-unknown" in answer.text:
                    return [[409, "unknown"]]
                else:
                    assert answer.status_code in (202, 409, 500, 503), (answer.status_code, answer.text)
                    await asyncio.sleep(0.05)
        return seen

    async def close(self) -> None:
        await self.http.aclose()
        await self.once.aclose()


Case = tuple[str, str, Any]
"""Path, key and body of a request."""


def fault(point: str, when: str, action: str = "kill") -> str:
    """As ONCEKEY_FAULT has it. ``point:2``: the second time."""
    name, _, nth = point.partition(":")
    return f"{name}:{when}:{action}:{nth or 1}"


def _child(town: Town, at: str, use: Callable[[Service], Any]) -> Child:
    async def serve() -> Any:
        service = Service(town)
        try:
            return await use(service)
        finally:
            await service.close()

    def work() -> Any:
        faults.install_from_environment({faults.VARIABLE: at})  # before OnceKey is made
        return asyncio.run(serve())

    return Child(work)


def one_request(town: Town, case: Case, at: str = "", *, works: bool = False) -> Child:
    """A process that posts once, and then (``works``) does the jobs that are due. Its result: [status, body]."""

    async def use(service: Service) -> Any:
        answer = await service.post(*case)
        if works:
            await service.work()
        return [answer.status_code, answer.text]

    return _child(town, at, use)


def settle(town: Town, cases: Iterable[Case]) -> dict[str, list[Any]]:
    """A process without a fault in which clients retry until all is settled and no job is left: their answers."""
    cases = list(cases)

    async def use(service: Service) -> Any:
        async def clients() -> dict[str, Any]:
            answers = await asyncio.gather(*(service.until_settled(*case) for case in cases))
            return dict(zip((key for _, key, _ in cases), answers, strict=True))

        asking = asyncio.create_task(clients())
        async with asyncio.timeout(PATIENCE * 2):
            while not asking.done() or town.jobs_left():
                await service.work()
                await asyncio.sleep(0.02)
        return json.loads(json.dumps(await asking))

    answers: dict[str, list[Any]] = _child(town, "", use).result()
    return answers
