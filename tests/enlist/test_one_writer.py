"""SQLite has one writer: which request holds the file, how long, and what becomes of requests that wait or leave."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response

from oncekey import Policy, current
from oncekey.core.states import State
from oncekey.stores.sqlite.gate import LoopTurn, gate_of
from tests.enlist.handlers import handler
from tests.enlist.shop import (
    SQLITE,
    Aiosqlite,
    Api,
    Payer,
    Shop,
    SqlAlchemy,
    Sqlite3,
    Sqlite3Autocommit,
    paid,
    sqlite_url,
)
from tests.web.apps import Gate, soon, until

SHORT = Policy(effects="transactional", lease=timedelta(seconds=1.2))


async def test_another_transaction_on_the_very_same_connection(sqlite_shop: Shop) -> None:
    """A session that is bound to one connection: rolled back by the handler, and begun anew by its next write."""

    class Bound(SqlAlchemy):
        def make(self) -> Any:
            return Session(self.engine.connect())

    payer = Bound(sqlite_shop)

    def again(thing: Any) -> Response:
        thing.rollback()
        payer.pay(thing, "k-1")
        return paid("k-1")

    api = sqlite_shop.api(handler(payer, again))
    assert (await api.post()).status_code == 500, "the write was refused"
    assert (sqlite_shop.payments(), sqlite_shop.state()) == (0, State.FAILED_RETRYABLE)
    for session in payer.opened:
        session.get_bind().close()
    await payer.close()
    await api.close()


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
async def test_an_engine_that_begins_by_an_event(sqlite_shop: Shop, begin: str) -> None:
    """The recipe of SQLAlchemy's documentation for SQLite: the transaction is open before we could begin it."""
    payer = SqlAlchemy(sqlite_shop)

    @sa.event.listens_for(payer.engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(payer.engine, "begin")
    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    api = sqlite_shop.api(handler(payer))
    answers = await asyncio.gather(*(api.post(f"k-{number}") for number in range(3)))
    assert [answer.status_code for answer in answers] == [201] * 3
    assert [sqlite_shop.payments(f"k-{number}") for number in range(3)] == [1] * 3
    await payer.close()
    await api.close()


@pytest.mark.parametrize("name", ["sqlite3", "aiosqlite", "sa-session", "sa-async-session"])
async def test_a_commit_is_on_the_disk_in_full(sqlite_shop: Shop, name: str) -> None:
    """Hazard 23: an app that runs with less than synchronous=FULL still keeps what its client has seen."""
    payer = SQLITE[name](sqlite_shop)
    seen: list[Any] = []

    async def look(thing: Any) -> Response:
        asked = thing.execute(sa.text("PRAGMA synchronous") if hasattr(payer, "engine") else "PRAGMA synchronous")
        row = (await asked if payer.is_async else asked).fetchone()
        seen.append((await row if asyncio.iscoroutine(row) else row)[0])
        return paid("k-1")

    async def lax(thing: Any) -> Any:
        done = thing.execute(
            sa.text("PRAGMA synchronous = OFF") if hasattr(payer, "engine") else "PRAGMA synchronous = OFF"
        )
        await done if payer.is_async else None
        return thing

    make = payer.open

    async def open_lax() -> Any:
        return await lax(await make())

    vars(payer)["open"] = open_lax
    api = sqlite_shop.api(handler(payer, look))
    assert (await api.post()).status_code == 201
    assert seen == [2]
    await payer.close()
    await api.close()


async def test_rolled_back_by_sqlite_itself(sqlite_shop: Shop) -> None:
    """OR ROLLBACK ends the transaction. Where Python begins none before a write, what came after it stayed."""
    sqlite_shop.ask("CREATE TABLE one (id integer PRIMARY KEY)")
    for kind, state, payments in ((Sqlite3, State.FAILED_RETRYABLE, 0), (Sqlite3Autocommit, State.UNKNOWN, 1)):
        payer, key = kind(sqlite_shop), kind.__name__

        def clash(thing: Any, payer: Payer = payer, key: str = key) -> Response:
            thing.execute("INSERT INTO one VALUES (1)")
            with pytest.raises(sqlite3.IntegrityError):
                thing.execute("INSERT OR ROLLBACK INTO one VALUES (1)")
            with suppress(sqlite3.Error):
                payer.pay(thing, key)
            return paid(key)

        api = sqlite_shop.api(handler(payer, clash))
        assert (await api.post(key)).status_code == (503 if payments == 0 else 409)
        assert (sqlite_shop.payments(key), sqlite_shop.state(key)) == (payments, state)
        await payer.close()
        await api.close()


async def test_an_overdue_sqlite_transaction_is_rolled_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Everybody waits for it: after a third of its lease it is ended, and others write. Each on a file of its own."""
    names = ("sqlite3", "aiosqlite", "sa-session", "sa-async-session")
    for name in names:
        (tmp_path / name).mkdir()
    await asyncio.gather(*(_overdue(Shop(sqlite_url(tmp_path / name)), name) for name in names))
    assert caplog.text.count("held the database longer than") >= len(names)


async def _overdue(shop: Shop, name: str) -> None:
    payer = SQLITE[name](shop)
    gate = Gate()
    was_free: list[bool] = []

    async def hold(thing: Any) -> Response:
        was_free.append(free())
        await gate.wait()
        return paid("k-1")

    def free() -> bool:
        connection = sqlite3.connect(shop.path, timeout=0, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        finally:
            connection.close()
        return True

    api = Api(shop.url, handler(payer, hold), SHORT)
    first = asyncio.create_task(api.post(name))
    await soon(gate.entered.wait())
    assert was_free == [False]
    await until(free, f"{name}: the file is free again")
    gate.go.set()
    assert (await first).status_code == 503
    assert (shop.payments(name), shop.state(name)) == (0, State.FAILED_RETRYABLE)
    await payer.close()
    await api.close()


@pytest.mark.parametrize("driver", ["sqlite3", "aiosqlite"])
async def test_cancelled_while_it_waits_for_the_file(sqlite_shop: Shop, driver: str) -> None:
    """The turn of a waiter that left goes to the next."""
    payer = SQLITE[driver](sqlite_shop)
    file = gate_of(Path(sqlite_shop.path))

    async def pay(request: Request) -> Response:
        op = current()
        thing = await payer.open()
        await asyncio.to_thread(file.acquire, 1.0, lane=False)
        waiting = asyncio.ensure_future(_await(op.enlist(thing)))
        await until(lambda: file.waiting, "it waits")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        file.release()
        raise RuntimeError("enough")

    api = sqlite_shop.api(pay)
    assert (await api.post()).status_code == 500
    assert file.acquire(0.0, lane=True)
    file.release()
    assert sqlite_shop.state() is State.FAILED_RETRYABLE
    await payer.close()
    await api.close()


async def test_begin_cancelled_while_it_waits_leaves_no_lock(sqlite_shop: Shop) -> None:
    """BEGIN waits for another process in the driver's own thread, and succeeds after its caller has left."""
    payer = Aiosqlite(sqlite_shop)
    rival = sqlite3.connect(sqlite_shop.path, isolation_level=None)

    async def pay(request: Request) -> Response:
        op = current()
        thing = await payer.open()
        rival.execute("BEGIN IMMEDIATE")
        opening = asyncio.ensure_future(_await(op.enlist(thing)))
        await until(lambda: op.enlisted is not None and op.enlisted.stage.name == "OPENING", "it opens")
        await until(thing._tx.empty, "the thread has it")
        opening.cancel()
        await asyncio.wait([opening])
        rival.execute("ROLLBACK")
        raise RuntimeError("enough")

    api = sqlite_shop.api(pay)
    assert (await api.post()).status_code == 500
    assert sqlite_shop.state() is State.FAILED_RETRYABLE
    rival.execute("BEGIN IMMEDIATE")
    rival.close()
    await payer.close()
    await api.close()


def test_a_turn_whose_loop_is_closed_goes_to_the_next(tmp_path: Path) -> None:
    file = gate_of(tmp_path / "some.db")
    assert file.acquire(0, lane=False)
    loop = asyncio.new_event_loop()
    assert not file.line_up(LoopTurn(file, loop), lane=False)
    loop.close()
    file.release()
    assert file.acquire(5, lane=True)


async def _await(thing: Any) -> Any:
    return await thing


async def test_a_busy_file_is_503(sqlite_shop: Shop) -> None:
    """Another process holds the file for longer than a request waits."""
    payer = SqlAlchemy(sqlite_shop)
    file = gate_of(Path(sqlite_shop.path))
    policy = Policy(effects="transactional", begin_timeout=timedelta(seconds=0.2))
    taken = threading.Event()

    async def pay(request: Request) -> Response:
        file.acquire(1.0, lane=False)
        taken.set()
        try:
            return await handler(payer)(request)
        finally:
            file.release()

    api = sqlite_shop.api(pay, policy)
    answer = await api.post()
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:oncekey:problem:not-executed")
    assert sqlite_shop.state() is State.FAILED_RETRYABLE
    await payer.close()
    await api.close()
