"""A phase or an enlisted transaction holds the SQLite file for too long: 503, and a log line that names it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from oncekey import Policy, current
from oncekey.core.states import State
from tests.enlist.handlers import handler
from tests.enlist.shop import SQLITE, Api, Payer, Shop, paid, sqlite_url
from tests.web.apps import soon, until

pytestmark = pytest.mark.stores

LEASE = timedelta(seconds=1.2)
DRIVERS = ["sqlite3", "aiosqlite", "sa-session", "sa-async-session"]


@pytest.fixture(params=DRIVERS)
def payer(request: pytest.FixtureRequest, tmp_path: Path) -> Payer:
    return SQLITE[request.param](Shop(sqlite_url(tmp_path)))


async def _overstay() -> None:
    """Return when oncekey has ended the transaction that is open."""
    enlisted = current().enlisted
    assert enlisted is not None
    await until(lambda: enlisted.held_too_long, "it is overdue")


async def _write(payer: Payer, thing: Any) -> None:
    done = payer.pay(thing, "k-1")
    if payer.is_async:
        await done


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("writes_on", [False, True])
async def test_overdue_phase_is_503_and_its_log_line_names_it(
    payer: Payer, writes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it notices, by a statement that fails, or returns as if nothing had happened."""
    shop = payer.shop

    async def serve(request: Request) -> Response:
        op = current()
        thing = await payer.open()

        async def slow() -> None:
            if op.attempt == 1:
                await _overstay()
            if op.attempt > 1 or writes_on:
                await _write(payer, thing)

        await op.phase("ride_created", slow, on=thing)
        return paid("k-1")

    api = Api(shop.url, serve, Policy(effects="phased", lease=LEASE))
    answer = await api.post("k-1")
    assert answer.status_code == 503, answer.text
    assert answer.json()["type"].endswith((":not-finished", ":not-executed"))
    assert (shop.payments("k-1"), shop.state("k-1")) == (0, State.FAILED_RETRYABLE)
    (line,) = _lines(caplog)
    assert "phase 'ride_created' held the database longer than 0.4 s" in line
    assert line.startswith("POST /payments: ")
    assert "commit()" not in caplog.text
    again = await api.post("k-1")
    assert (again.status_code, shop.payments("k-1")) == (201, 1), again.text
    await payer.close()
    await api.close()


@pytest.mark.parametrize("writes_on", [False, True])
async def test_overdue_enlisted_transaction_is_503_and_its_log_line_names_it(
    payer: Payer, writes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shop = payer.shop

    async def then(thing: Any) -> Response:
        await _overstay()
        if writes_on:
            await _write(payer, thing)
        return paid("k-1")

    api = Api(shop.url, handler(payer, then), Policy(effects="transactional", lease=LEASE))
    answer = await api.post("k-1")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:oncekey:problem:not-executed")
    record = shop.record("k-1")
    assert record is not None
    assert (shop.payments("k-1"), record.state) == (0, State.FAILED_RETRYABLE)
    assert record.last_error == "the enlisted transaction held the database longer than 0.4 s"
    assert sum("held the database longer than 0.4 s" in line for line in _lines(caplog)) == 1
    assert "commit()" not in caplog.text
    await payer.close()
    await api.close()


async def test_others_write_before_the_handler_of_an_overdue_transaction_has_ended(payer: Payer) -> None:
    shop, go, overdue = payer.shop, asyncio.Event(), asyncio.Event()

    async def then(thing: Any) -> Response:
        if current().key == "k-1":
            await _overstay()
            overdue.set()
            await go.wait()
        return paid(current().key)

    api = Api(shop.url, handler(payer, then), Policy(effects="transactional", lease=LEASE))
    first = asyncio.create_task(api.post("k-1"))
    await soon(overdue.wait())
    assert (await api.post("k-2")).status_code == 201
    go.set()
    assert (await first).status_code == 503
    assert (shop.payments("k-1"), shop.payments("k-2")) == (0, 1)
    await payer.close()
    await api.close()


async def test_transaction_opened_late_has_its_whole_time(tmp_path: Path) -> None:
    """The limit counts from the opening of the transaction, and not from the last renewal of the lease."""
    shop = Shop(sqlite_url(tmp_path))
    payer = SQLITE["sqlite3"](shop)
    opened: list[float] = []
    clock = asyncio.get_running_loop().time

    async def serve(request: Request) -> Response:
        op = current()
        await until(lambda: op.renew_at - clock() < 0.1, "a renewal is nearly due")
        thing = await payer.open()
        await op.enlist(thing)
        opened.append(clock())
        await _overstay()
        opened.append(clock())
        return paid("k-1")

    api = Api(shop.url, serve, Policy(effects="transactional", lease=LEASE))
    assert (await api.post("k-1")).status_code == 503
    assert opened[1] - opened[0] >= 0.4
    await payer.close()
    await api.close()


async def test_external_handler_that_does_not_commit_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own transaction has the file, so its own answer cannot be stored."""
    shop = Shop(sqlite_url(tmp_path))
    own = sqlite3.connect(shop.path, check_same_thread=False)

    async def serve(request: Request) -> Response:
        own.execute("INSERT INTO payments (key, cents) VALUES ('k-1', 5)")
        return paid("k-1")

    api = Api(shop.url, serve, Policy(begin_timeout=timedelta(seconds=0.3)))
    answer = await api.post("k-1")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:oncekey:problem:not-stored")
    (line,) = [each.getMessage() for each in caplog.records if "commit" in each.getMessage()]
    assert line.startswith("POST /payments: its response could not be stored within 0.3 s")
    assert "did not commit" in line
    own.commit()
    own.close()
    await until(lambda: shop.state("k-1") is State.COMPLETED, "the keeper stores it")
    await api.close()


async def test_store_that_is_down_is_not_blamed_on_the_handler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(sqlite_url(tmp_path))
    path = Path(shop.path)

    async def serve(request: Request) -> Response:
        path.rename(path.with_suffix(".away"))
        return paid("k-1")

    api = Api(shop.url, serve, Policy(begin_timeout=timedelta(seconds=0.3)))
    assert (await api.post("k-1")).status_code == 503
    assert "did not commit" not in caplog.text
    path.with_suffix(".away").rename(path)
    await api.close()
