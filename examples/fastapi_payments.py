"""A payments API that survives retries, in one file and with nothing to install but FastAPI and uvicorn.

    uvicorn examples.fastapi_payments:app

    curl -i localhost:8000/payments -H 'X-API-Key: ann-secret' -H 'Idempotency-Key: order-1001' --json '{"amount": 500}'

Send the second command twice: the same payment comes back, marked ``Idempotency-Replayed: true``. Send it with another
amount: 422. With ``"amount": -1`` and a new key: 422 too, and the key can still be used for the corrected request. The
documentation at localhost:8000/docs shows the header, its rules and every answer.
"""

from __future__ import annotations

import os
import uuid
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, Field

from oncekey import NotAuthenticated, OnceKey, Policy, Request
from oncekey.web.fastapi import CurrentOperation, protect

API_KEYS = {"ann-secret": "ann", "bob-secret": "bob"}  # yours come from a database


def tenant_of(request: Request) -> str:
    """The tenant that a key belongs to. Never take it from the body: a replay goes to the tenant that is named here."""
    try:
        return API_KEYS[request.headers["x-api-key"]]
    except KeyError:
        raise NotAuthenticated("Send a valid X-API-Key.") from None


class Payment(BaseModel):
    amount: Annotated[int, Field(gt=0, description="in cents")]


class Receipt(BaseModel):
    id: str
    amount: int
    provider_key: str


app = FastAPI(title="Payments")
once = OnceKey(
    os.environ.get("ONCEKEY_STORE", "sqlite:///payments.db"),
    scope=tenant_of,
    # The provider honours our key, so a second call with it does nothing.
    routes={"POST /payments": Policy(effects="repeatable")},
)
protect(app, once)


@app.post("/payments", status_code=201)
async def pay(payment: Payment, op: CurrentOperation) -> Receipt:
    """Take a payment. Runs once per Idempotency-Key, however often the client asks."""
    provider_key = op.downstream_key("charge")  # the same in every attempt: hand it to the provider as its key
    return Receipt(id=f"pay_{uuid.uuid4().hex}", amount=payment.amount, provider_key=provider_key)
