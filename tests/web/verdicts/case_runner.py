"""What every case of the verdict tests stands on: one key, its store, and an endpoint that counts what it does.

``CaseRunner`` gives each framework's app the work of its endpoint (``working``) and sends requests to the app. The work
follows ``effects``: one row in the enlisted transaction, one effect of a phased operation, or a count. Nothing here
asserts.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.stores.memory import MemoryStore
from oncekey.testing.http.stack import as_a_server
from tests.enlist.shop import Shop
from tests.web.verdicts.cases import Case

ONE = "single-tenant"
SECONDS = 10.0
BODIES = {"ok": b'{"amount": 1000}', "invalid": b'{"amount": "ten"}', "NaN": b'{"amount": NaN}'}


class EffectFailed(Exception):
    """The provider did not say whether it charged."""


class CaseRunner:
    """One case on one place for keys. ``shop``: the database; None keeps the keys in memory."""

    def __init__(self, case: Case, effects: Any, shop: Shop | None = None, once: OnceKey | None = None) -> None:
        self.case = case
        self.effects = effects
        self.shop = shop
        self.key = uuid.uuid4().hex
        self.runs = 0
        """How often the endpoint was entered."""
        self.charges = 0
        """How often it had its effect, or began to."""
        self.prefix = ""
        """Of the path, where the app is mounted under one."""
        self.body = BODIES[case.body]
        self.does = case.does
        self.gate = case.gate
        """What the check in front of the endpoint says; None lets the request in."""
        self.entered = asyncio.Event()
        self.go = asyncio.Event()
        self.engine = sa.create_engine(shop.url.replace("postgresql:", "postgresql+psycopg:")) if shop else None
        self._open: list[Any] = []
        policy = Policy(effects=effects, **case.policy)
        place = shop.url if shop else MemoryStore(time.time)
        self.once = once or OnceKey(place, scope=SINGLE_TENANT, policy=policy)

    # -- the endpoint's work -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """The endpoint was entered: do its work, and let it end inside."""
        self.runs += 1
        with ExitStack() as at_the_end:
            if self.effects == "transactional":
                connection, operation = self._connection(at_the_end), current()
                await operation.enlist(connection)
                self._pay(connection, self.key)
            elif self.effects != "phased":
                self.charges += 1
            elif self.case.work == "failed effect":
                with suppress(EffectFailed):
                    await current().effect("charged", self._fail, repeatable=False)
            else:
                await current().effect("charged", self._charge, repeatable=True)
            yield

    @contextmanager
    def working_blocking(self) -> Iterator[None]:
        self.runs += 1
        with ExitStack() as at_the_end:
            if self.effects == "transactional":
                connection, operation = self._connection(at_the_end), current().blocking
                operation.enlist(connection)
                self._pay(connection, self.key)
            elif self.effects != "phased":
                self.charges += 1
            elif self.case.work == "failed effect":
                with suppress(EffectFailed):
                    current().blocking.effect("charged", self._fail_blocking, repeatable=False)
            else:
                current().blocking.effect("charged", self._charge_blocking, repeatable=True)
            yield

    def _connection(self, at_the_end: ExitStack) -> Any:
        assert self.shop is not None
        assert self.engine is not None
        if self.case.work == "closed session":
            return at_the_end.enter_context(Session(self.engine))
        if self.shop.kind == "postgresql":
            connection: Any = psycopg.connect(self.shop.url)
        else:
            connection = sqlite3.connect(self.shop.path, check_same_thread=False)
        self._open.append(connection)
        return connection

    def _pay(self, connection: Any, key: str) -> None:
        self.charges += 1
        insert = f"INSERT INTO payments (key, cents) VALUES ('{key}', 5)"
        connection.execute(sa.text(insert) if isinstance(connection, Session) else insert)

    async def _charge(self) -> int:
        return self._charge_blocking()

    def _charge_blocking(self) -> int:
        self.charges += 1
        return self.charges

    async def _fail(self) -> None:
        self._fail_blocking()

    def _fail_blocking(self) -> None:
        self.charges += 1
        raise EffectFailed

    async def wait(self) -> None:
        """The endpoint waits here until middleware has answered for it."""
        self.entered.set()
        await asyncio.wait_for(self.go.wait(), SECONDS)

    # -- requests and what became of them ------------------------------------------------------------------------

    async def send(self, app: Any, is_async: bool, key: str | None = None) -> httpx.Response:
        asked: dict[str, Any] = {
            "method": self.case.method,
            "url": self.prefix + self.case.path,
            "content": self.body,
            "headers": {"Idempotency-Key": key or self.key, "Content-Type": "application/json"},
        }
        if is_async:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
                return await asyncio.wait_for(client.request(**asked), SECONDS)
        return await asyncio.to_thread(_send_blocking, app, asked)  # a server's threads have no event loop

    def record(self) -> Record | None:
        return self.once.store.read([(ONE, self.key)])[0]

    async def state(self) -> State | None:
        """The state of the key, once no attempt holds it any more."""
        deadline = time.monotonic() + SECONDS
        while (record := self.record()) is not None and record.state is State.IN_PROGRESS:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.005)
        return None if record is None else record.state

    @property
    def rows(self) -> int:
        """How many rows are committed."""
        return 0 if self.shop is None else self.shop.payments(self.key)

    async def close(self) -> None:
        self.go.set()
        await self.once.aclose(grace=2.0)
        for connection in self._open:
            connection.close()
        if self.engine is not None:
            self.engine.dispose()


def _send_blocking(app: Any, asked: dict[str, Any]) -> httpx.Response:
    transport = httpx.WSGITransport(as_a_server(app), raise_app_exceptions=False)
    with httpx.Client(transport=transport, base_url="http://api.test") as client:
        return client.request(**asked)


def is_replay(answer: httpx.Response) -> bool:
    return answer.headers.get("idempotency-replayed") == "true"


MakeBench = Callable[..., CaseRunner]


class Declined(Exception):
    """The app has an error handler for it that answers 409."""


class Forgiven(Exception):
    """The app has an error handler for it that answers 200."""
