"""An app that books each paid invoice of Stripe once, though Stripe delivers some events twice.

    STRIPE_WEBHOOK_SECRET=whsec_… uvicorn examples.webhooks_stripe:app
    stripe listen --forward-to localhost:8000/stripe        # Stripe's own command line, which prints the secret
    stripe trigger invoice.paid

The booking and the answer to Stripe are one commit: `effects="transactional"`. If the process is killed in the middle,
neither is there, and Stripe's next delivery books it. `GET /bookings` shows what was booked.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI

from oncekey import NotAuthenticated, OnceKey, Request
from oncekey.web.fastapi import CurrentOperation, protect
from oncekey.webhooks import stripe

DATABASE = os.environ.get("WEBHOOKS_DATABASE", "webhooks.db")
SECRETS = os.environ["STRIPE_WEBHOOK_SECRET"].split(",")  # the new and the old one, while a secret is replaced


def account_of(request: Request) -> str:
    """The tenant, on the other routes of a real app. Webhooks have none: the signature proves the sender."""
    raise NotAuthenticated


app = FastAPI(title="Bookings")
once = OnceKey(
    f"sqlite:///{DATABASE}", scope=account_of, routes={"POST /stripe": stripe(SECRETS, effects="transactional")}
)
protect(app, once)

with sqlite3.connect(DATABASE) as setup:
    setup.execute("CREATE TABLE IF NOT EXISTS bookings (event TEXT, invoice TEXT, cents INTEGER)")


async def database() -> AsyncIterator[sqlite3.Connection]:
    connection = sqlite3.connect(DATABASE)
    yield connection  # until the response is sent
    connection.close()


Database = Annotated[sqlite3.Connection, Depends(database)]


@app.post("/stripe")
async def stripe_event(event: dict[str, Any], operation: CurrentOperation, connection: Database) -> dict[str, bool]:
    """Runs once for each event, after oncekey has checked its signature."""
    await operation.enlist(connection)
    if event["type"] == "invoice.paid":
        invoice = event["data"]["object"]
        booking = (event["id"], invoice["id"], invoice["amount_paid"])
        connection.execute("INSERT INTO bookings VALUES (?, ?, ?)", booking)
    return {"received": True}


@app.get("/bookings")
async def bookings(connection: Database) -> list[dict[str, Any]]:
    found = connection.execute("SELECT event, invoice, cents FROM bookings").fetchall()
    return [{"event": event, "invoice": invoice, "cents": cents} for event, invoice, cents in found]
