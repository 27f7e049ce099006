"""Ways in which a handler ends its own enlisted transaction, as data, for every driver that can be enlisted.

A way is a list of steps that ordinary code takes, one after the other; what a step raises is swallowed or goes up.
``handler_of`` makes a handler of it, and ``check`` says what must hold after some sends of one key, whatever was
refused, noticed or missed on the way. Each attempt writes rows of its own number, so that two attempts that both
committed show.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import current
from oncekey.core.states import State
from tests.enlist.shop import Asyncpg, AsyncpgPool, Payer, Shop, paid

Ending = Literal["returns 201", "returns 500", "raises", "fails and raises"]
ENDINGS: tuple[Ending, ...] = ("returns 201", "returns 500", "raises", "fails and raises")

INSERT = "INSERT INTO payments (key, cents) VALUES ('{key}', {attempt})"
FAIL = "INSERT INTO payments (key, cents) VALUES (NULL, NULL)"


@dataclass(frozen=True)
class Way:
    steps: tuple[str, ...]
    beneath: bool = False
    """It goes beneath SQLAlchemy, to the driver's own connection."""
    recognised: bool = True
    """It can be refused with certainty; else the key may become unknown, with rows."""


WAYS = {
    "rolls back, writes again, commits": Way(("fail", "rollback", "write", "commit")),
    "rolls back, writes twice, commits": Way(("rollback", "write", "commit", "write", "commit")),
    "rolls back, writes, returns": Way(("rollback", "write")),
    "rolls back, reads, writes, commits": Way(("rollback", "read", "write", "commit")),
    "commits": Way(("commit",)),
    "commits, writes, commits": Way(("commit", "write", "commit")),
    "closes, writes, commits": Way(("close", "write", "commit")),
    "COMMIT": Way(("sql:COMMIT",)),
    "COMMIT behind a comment": Way(("sql:/* hint */ COMMIT",)),
    "END": Way(("sql:-- done\nEND",)),
    "ROLLBACK, write, COMMIT": Way(("sql:ROLLBACK", "write", "sql:COMMIT")),
    "ABORT, BEGIN, write, COMMIT": Way(("sql:ABORT", "sql:BEGIN", "write", "sql:COMMIT")),
    "ROLLBACK AND CHAIN, write, COMMIT": Way(("sql:ROLLBACK AND CHAIN", "write", "sql:COMMIT")),
    "ROLLBACK, BEGIN, write, COMMIT, BEGIN": Way(("sql:ROLLBACK", "sql:BEGIN", "write", "sql:COMMIT", "sql:BEGIN")),
    "write and COMMIT in one text": Way(("driver:{insert}; COMMIT",), recognised=False),
    "COMMIT and BEGIN in one text": Way(("driver:{insert}; COMMIT; BEGIN",), recognised=False),
    "ROLLBACK, write, COMMIT in one text": Way(("driver:ROLLBACK; BEGIN; {insert}; COMMIT",)),
    "another transaction in one text": Way(("driver:SELECT 1; ROLLBACK; BEGIN; {insert}; COMMIT",), recognised=False),
    "two others in one text": Way(("driver:SELECT 1; ROLLBACK; BEGIN; {insert}; COMMIT; BEGIN",), recognised=False),
    "commits beneath": Way(("beneath.commit",), beneath=True),
    "commits beneath, writes": Way(("beneath.commit", "write", "beneath.commit"), beneath=True),
    "rolls back beneath, writes, commits beneath": Way(("beneath.rollback", "write", "beneath.commit"), beneath=True),
    "does all of it beneath": Way(("beneath.rollback", "beneath.write", "beneath.commit"), beneath=True),
    "does all of it on the driver": Way(("raw.rollback", "raw.write", "raw.commit"), beneath=True),
    "does all of it on the driver, rolls back": Way(
        ("raw.rollback", "raw.write", "raw.commit", "rollback"), beneath=True
    ),
    "rolls back, does all of it on the driver": Way(
        ("rollback", "raw.rollback", "raw.write", "raw.commit"), beneath=True
    ),
    "rolls back, reads, does all of it on the driver": Way(
        ("rollback", "read", "raw.rollback", "raw.write", "raw.commit"), beneath=True
    ),
    "SQL on the driver": Way(("raw:ROLLBACK", "raw:BEGIN", "raw.write", "raw:COMMIT"), beneath=True),
    "one text on the driver": Way(("raw:ROLLBACK; BEGIN; {insert}; COMMIT",), beneath=True),
    "a later text on the driver": Way(
        ("raw:SELECT 1; ROLLBACK; BEGIN; {insert}; COMMIT; BEGIN",), beneath=True, recognised=False
    ),
    "a CTE on the driver": Way(
        ("rollback", "raw:WITH made AS ({insert} RETURNING 1) SELECT * FROM made", "raw.commit"),
        beneath=True,
        recognised=False,
    ),
}


class Hands:
    """One attempt's hands on what it enlisted: takes the steps of a way with any driver."""

    def __init__(self, payer: Payer, thing: Any, key: str, attempt: int) -> None:
        self._till, self._thing = payer, thing
        self._insert = self._quoted(INSERT.format(key=key, attempt=attempt))

    async def take(self, step: str) -> None:
        kind, _, text = step.partition(":")
        match kind:
            case "write":
                await self._sql(self._insert)
            case "fail":
                await self._sql(FAIL)
            case "read":
                await self._sql("SELECT count(*) FROM payments")
            case "sql":
                await self._sql(text)
            case "driver":
                await self._driver_sql(text.format(insert=self._insert))
            case "close":
                await self._close()
            case "raw":
                await self._raw_sql(text.format(insert=self._insert))
            case "raw.write":
                await self._raw_sql(self._insert)
            case "raw.commit" | "raw.rollback":
                await self._raw_end(kind.partition(".")[2])
            case "beneath.write":
                await self._beneath(lambda beneath: beneath.cursor().execute(self._insert))
            case "beneath.commit" | "beneath.rollback":
                await self._beneath(lambda beneath: getattr(beneath, kind.partition(".")[2])())
            case _:
                await self._end(kind)

    def _quoted(self, sql: str) -> str:
        return re.sub(r"\bkey\b(?=[ ,])", "`key`", sql) if self._till.shop.kind == "mysql" else sql

    async def _sql(self, sql: str) -> None:
        if hasattr(self._till, "engine"):
            await _done(self._thing.execute(sa.text(self._quoted(sql))))
        else:
            await execute_on(self._thing, self._quoted(sql))

    async def _raw_sql(self, sql: str) -> None:
        await execute_on(await driver_of(self._thing), sql)

    async def _raw_end(self, verb: str) -> None:
        driver = await driver_of(self._thing)
        await _done(getattr(driver, verb)() if hasattr(driver, verb) else driver.execute(verb))

    async def _driver_sql(self, sql: str) -> None:
        if not hasattr(self._till, "engine"):
            return await self._sql(sql)
        return await self._in_sqlalchemy(lambda it: _connection(it).exec_driver_sql(sql))

    async def _beneath(self, function: Callable[[Any], Any]) -> None:
        await self._in_sqlalchemy(lambda it: function(_connection(it).connection))

    async def _in_sqlalchemy(self, function: Callable[[Any], Any]) -> None:
        if hasattr(self._thing, "run_sync"):
            await self._thing.run_sync(function)
        else:
            function(self._thing)

    async def _end(self, verb: str) -> None:
        await _done(getattr(self._thing, verb)() if hasattr(self._thing, verb) else self._thing.execute(verb))

    async def _close(self) -> None:
        if isinstance(self._till, AsyncpgPool):
            self._till.opened.remove(self._thing)
            await self._till.pool.release(self._thing)
        else:
            await _done(self._thing.close())


async def driver_of(thing: Any) -> Any:
    """The driver's own connection, beneath what a handler has enlisted. SQLAlchemy may begin a transaction for it."""
    if isinstance(thing, (Session, scoped_session)):
        return thing.connection().connection.driver_connection
    if isinstance(thing, sa.Connection):
        return thing.connection.driver_connection
    if hasattr(thing, "get_raw_connection"):
        return (await thing.get_raw_connection()).driver_connection
    if hasattr(thing, "run_sync"):
        return (await (await thing.connection()).get_raw_connection()).driver_connection
    return thing


async def execute_on(connection: Any, sql: str) -> None:
    """On any driver's connection."""
    if hasattr(connection, "execute"):
        return await _done(connection.execute(sql))
    cursor = connection.cursor()
    if inspect.isawaitable(cursor):
        cursor = await cursor
    return await _done(cursor.execute(sql))


def _connection(it: Any) -> Any:
    return it.connection() if callable(getattr(it, "connection", None)) else it


async def _done(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer


def handler_of(payer: Payer, way: Way, ending: Ending, *, swallows: bool) -> Any:
    """A handler that enlists, pays, ends its transaction in this way, and then the request in that."""
    attempts: dict[str, int] = {}

    async def pay(request: Request) -> Response:
        key = current().key
        attempts[key] = attempt = attempts.get(key, 0) + 1
        thing = await payer.open()
        await current().enlist(thing)
        hands = Hands(payer, thing, key, attempt)
        await hands.take("write")
        for step in (*way.steps, "fail") if ending == "fails and raises" else way.steps:
            try:
                await hands.take(step)
            except Exception:
                if not swallows and step != "fail":
                    raise
        if ending.endswith("raises"):
            raise RuntimeError("the handler raises after all of it")
        return paid(key) if ending == "returns 201" else JSONResponse({}, 500)

    return pay


def check(shop: Shop, payer: Payer, way: Way, key: str, told: list[int]) -> list[str]:
    """What is wrong after these answers to several sends of one key; nothing, if nothing is."""
    rows = shop.ask(f"SELECT cents, count(*) FROM payments WHERE key = '{key}' GROUP BY cents")
    state, wrong = shop.state(key), []
    if len(rows) > 1:
        wrong.append(f"{len(rows)} attempts committed")
    if (201 in told) != (state is State.COMPLETED):
        wrong.append("what was answered is not what is stored")
    if state is State.COMPLETED and not rows:
        wrong.append("a success is stored without its rows")
    if state is State.FAILED_RETRYABLE and rows:
        wrong.append("rows are there, and the key says that nothing was executed")
    if state not in (State.COMPLETED, State.FAILED_RETRYABLE, State.UNKNOWN):
        wrong.append("the key is stuck")
    if state is State.COMPLETED:
        return _told(wrong, state, rows, told)  # the driver did not know the statement, and the handler went on
    if rows and way.recognised and refuses(payer, way):
        wrong.append("rows were committed that a guard could have refused")
    return _told(wrong, state, rows, told)


def _told(wrong: list[str], *facts: Any) -> list[str]:
    return [f"{each}: {facts}" for each in wrong]


def refuses(payer: Payer, way: Way) -> bool:
    """Whether this driver lets us refuse it: asyncpg alone does not."""
    del way
    return not isinstance(payer, Asyncpg)
