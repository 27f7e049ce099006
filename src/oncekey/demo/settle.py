"""The worker of ``oncekey demo --background``: it makes the payments that requests have deferred."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing

from oncekey.demo.book import Book, Payment
from oncekey.demo.family import follow_parent
from oncekey.demo.pace import LEASE_SECONDS, SLOW_SECONDS
from oncekey.demo.provider import Provider
from oncekey.errors import OutcomeUnknown
from oncekey.outbox import Context, Response, Worker

TASK = "settle_payment"
LARGE_BYTES = 2 * 1024 * 1024
GRACE_SECONDS = 5.0


def make_worker(store: str, provider: Provider, *, metrics: bool = False) -> Worker:
    worker = Worker(store, lease=LEASE_SECONDS, poll=0.2, telemetry="prometheus" if metrics else None)
    book = Book(store)
    # A provider that does not honour keys must not be asked twice, so the job has one attempt. If that attempt does not
    # end, the job is a dead letter.
    attempts = 8 if provider.honours else 1

    @worker.task(TASK, max_attempts=attempts, timeout=60.0, max_backoff=5.0)
    def settle_payment(ctx: Context, job: dict[str, str]) -> Response:
        """Charge, and return the response that every later retry of the request gets."""
        payment: Payment = dict(job)
        simulate = payment.pop("simulate")
        if simulate == "slow":
            time.sleep(SLOW_SECONDS)
        if simulate == "timeout":
            raise OutcomeUnknown("the provider did not answer in time")
        if simulate == "decline":
            _settle(book, payment, "declined")
            return Response(402, {"error": "the card was declined"})
        charge = provider.charge(ctx.downstream_key, payment["customerId"], payment["amountCents"], payment["currency"])
        if simulate == "crash" and ctx.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # the provider has charged, and the worker did not store it
        ctx.record(charge["id"])
        payment = _settle(book, payment, "succeeded")
        padding = {"padding": "x" * LARGE_BYTES} if simulate == "large" else {}
        return Response(201, payment | padding, headers={"Location": f"/payments/{payment['id']}"})

    return worker


def _settle(book: Book, payment: Payment, status: str) -> Payment:
    with closing(book.connect()) as db:
        settled = book.settle(db, payment, status)
        db.commit()
    return settled


def main(store: str, provider: str, honours: str, watched: str) -> None:
    follow_parent()
    asked = Provider(provider, honours=honours == "yes")
    make_worker(store, asked, metrics=watched == "metrics").run(grace=GRACE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
