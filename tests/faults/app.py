"""The app of the campaign: payments of every kind of effects, a worker and upkeep inside, and a provider outside.

``external``       a charge at a provider that does not honour keys
``repeatable``     a charge at one that does, under our downstream key
``transactional``  a row and a receipt by the outbox, one commit
``phased``         a row, a charge under our downstream key, a row
``once``           the same, and the provider does not honour keys: the effect may not be repeated
``deferred``       a row and a job that charges and settles the key

Each run of a handler says so in a file, and every row says which attempt wrote it: the checker compares. Without a
database to enlist (memory, Redis, DynamoDB) there are no rows, and only the first two kinds and the effects of phased
ones.

A body may ask for trouble in its first attempt: ``fails`` (transactional: after its writes), ``stumbles`` (phased:
between two steps), ``held`` (at a place of PLACES: its lease is not renewed, and it goes on when that is long over).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import random
import sqlite3
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import NotExecuted, OnceKey, Policy, current
from oncekey.core.policy import EffectsName
from oncekey.outbox import Context, Worker
from oncekey.outbox import Response as Settled
from oncekey.stores.api import Outbox
from oncekey.upkeep import Confirmed, Happened, Inquiry, Refuted, Upkeep
from oncekey.web.asgi import IdempotencyMiddleware
from tests.faults.evidence import look
from tests.faults.provider import Teller
from tests.stores.mysql import connect_async

ENTRIES = "CREATE TABLE IF NOT EXISTS entries (scope text, of_key text, what text, attempt integer)"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a request of this kind leaves behind, once, when it is completed."""

    effects: EffectsName
    charges: bool = False
    honours: bool = True
    rows: tuple[str, ...] = ()
    receipt: bool = False


KINDS: dict[str, Kind] = {
    "external": Kind("external", charges=True, honours=False),
    "repeatable": Kind("repeatable", charges=True),
    "transactional": Kind("transactional", rows=("written",), receipt=True),
    "phased": Kind("phased", charges=True, rows=("opened", "closed")),
    "once": Kind("phased", charges=True, honours=False, rows=("opened", "closed")),
    "deferred": Kind("transactional", charges=True, rows=("written",)),
}
HELD = 1.8
"""For how many leases."""
PLACES = ("begun", "asked", "charged", "ended")
"""Where an owner may be held: before it does anything, before and after its charge, and before it answers."""
WITHOUT_ROWS = ("external", "repeatable", "phased", "once")
"""The kinds that need no database of the app's own: all that a store without transactions can take."""


def has_rows(url: str) -> bool:
    """Whether the store's database takes rows of the app, too."""
    return url.startswith(("sqlite", "postgresql", "mysql"))


def kinds_of(url: str) -> tuple[str, ...]:
    return tuple(KINDS) if has_rows(url) else WITHOUT_ROWS


def make_app(
    *,
    url: str,
    provider: int,
    runs: str = "",
    lease: float = 0.5,
    quarantine: float = 0.5,
    thinks: float = 0.0,
    slow: float = 0.0,
    upkeep: bool = False,
    resolves: bool = False,
    works: bool = True,
    concurrency: int = 8,
    policy: dict[str, Any] | None = None,
) -> Any:
    """``provider``: its port. ``runs``: where handlers say that they run. ``thinks``: seconds, at most, between two
    steps. ``slow``: seconds between a charge and its answer. ``upkeep``, ``works``: sweeper, reaper and reconciler, and
    the outbox's worker with so many jobs at once (``concurrency``), run in this process. ``resolves``: the provider is
    asked about unknown outcomes."""
    shared: dict[str, Any] = {"lease": timedelta(seconds=lease), "quarantine": timedelta(seconds=quarantine)}
    kinds = kinds_of(url)
    policies = {f"POST /{name}": Policy(effects=KINDS[name].effects, **shared, **(policy or {})) for name in kinds}
    once = OnceKey(url, scope=lambda request: request.headers["x-tenant"], routes=policies)
    handlers = Handlers(url, Teller(provider, slow=slow), thinks, Path(runs) if runs else None, lease)
    if resolves:
        for name in ("external", "once"):  # no other can come to be unknown
            once.resolve_with(f"POST /{name}", handlers.resolve)
    worker = handlers.worker(once, concurrency) if works and isinstance(once.store, Outbox) else None

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        working = asyncio.create_task(worker.serve()) if worker else None
        yield
        if worker and working:
            worker.stop(grace=5.0)
            await working

    async def evidence(_: Request) -> Response:
        return Response(pickle.dumps(look(once.store)))

    routes = [Route(f"/{name}", getattr(handlers, name), methods=["POST"]) for name in kinds]
    app = Starlette(routes=[*routes, Route("/evidence", evidence)], lifespan=lifespan)
    keep = Upkeep(once, sweep_every=lease / 2, reap_every=5.0, reconcile_every=lease / 5) if upkeep else False
    app.add_middleware(IdempotencyMiddleware, once=once, upkeep=keep)
    return app


class Handlers:
    def __init__(self, url: str, teller: Teller, thinks: float, runs: Path | None, lease: float) -> None:
        self.url = url
        self.path = url.removeprefix("sqlite:///").partition("?")[0] if url.startswith("sqlite") else None
        self.has_rows = has_rows(url)
        self.teller = teller
        self.thinks = thinks
        self.lease = lease
        self.runs = None if runs is None else os.open(runs, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    # the routes

    async def external(self, request: Request) -> Response:
        asked = await self._begun(request)
        return await self._ended(asked, await self._charge(asked, honours=False))

    async def repeatable(self, request: Request) -> Response:
        asked = await self._begun(request)
        return await self._ended(asked, await self._charge(asked, honours=True))

    async def transactional(self, request: Request) -> Response:
        asked = await self._begun(request)
        connection = await self._connect()
        await current().enlist(connection)
        await self._write(connection, "written")
        await current().enqueue("receipt", {"attempt": current().attempt})
        if asked.get("fails") and current().attempt == 1:
            await _close(connection)
            raise NotExecuted("after all")
        return await self._ended(asked, close=connection)

    async def phased(self, request: Request) -> Response:
        return await self._in_phases(request, honours=True)

    async def once(self, request: Request) -> Response:
        return await self._in_phases(request, honours=False)

    async def deferred(self, request: Request) -> Response:
        asked = await self._begun(request)
        connection = await self._connect()
        await current().enlist(connection)
        await self._write(connection, "written")
        await current().defer("charge_later", asked)
        return await self._ended(asked, status=202, close=connection)

    async def _in_phases(self, request: Request, *, honours: bool) -> Response:
        asked, op = await self._begun(request), current()
        connection = await self._connect() if self.has_rows else None
        try:
            if connection is not None:
                await op.phase("open", self._write, connection, "opened", on=connection)
            if asked.get("stumbles") and op.attempt == 1:
                raise NotExecuted("between two steps")
            charge = await op.effect("charge", self._charge, asked, honours=honours, repeatable=honours)
            if connection is not None:
                await op.phase("close", self._write, connection, "closed", on=connection)
        finally:
            if connection is not None:
                await _close(connection)
        return await self._ended(asked, charge)

    # what they are made of

    async def _begun(self, request: Request) -> dict[str, Any]:
        op = current()
        if self.runs is not None:
            told = [op.scope, op.key, op.attempt, op.owner, os.getpid(), time.time()]
            os.write(self.runs, json.dumps(told).encode() + b"\n")
        asked: dict[str, Any] = await request.json()
        await self._at("begun", asked)
        return asked

    async def _at(self, place: str, asked: dict[str, Any]) -> None:
        """A pause of this owner alone, as seen from outside: its lease is not renewed, and runs out."""
        op = current()
        if asked.get("held") == place and op.attempt == 1 and op.engine is not None:
            op.engine.keeper.unwatch(op)
            await asyncio.sleep(self.lease * HELD)

    async def _think(self) -> None:
        await asyncio.sleep(random.uniform(0.0, self.thinks))

    async def _charge(self, asked: dict[str, Any], *, honours: bool) -> str:
        op = current()
        await self._at("asked", asked)
        await self._think()
        charge = await self.teller.charge(
            op.scope, op.key, "charge", op.downstream_key("charge"), op.attempt, honours=honours
        )
        await self._think()
        await self._at("charged", asked)
        return charge

    async def _connect(self) -> Any:
        if self.path is not None:
            return sqlite3.connect(self.path, check_same_thread=False, timeout=10)
        if self.url.startswith("mysql"):
            return await connect_async(self.url)
        return await psycopg.AsyncConnection.connect(self.url)

    async def _write(self, connection: Any, what: str) -> None:
        op = current()
        marks = "?, ?, ?, ?" if self.path is not None else "%s, %s, %s, %s"
        row = (op.scope, op.key, what, op.attempt)
        text = f"INSERT INTO entries (scope, of_key, what, attempt) VALUES ({marks})"
        if self.url.startswith("mysql"):
            async with connection.cursor() as cursor:
                await cursor.execute(text, row)
        else:
            await _now(connection.execute(text, row))
        if self.path is None:  # on SQLite a pause inside of a transaction keeps all others waiting
            await self._think()

    async def _ended(
        self, asked: dict[str, Any], charge: str | None = None, *, status: int = 201, close: Any = None
    ) -> Response:
        op = current()
        await self._at("ended", asked)
        told = {"scope": op.scope, "key": op.key, "cents": asked["cents"], "attempt": op.attempt, "charge": charge}
        after = None if close is None else BackgroundTask(_close, close)
        return JSONResponse(told, status, background=after)

    # the worker and the resolver

    def worker(self, once: OnceKey, concurrency: int) -> Worker:
        worker = Worker(once, concurrency=concurrency, lease=self.lease, poll=0.05)
        limits: Any = {"max_attempts": 1_000, "backoff": 0.01, "max_backoff": 0.05}  # it will be killed often
        worker.task("receipt", **limits)(self.receipt)
        worker.task("charge_later", **limits)(self.charge_later)
        return worker

    async def receipt(self, ctx: Context, payload: Any) -> None:
        await self.teller.charge(ctx.scope, ctx.key, "receipt", ctx.downstream_key, ctx.attempt, honours=True)

    async def charge_later(self, ctx: Context, payload: Any) -> Settled:
        charge = await self.teller.charge(ctx.scope, ctx.key, "charge", ctx.downstream_key, ctx.attempt, honours=True)
        await ctx.record(charge)
        await asyncio.sleep(payload.get("seconds", 0.0))
        return Settled(201, {"scope": ctx.scope, "key": ctx.key, "cents": payload["cents"], "charge": charge})

    async def resolve(self, inquiry: Inquiry) -> Confirmed | Refuted | Happened:
        charge = await self.teller.known(inquiry.downstream_key("charge"))
        if charge is None:
            return Refuted("the provider has no such charge")
        if inquiry.in_doubt:
            return Happened(charge)
        if KINDS[inquiry.operation.rpartition("/")[2]].effects == "phased":
            # The step is stored, and the handler did not learn that it is: the request goes on after it.
            return Happened(charge, effect="charge")
        return Confirmed(201, {"scope": inquiry.scope, "key": inquiry.key, "charge": charge, "settled": True})


async def _close(connection: Any) -> None:
    await _now(connection.close())


async def _now(done: Any) -> Any:
    return await done if inspect.isawaitable(done) else done
