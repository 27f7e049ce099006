"""An API with phased requests: a real database, the real middleware, and a count of what was called.

A test writes ``async def serve(phased, op, connection)``; the API opens the connection, counts, and closes it.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import httpx
import psycopg
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy, current
from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.swaps import swap
from oncekey.engine.operation import Operation
from oncekey.stores.registry import open_store
from tests.enlist.shop import Api, Shop

PHASED = Policy(effects="phased")
SCOPE = "single-tenant"
CUT = ConnectionError("the line was cut")

Serve = Callable[["PhasedApi", Operation, Any], Awaitable[Response | None]]


class PhasedApi:
    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.calls: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        """What handlers raised."""
        self.connect: Callable[[], Any] = self._connect
        self._opened: list[Any] = []

    def _connect(self) -> Any:
        if self.shop.kind == "sqlite":
            return sqlite3.connect(self.shop.path, check_same_thread=False)
        return psycopg.AsyncConnection.connect(self.shop.url)

    def api(self, serve: Serve, policy: Policy = PHASED, **options: Any) -> Api:
        async def handler(_: Request) -> Response:
            connection = await now(self.connect())
            self._opened.append(connection)  # an enlisted one stays open until the response is sent
            try:
                answer = await serve(self, current(), connection)
            except BaseException as error:
                self.errors.append(error)
                raise
            return answer or JSONResponse({"attempt": current().attempt}, 201)

        return self.shop.api(handler, policy, **options)

    async def post(self, serve: Serve, key: str = "k-1", policy: Policy = PHASED, cents: int = 5) -> httpx.Response:
        return await self.api(serve, policy).post(key, cents)

    async def close(self) -> None:
        for api in self.shop.apis:
            await api.close()
        for connection in self._opened:
            await now(connection.close())

    # for handlers

    async def pay(self, connection: Any, key: str = "k-1", name: str = "pay") -> dict[str, int]:
        """One business row."""
        self.calls[name] += 1
        await now(connection.execute(f"INSERT INTO payments (key, cents) VALUES ('{key}', 5)"))
        return {"paid": self.calls[name]}

    def call(self, name: str, result: Any = None) -> Any:
        self.calls[name] += 1
        return {"call": self.calls[name]} if result is None else result

    def fail(self, name: str, error: BaseException) -> Any:
        self.calls[name] += 1
        raise error

    # from outside

    @property
    def state(self) -> State | None:
        return self.shop.state()

    @property
    def record(self) -> Record:
        record = self.shop.record()
        assert record is not None
        return record

    def steps(self, key: str = "k-1") -> dict[str, Step]:
        store = open_store(self.shop.url)
        try:
            (steps,) = store.steps([StepsOf(SCOPE, key)])
        finally:
            store.close()
        return {step.name: step for step in steps}

    def let_the_lease_end(self) -> None:
        past = "now() - interval '1 second'" if self.shop.kind == "postgresql" else "0"
        self.shop.ask(f"UPDATE idempotency_keys SET lease_until = {past}")

    def let_it_expire(self) -> None:
        past = "now() - interval '1 second'" if self.shop.kind == "postgresql" else "0"
        self.shop.ask(f"UPDATE idempotency_keys SET expires_at = {past}")

    def steal(self) -> None:
        """Another attempt has the key, as if the lease had been over."""
        self.shop.ask("UPDATE idempotency_keys SET owner = 'a-thief', attempt = attempt + 1")

    def refute(self) -> None:
        """Somebody has proven that it did not happen."""
        self.let_the_lease_end()
        store = open_store(self.shop.url)
        try:
            (moved,) = store.swap([swap(self.record, Event.REFUTE, Actor.OPERATOR, quarantine_seconds=0.0)])
        finally:
            store.close()
        assert moved is not None

    def jobs(self, columns: str = "task, downstream_key") -> list[Any]:
        return self.shop.ask(f"SELECT {columns} FROM idempotency_outbox ORDER BY run_at, id")

    def is_free(self) -> bool:
        """SQLite: whether another connection of this process can write at once."""
        if self.shop.kind != "sqlite":
            return True
        gate = self._gate()
        free: bool = gate.acquire(0.0, lane=False)
        if free:
            gate.release()
        return free

    def _gate(self) -> Any:
        from pathlib import Path

        from oncekey.stores.sqlite.gate import gate_of

        return gate_of(Path(self.shop.path))


async def now(done: Any) -> Any:
    return await done if inspect.isawaitable(done) else done


def short(seconds: float) -> Policy:
    return Policy(effects="phased", lease=timedelta(seconds=seconds))
