"""The first hour: apps that start in a way that cannot work, and what they say."""

from __future__ import annotations

from pathlib import Path

from tests.first_hour.newcomer import Terminal, kill

MOUNTED = """
from fastapi import FastAPI

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.web.fastapi import protect

payments = FastAPI()
once = OnceKey("sqlite:///mounted.db", scope=SINGLE_TENANT)
protect(payments, once, upkeep=True)


@payments.post("/pay", status_code=201)
async def pay():
    return {"paid": True}


app = FastAPI()
app.mount("/payments", payments)  # a mounted app gets no lifespan
"""

ACCEPTED = """
import asyncio
from pathlib import Path

from fastapi import FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.web.fastapi import protect
from oncekey.web.status import status_app

app = FastAPI()
policy = Policy(in_flight="accepted")
once = OnceKey("sqlite:///accepted.db", scope=SINGLE_TENANT, policy=policy, status_url="/idempotency")
protect(app, once)
app.mount("/idempotency", status_app(once))


@app.post("/exports", status_code=201)
async def export():
    Path("begun").touch()
    await asyncio.sleep(3600)
"""

HOLDING = """
import asyncio
import sqlite3
from datetime import timedelta

from fastapi import Depends, FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.web.fastapi import CurrentOperation, protect

app = FastAPI()
once = OnceKey(
    "sqlite:///holding.db", scope=SINGLE_TENANT, policy=Policy(effects="phased", lease=timedelta(seconds=3))
)
protect(app, once)


async def database():
    connection = sqlite3.connect("holding.db")
    yield connection
    connection.close()


async def slow(connection):
    for _ in range(100):
        await asyncio.sleep(0.1)
        connection.execute("SELECT 1")


@app.post("/rides", status_code=201)
async def rides(op: CurrentOperation, connection=Depends(database)):
    return {"done": await op.phase("slow", slow, connection, on=connection)}
"""


def test_upkeep_of_a_mounted_app_says_that_it_never_started(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "mounted", "sqlite:///mounted.db", MOUNTED)
    with terminal.server():
        assert terminal.post("/payments/pay", "key-0001").status_code == 201
        assert terminal.post("/payments/pay", "key-0002").status_code == 201
    warnings = [line for line in terminal.log.splitlines() if "upkeep" in line]
    assert len(warnings) == 1, terminal.log
    assert "lifespan" in warnings[0]


def test_duplicate_in_flight_is_accepted_with_the_address_of_its_status(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "accepted", "sqlite:///accepted.db", ACCEPTED)
    begun = (tmp_path / "begun").exists
    with terminal.server() as process, terminal.under_way("/exports", "key-0001", begun=begun):
        second = terminal.post("/exports", "key-0001")
        assert second.status_code == 202
        assert int(second.headers["retry-after"]) >= 1
        status = terminal.http.get(second.headers["location"])
        assert status.status_code == 202
        kill(process)  # the handler would hold up an orderly end


def test_phase_that_holds_the_database_too_long_is_logged(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "holding", "sqlite:///holding.db", HOLDING)
    with terminal.server():
        answer = terminal.post("/rides", "key-0001")
    assert answer.status_code == 503
    assert "held the database longer than" in terminal.log
    assert "take the commit() out" not in terminal.log.lower()
