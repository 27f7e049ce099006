"""The first app of a newcomer: the README's quick start, with a charge in it, and the usual mistakes."""

import asyncio
from datetime import timedelta
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel, Field

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.web.fastapi import CurrentOperation, protect

app = FastAPI()
once = OnceKey(
    "sqlite+aiosqlite:///shop.db",  # as the app has it for SQLAlchemy
    scope=SINGLE_TENANT,
    routes={"POST /orders": Policy(effects="transactional"), "POST /slow": Policy(lease=timedelta(seconds=12))},
)
protect(app, once)


class Payment(BaseModel):
    amount: float = Field(1.0, gt=0)


def charge(amount: float) -> None:
    with Path("charges.txt").open("a") as charges:
        charges.write(f"{amount}\n")


@app.post("/payments", status_code=201)
async def pay(payment: Payment):
    charge(payment.amount)
    return {"charged": payment.amount}


@app.post("/declined", status_code=201)
async def declined(payment: Payment):
    charge(payment.amount)
    raise ValueError("the provider's answer has no id")


@app.post("/slow", status_code=201)
async def slow(payment: Payment):
    charge(payment.amount)
    await asyncio.sleep(3600)


@app.post("/orders", status_code=201)
async def order(op: CurrentOperation):
    op.enqueue("send_receipt", {"order": 1})  # type: ignore[unused-coroutine]  # the await is forgotten
    return {"order": 1}
