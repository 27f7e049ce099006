"""The demo's payments API. The parts for oncekey are in ``make_app`` and in the handlers of POST /payments.

A payment changes two systems: it writes a row in the demo's database, and makes a charge at a provider, which is
another process. In ``charge_now`` both are **steps** of one request: if an attempt is killed, the next attempt resumes
after its last step. In ``charge_later`` the request only commits the row together with a job and answers 202; a worker
does the rest. If it is unknown whether the provider has charged, upkeep asks the provider's ledger (``resolve.py``).
Upkeep runs in this process too.

``?simulate=`` makes a request fail on purpose: ``slow``, ``error``, ``decline``, ``timeout``, ``crash``, ``large``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from oncekey import NotAuthenticated, OnceKey, OutcomeUnknown, Policy
from oncekey import Request as KeyRequest
from oncekey.demo.book import Book, Connection, Payment
from oncekey.demo.pace import LEASE_SECONDS, LOOK_SECONDS, QUARANTINE_SECONDS, SLOW_SECONDS
from oncekey.demo.provider import Charge, Provider
from oncekey.demo.resolve import ask_the_ledger
from oncekey.demo.settle import LARGE_BYTES, TASK
from oncekey.upkeep import Upkeep
from oncekey.upkeep.service import REAP_SECONDS
from oncekey.web.fastapi import CurrentOperation, protect
from oncekey.web.status import status_app, status_path

TENANTS = {"Bearer tenant-a": "tenant-a", "Bearer tenant-b": "tenant-b"}
LEASE = timedelta(seconds=LEASE_SECONDS)
QUARANTINE = timedelta(seconds=QUARANTINE_SECONDS)

Simulate = Annotated[Literal["slow", "error", "decline", "timeout", "crash", "large"] | None, Query()]


class PaymentRequest(BaseModel):
    customerId: str = Field(min_length=1, max_length=100)
    amountCents: int = Field(gt=0, le=10**12, strict=True)
    currency: str = Field(pattern="^[A-Z]{3}$")


class RefundRequest(BaseModel):
    paymentId: str = Field(min_length=1, max_length=100)


def tenant_of(request: KeyRequest) -> str:
    """The tenant of a request: from its authentication, never from its body."""
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


def make_app(
    store: str,
    provider: Provider,
    *,
    payments: str | None = None,
    background: bool = False,
    metrics: bool = False,
    ttl: float = 86_400.0,
) -> FastAPI:
    """``payments``: the database of the payments, if it is not the store. ``ttl``: how long keys are kept."""
    app = FastAPI(title="oncekey demo: payments", version="1")
    book = Book(payments or store)
    beside = payments not in (None, store)
    """The store keeps no tables, so its steps cannot commit together with rows: rows get names that a retry repeats."""
    kept = timedelta(seconds=ttl)
    effects: Literal["transactional", "phased"] = "transactional" if background else "phased"
    once = OnceKey(
        store,
        scope=tenant_of,
        routes={
            "POST /payments": Policy(effects=effects, lease=LEASE, quarantine=QUARANTINE, ttl=kept),
            "POST /refunds": Policy(effects="repeatable" if beside else "transactional", lease=LEASE, ttl=kept),
        },
        migrate=True,
        telemetry="prometheus" if metrics else None,
    )
    once.resolve_with("POST /payments", ask_the_ledger(once, book, provider))
    reap_every = min(REAP_SECONDS, ttl / 2)
    upkeep = Upkeep(once, sweep_every=LOOK_SECONDS, reconcile_every=LOOK_SECONDS, reap_every=reap_every)
    protect(app, once, upkeep=upkeep)
    app.mount("/idempotency", status_app(once))
    if metrics:
        from oncekey.telemetry.prometheus import metrics_app

        app.mount("/metrics", metrics_app())
    app.exception_handler(RequestValidationError)(_invalid)

    def connection() -> Iterator[Connection]:
        with closing(book.connect()) as db:
            yield db

    database = Depends(connection)

    def charge_now(
        body: PaymentRequest,
        tenant: Tenant,
        response: Response,
        operation: CurrentOperation,
        db: Any = database,
        simulate: Simulate = None,
    ) -> Any:
        if simulate == "error":
            return _out_of_order(operation.attempt)
        if simulate == "decline":
            return JSONResponse({"error": "the card was declined"}, 402)
        if simulate == "timeout" and operation.attempt == 1:
            raise OutcomeUnknown("the provider did not answer in time")
        if simulate == "slow":
            time.sleep(SLOW_SECONDS)
        asked = (body.customerId, body.amountCents, body.currency)

        def charge() -> Charge:
            made = provider.charge(operation.downstream_key("charged"), *asked)
            if simulate == "crash" and operation.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)  # the provider has charged, and the app did not store it
            return made

        def opened() -> Payment:
            name = operation.downstream_key("payment_opened")
            return _committed(db, book.open_payment(db, tenant, *asked, name=name))

        def settled() -> Payment:
            return _committed(db, book.settle(db, payment, "succeeded"))

        steps = operation.blocking
        if beside:
            payment = steps.effect("payment_opened", opened, repeatable=True)
        else:
            payment = steps.phase("payment_opened", book.open_payment, db, tenant, *asked, on=db)
        try:
            steps.effect("charged", charge, repeatable=provider.honours, provider_id=lambda made: str(made["id"]))
        except OSError as error:
            raise HTTPException(502, "the provider does not answer: send it again, with the same key") from error
        if beside:
            payment = steps.effect("payment_succeeded", settled, repeatable=True)
        else:
            payment = steps.phase("payment_succeeded", book.settle, db, payment, "succeeded", on=db)
        response.headers["Location"] = f"/payments/{payment['id']}"
        return payment | {"padding": "x" * LARGE_BYTES} if simulate == "large" else payment

    def charge_later(
        body: PaymentRequest,
        tenant: Tenant,
        response: Response,
        operation: CurrentOperation,
        db: Any = database,
        simulate: Simulate = None,
    ) -> Any:
        if simulate == "error":
            return _out_of_order(operation.attempt)
        operation.blocking.enlist(db)
        payment = book.open_payment(db, tenant, body.customerId, body.amountCents, body.currency)
        operation.blocking.defer(TASK, payment | {"simulate": simulate if operation.attempt == 1 else None})
        response.headers["Location"] = status_path("/idempotency", operation)
        return payment

    app.post("/payments", status_code=202 if background else 201)(charge_later if background else charge_now)

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
    def create_refund(
        body: RefundRequest, tenant: Tenant, response: Response, operation: CurrentOperation, db: Any = database
    ) -> dict[str, Any]:
        payment = book.payment(tenant, body.paymentId)
        if payment is None:
            raise HTTPException(404, "no such payment")
        if beside:
            refund = _committed(db, book.refund(db, tenant, payment, name=operation.downstream_key("refund")))
        else:
            operation.blocking.enlist(db)
            refund = book.refund(db, tenant, payment)
        response.headers["Location"] = f"/refunds/{refund['id']}"
        return refund

    @app.get("/provider/charges")
    def list_charges() -> list[Charge]:
        """The provider's ledger: what was really charged, also after a crash of the app."""
        try:
            return provider.charges()
        except OSError as error:
            raise HTTPException(502, "the provider does not answer") from error

    return app


def _committed(db: Connection, written: Payment) -> Payment:
    db.commit()
    return written


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    """422 with the errors and their places. FastAPI's own handler repeats the input, and raises if JSON cannot hold
    it: NaN, infinity, a lone surrogate."""
    wrong = [{name: one[name] for name in ("type", "loc", "msg")} for one in error.errors()]
    return JSONResponse({"detail": wrong}, 422)


def _out_of_order(attempt: int) -> JSONResponse:
    return JSONResponse({"error": "out of order, nothing happened", "attempt": attempt}, 500)
