"""Who settles a payment of which nobody here knows whether it was made: a resolver that asks the provider's ledger.

The ledger is the truth. A charge under our key that stands there was made: the payment is entered as succeeded, and the
retry gets its 201. One that does not stand there was not made; and since the reconciler believes that only when the
lease and the quarantine are over, it is not on its way any more either, and the retry may run.
"""

from __future__ import annotations

import json
from contextlib import closing

from oncekey import OnceKey
from oncekey.core.verdicts import Confirmed, Inquiry, Refuted, Resolver, Verdict
from oncekey.demo.book import Book, Payment
from oncekey.demo.provider import Provider
from oncekey.demo.settle import TASK


def ask_the_ledger(once: OnceKey, book: Book, provider: Provider) -> Resolver:
    def resolve(inquiry: Inquiry) -> Verdict:
        found = _asked(once, inquiry)
        if found is None:
            return Refuted("the provider was never asked")
        payment, downstream_key = found
        charges = [charge for charge in provider.charges() if charge["downstreamKey"] == downstream_key]
        if not charges:
            return Refuted("the provider's ledger has no such charge")
        with closing(book.connect()) as db:
            payment = book.settle(db, payment, "succeeded")
            db.commit()
        return Confirmed(
            *(201, payment),
            headers={"Location": f"/payments/{payment['id']}"},
            reason=f"the provider's ledger has charge {charges[0]['id']}",
        )

    return resolve


def _asked(once: OnceKey, inquiry: Inquiry) -> tuple[Payment, str] | None:
    """The payment, and the key under which the provider was asked for it: by a step of the request, or by its job."""
    payment: Payment | None = inquiry.result("payment_opened")
    if payment is not None:
        return payment, inquiry.downstream_key("charged")
    jobs = [job for job in once.store.jobs_of(inquiry.scope, inquiry.key, 100) if job.task == TASK]
    return (json.loads(jobs[-1].payload), jobs[-1].downstream_key) if jobs else None
