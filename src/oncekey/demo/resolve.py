"""The demo's resolver: if it is unknown whether a payment was made, it asks the provider's ledger.

If the ledger has a charge under the downstream key, the charge was made. If a step of the request made it, the resolver
says that the step happened, and the retry goes on after it. If a job made it, the resolver marks the payment as
succeeded, and the retry gets its 201. If the ledger has none, the charge was not made. The reconciler accepts that
verdict only after the quarantine, when no charge can still be on its way. Then the retry may run. It refuses the
verdict if the payment was deferred: its row is committed, and only an operator lets its job run again.
"""

from __future__ import annotations

import json
from contextlib import closing

from oncekey import OnceKey
from oncekey.core.verdicts import Confirmed, Happened, Inquiry, Refuted, Resolver, Verdict
from oncekey.demo.book import Book, Payment
from oncekey.demo.provider import Provider
from oncekey.demo.settle import TASK
from oncekey.stores.api import Outbox


def ask_the_ledger(once: OnceKey, book: Book, provider: Provider) -> Resolver:
    def resolve(inquiry: Inquiry) -> Verdict:
        found = _asked(once, inquiry)
        if found is None:
            return Refuted("the provider was never asked")
        payment, downstream_key = found
        charges = [charge for charge in provider.charges() if charge["downstreamKey"] == downstream_key]
        if not charges:
            return Refuted("the provider's ledger has no such charge")
        reason = f"the provider's ledger has charge {charges[0]['id']}"
        if inquiry.in_doubt:  # a step of the request: the retry gets this result, and marks the payment as succeeded
            return Happened(charges[0], provider_id=str(charges[0]["id"]), reason=reason)
        with closing(book.connect()) as db:
            payment = book.settle(db, payment, "succeeded")
            db.commit()
        return Confirmed(
            *(201, payment),
            headers={"Location": f"/payments/{payment['id']}"},
            reason=reason,
        )

    return resolve


def _asked(once: OnceKey, inquiry: Inquiry) -> tuple[Payment, str] | None:
    """The payment and its downstream key, from a step of the request or from its job. None: the provider was never
    asked."""
    payment: Payment | None = inquiry.result("payment_opened")
    if payment is not None:
        return payment, inquiry.downstream_key("charged")
    store = once.store
    found = store.jobs_of(inquiry.scope, inquiry.key, 100) if isinstance(store, Outbox) else []
    jobs = [job for job in found if job.task == TASK]
    return (json.loads(jobs[-1].payload), jobs[-1].downstream_key) if jobs else None
