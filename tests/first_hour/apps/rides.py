"""A newcomer's phased app: a ride is created, charged at a provider without idempotency, and gets its receipt."""

import asyncio
import sqlite3
from pathlib import Path

from fastapi import Depends, FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.upkeep import Happened, Inquiry, NotHappened, StillUnknown, Verdict
from oncekey.web.fastapi import CurrentOperation, protect

app = FastAPI()
once = OnceKey("sqlite:///rides.db", scope=SINGLE_TENANT, policy=Policy(effects="phased", keep_request=True))
protect(app, once)

with sqlite3.connect("rides.db") as setup:
    setup.execute("CREATE TABLE IF NOT EXISTS rides (id INTEGER PRIMARY KEY, target TEXT, charge TEXT, receipt TEXT)")


def create_ride(connection, target):
    return connection.execute("INSERT INTO rides (target) VALUES (?)", [target]).lastrowid


async def charge(ride):
    with Path("charges.txt").open("a") as charges:
        charges.write(f"charge-{ride}\n")
    if Path("hang").exists():
        await asyncio.sleep(3600)
    if Path("fail").exists():
        raise TimeoutError("the provider did not answer")
    return {"id": f"charge-{ride}"}


def write_receipt(connection, ride, charge_id):
    connection.execute("UPDATE rides SET charge = ?, receipt = 'sent' WHERE id = ?", [charge_id, ride])


async def database():
    connection = sqlite3.connect("rides.db")
    yield connection
    connection.close()


async def take_ride(op, connection, target):
    ride = await op.phase("ride_created", create_ride, connection, target, on=connection)
    charged = await op.effect("charged", charge, ride, repeatable=False)
    await op.phase("receipt_written", write_receipt, connection, ride, charged["id"], on=connection)
    return {"ride": ride, "charge": charged["id"]}


@app.post("/rides", status_code=201)
async def rides(body: dict, op: CurrentOperation, connection=Depends(database)):  # noqa: B008 - as FastAPI wants it
    return await take_ride(op, connection, body["target"])


@once.resolver("POST /rides")
def ask_the_provider(inquiry: Inquiry) -> Verdict:
    """Their ledger is a file here."""
    if not Path("provider-is-up").exists():
        return StillUnknown("the provider is down")
    ride = inquiry.result("ride_created")
    if f"charge-{ride}" in Path("charges.txt").read_text().splitlines():
        return Happened({"id": f"charge-{ride}"}, effect="charged")
    return NotHappened(effect="charged", reason="it is not in their ledger")
