"""The demo's payments API. What oncekey adds to it stands in ``make_app``: the rest is an ordinary FastAPI app.

``?simulate=`` makes trouble on request: ``slow``, ``error``, ``decline``, ``timeout``, ``crash``, ``large``.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from oncekey import NotAuthenticated, OnceKey, OutcomeUnknown, Policy
from oncekey import Request as KeyRequest
from oncekey.demo.book import Book
from oncekey.web.fastapi import CurrentOperation, protect

TENANTS = {"Bearer tenant-a": "tenant-a", "Bearer tenant-b": "tenant-b"}
SLOW_SECONDS = 3.0
LARGE_BYTES = 2 * 1024 * 1024

Simulate = Literal["slow", "error", "decline", "timeout", "crash", "large"]


class PaymentRequest(BaseModel):
    customerId: str = Field(min_length=1, max_length=100)
    amountCents: int = Field(gt=0, le=10**12, strict=True)
    currency: str = Field(pattern="^[A-Z]{3}$")


class RefundRequest(BaseModel):
    paymentId: str = Field(min_length=1, max_length=100)


def tenant_of(request: KeyRequest) -> str:
    """Whose keys these are: from the authentication, never from the body."""
    tenant = TENANTS.get(request.headers.get("authorization", ""))
    if tenant is None:
        raise NotAuthenticated("send 'Authorization: Bearer tenant-a' or 'Bearer tenant-b'")
    return tenant


def signed_in(request: Request) -> str:
    tenant = TENANTS.get(request.headers.get("authorization", ""))
    if tenant is None:
        raise HTTPException(401, "send 'Authorization: Bearer tenant-a' or 'Bearer tenant-b'")
    return tenant


Tenant = Annotated[str, Depends(signed_in)]


def make_app(store: str) -> FastAPI:
    app = FastAPI(title="oncekey demo: payments", version="1")
    # The lease is short, so that you see quickly what a crash leads to; 60 s is the default.
    once = OnceKey(store, scope=tenant_of, policy=Policy(lease=timedelta(seconds=3)), migrate=True)
    protect(app, once)
    book = Book(store)

    @app.post("/payments", status_code=201)
    def create_payment(
        body: PaymentRequest,
        tenant: Tenant,
        response: Response,
        operation: CurrentOperation,
        simulate: Annotated[Simulate | None, Query()] = None,
    ) -> Any:
        if simulate == "error":
            return JSONResponse({"error": "out of order, nothing happened", "attempt": operation.attempt}, 500)
        if simulate == "decline":
            return JSONResponse({"error": "the card was declined"}, 402)
        if simulate == "timeout":
            raise OutcomeUnknown("the provider did not answer in time")
        if simulate == "slow":
            time.sleep(SLOW_SECONDS)
        payment = book.charge(tenant, body.customerId, body.amountCents, body.currency)
        if simulate == "crash":
            os.kill(os.getpid(), signal.SIGKILL)  # charged, and nobody was told
        response.headers["Location"] = f"/payments/{payment['id']}"
        return payment | {"padding": "x" * LARGE_BYTES} if simulate == "large" else payment

    @app.get("/payments")
    def list_payments(tenant: Tenant) -> list[dict[str, Any]]:
        return book.payments(tenant)

    @app.get("/payments/{payment_id}")
    def get_payment(payment_id: str, tenant: Tenant) -> dict[str, Any]:
        payment = book.payment(tenant, payment_id)
        if payment is None:
            raise HTTPException(404, "no such payment")
        return payment

    @app.post("/refunds", status_code=201)
    def create_refund(body: RefundRequest, tenant: Tenant, response: Response) -> dict[str, Any]:
        payment = book.payment(tenant, body.paymentId)
        if payment is None:
            raise HTTPException(404, "no such payment")
        refund = book.refund(tenant, payment)
        response.headers["Location"] = f"/refunds/{refund['id']}"
        return refund

    return app
