"""A deploy that declares a route anew between two attempts at one key: every pair of declarations, every first end.

The first attempt comes to a point of its work and ends there: its process dies, it returns 500, it raises, it says that
nothing happened, or it stands still until its lease is over and wakes up at the end. Then the route is declared in
another way, and the client retries twice; the second time the old declaration may be back. A provider counts charges,
and the tables what was committed. Every handler keeps to its declaration.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import warnings
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psycopg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.engine.operation import Operation
from oncekey.testing.company import Child
from oncekey.web.starlette import protect
from tests.faults.asgi_request import AsgiRequest, quiet
from tests.faults.campaign import Fault, Run

Effects = Literal["external", "transactional", "phased", "repeatable"]
Ending = Literal["dies", "returns 500", "raises", "not executed", "stands still"]
EFFECTS: tuple[Effects, ...] = get_args(Effects)
POINTS: dict[Effects, tuple[str, ...]] = {
    "external": ("begun", "charged"),
    "transactional": ("begun", "written"),
    "repeatable": ("begun", "charged"),
    "phased": ("begun", "ordered", "charging", "charged"),
}
"""How far the first attempt comes. ``charging``: the provider has charged, and the effect has not returned."""
HARMLESS = ("begun", "written", "ordered")
"""Points at which nothing has happened outside, so a handler may say so."""
DIED = 9


@dataclass(frozen=True)
class Case:
    before: Effects
    point: str
    ending: Ending
    now: Effects
    honoured: bool = False
    """The effect of the phased route may be repeated: the provider honours its key."""
    back: bool = False
    """The second retry finds the old declaration again."""


def cases() -> Iterator[Case]:
    for before in EFFECTS:
        for point in POINTS[before]:
            for ending in get_args(Ending):
                if ending == "not executed" and point not in HARMLESS:
                    continue
                if ending == "stands still" and point == "written":
                    continue  # its transaction is open, and keeps the key
                for now in EFFECTS:
                    for honoured in (False, True) if "phased" in (before, now) else (False,):
                        for back in (False, True) if now != before else (False,):
                            yield Case(before, point, ending, now, honoured, back)


EVERYTHING = sum(1 for _ in cases())


class Provider:
    """Counts charges, in a file that a process may die after. It honours a key that it is given."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def charge(self, op: Operation, *, honoured: bool) -> None:
        with self.path.open("a") as ledger:
            ledger.write(f"{op.key} {op.downstream_key('charge') if honoured else op.owner}\n")

    def charges(self) -> Counter[str]:
        """How many different charges each key has."""
        if not self.path.exists():
            return Counter()
        return Counter(line.split()[0] for line in set(self.path.read_text().splitlines()))


class Shop:
    """An app as it is deployed: its route declared ``effects``, on the store of the run."""

    def __init__(self, url: str, provider: Provider, case: Case, effects: Effects, *, first: bool = False) -> None:
        self.url, self.provider, self.case, self.effects, self.first = url, provider, case, effects, first
        self.stands, self.goes_on = asyncio.Event(), asyncio.Event()
        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=Policy(effects=effects))
        self.app = Starlette(routes=[Route("/pay", self._pay, methods=["POST"])])
        protect(self.app, self.once)
        self._opened: list[Any] = []

    async def close(self) -> None:
        """When all of its handlers have ended; an enlisted transaction is committed after its handler has returned."""
        await self.once.aclose()
        for connection in self._opened:
            await _now(connection.close())

    async def send(self, key: str) -> tuple[int, bytes]:
        asked = AsgiRequest("/pay", key, b"{}")
        await asyncio.wait({asked.start(self.app)})
        return asked.status, asked.body

    async def _pay(self, request: Request) -> Response:
        op = current()
        connection: Any = await _now(connected(self.url, asynchronous=True))
        self._opened.append(connection)
        try:
            await getattr(self, f"_{self.effects}")(op, connection)
        except _Returns500:
            return JSONResponse({}, 500)
        return JSONResponse({"run": op.owner}, 201)

    async def _external(self, op: Operation, connection: Any) -> None:
        await self._come_to("begun")
        self.provider.charge(op, honoured=False)
        await self._come_to("charged")

    async def _repeatable(self, op: Operation, connection: Any) -> None:
        await self._come_to("begun")
        self.provider.charge(op, honoured=True)
        await self._come_to("charged")

    async def _transactional(self, op: Operation, connection: Any) -> None:
        await self._come_to("begun")
        await op.enlist(connection)
        await _insert(connection, "payments", op.key)
        await self._come_to("written")

    async def _phased(self, op: Operation, connection: Any) -> None:
        async def charge() -> None:
            self.provider.charge(op, honoured=self.case.honoured)
            await self._come_to("charging")

        await self._come_to("begun")
        await op.phase("order", _insert, connection, "orders", op.key, on=connection)
        await self._come_to("ordered")
        await op.effect("charge", charge, repeatable=self.case.honoured)
        await self._come_to("charged")

    async def _come_to(self, point: str) -> None:
        if not self.first or point != self.case.point:
            return
        match self.case.ending:
            case "dies":
                os._exit(DIED)
            case "returns 500":
                raise _Returns500
            case "raises":
                raise RuntimeError("the handler failed")
            case "not executed":
                raise NotExecuted("nothing has happened")
            case "stands still":
                self.stands.set()
                await self.goes_on.wait()


class _Returns500(Exception):
    pass


def connected(url: str, *, asynchronous: bool = False) -> Any:
    if url.startswith("sqlite:"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=5.0, check_same_thread=False)
    return psycopg.AsyncConnection.connect(url) if asynchronous else psycopg.connect(url)


async def _now(answer: Any) -> Any:
    return await answer if isinstance(answer, Awaitable) else answer


async def _insert(connection: Any, table: str, key: str) -> None:
    await _now(connection.execute(f"INSERT INTO {table} (key) VALUES ('{key}')"))


class Deploys:
    """The cases of one run, one after the other, on one store."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.url = run.url()
        self.provider = Provider(run.folder / "ledger")
        with OnceKey(self.url, scope=SINGLE_TENANT, migrate=True) as once:
            once.start()
        self._do("CREATE TABLE payments (key text NOT NULL)", "CREATE TABLE orders (key text NOT NULL)")
        self.ended: Counter[str] = Counter()

    def _do(self, *statements: str) -> None:
        connection = connected(self.url)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    def rows(self, table: str, key: str) -> int:
        connection = connected(self.url)
        found: int = connection.execute(f"SELECT count(*) FROM {table} WHERE key = '{key}'").fetchone()[0]
        connection.close()
        return found

    def one(self, case: Case) -> None:
        key = f"key-{self.run.hits}"
        if case.ending == "dies":
            child = Child(lambda: asyncio.run(self._first(case, key)))
            assert os.waitstatus_to_exitcode(child.end()) == DIED, case
        answers = asyncio.run(self._all(case, key))
        self.run.asked(3)
        for promise, what in self._blemishes(case, key, answers):
            self.run.violated(promise, f"{what}: {case}, answers {answers}")
        self.run.hit()

    async def _first(self, case: Case, key: str) -> tuple[int, bytes]:
        return await Shop(self.url, self.provider, case, case.before, first=True).send(key)

    async def _all(self, case: Case, key: str) -> list[tuple[int, bytes]]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        shop = Shop(self.url, self.provider, case, case.before, first=True)
        standing = None
        answers: list[tuple[int, bytes]] = []
        if case.ending == "stands still":
            standing = asyncio.ensure_future(shop.send(key))
            await asyncio.wait_for(shop.stands.wait(), 20.0)
        elif case.ending != "dies":
            answers.append(await shop.send(key))
        self._let_the_lease_end(key)
        for effects in (case.now, case.before if case.back else case.now):
            deployed = Shop(self.url, self.provider, case, effects)
            answers.append(await deployed.send(key))
            await deployed.close()
        if standing is not None:
            shop.goes_on.set()
            answers.append(await standing)
        await shop.close()
        return answers

    def _let_the_lease_end(self, key: str) -> None:
        ended = "0" if self.url.startswith("sqlite:") else "'epoch'"
        self._do(f"UPDATE idempotency_keys SET lease_until = {ended} WHERE key = '{key}' AND state = 'in_progress'")

    def _blemishes(self, case: Case, key: str, answers: list[tuple[int, bytes]]) -> Iterator[tuple[str, str]]:
        with OnceKey(self.url, scope=SINGLE_TENANT) as once:
            (record,) = once.store.read([("single-tenant", key)])
        state = None if record is None else record.state
        self.ended[str(state)] += 1
        charges, payments, orders = self.provider.charges()[key], self.rows("payments", key), self.rows("orders", key)
        what = f"{charges} charges, {payments} payments, {orders} orders, key {state}"
        if charges + payments > 1 or orders > 1:
            yield "I1", what
        if state is State.COMPLETED and charges + payments == 0:
            yield "I1", f"completed, and nothing was done: {what}"
        if state in (None, State.IN_PROGRESS):
            yield "I4", f"left as {state}"
        if record is not None and state is State.UNKNOWN and record.reconcile_at is None:
            yield "I4", "unknown, and not on the reconciler's list"
        if len({answer for answer in answers if answer[0] == 201}) > 1:
            yield "I2", "two successes under one key"


def redeployed(run: Run) -> None:
    """All cases, or a sample of them."""
    planned = list(cases())
    if run.count < len(planned):
        planned = run.random.sample(planned, run.count)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deploys = Deploys(run)
        for case in planned:
            deploys.one(case)
    run.notes.append(", ".join(f"{count} {state}" for state, count in deploys.ended.most_common()))


FAULTS = (
    Fault(
        "policy changed between attempts",
        redeployed,
        counts={"sqlite": EVERYTHING, "postgres": EVERYTHING},
        short=25,
        promises=("I1", "I2", "I4"),
        seconds=90.0,
    ),
)
