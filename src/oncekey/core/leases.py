"""When the keeper renews a lease, and how a row shows that its owner no longer renews.

The keeper looks ``LOOKS_PER_LEASE`` times in a lease, and renews a lease when ``RENEW_AT`` of it has passed. So while a
process lives, at least 7/12 of a lease are left in the row, less the time that the store takes.
"""

from __future__ import annotations

from oncekey.core.record import Record
from oncekey.core.states import State

RENEW_AT = 1 / 3
"""The part of the lease after which it is renewed: two renewals may fail before the lease runs out."""
LOOKS_PER_LEASE = 12
OVERDUE_AT = 1 / 2
"""If less than this part of the lease is left, a renewal is overdue. Renewal begins with two thirds left; one twelfth
passes until the keeper looks, and one twelfth is allowed for the store."""


def overdue_lease(record: Record, lease_seconds: float) -> float | None:
    """The seconds that are left of a lease whose renewal is overdue; None: the row does not show that.

    ``lease_seconds`` is the lease of the present policy. The owner may have had another policy (a deploy). Its lease
    cannot be longer than ``lease_until - created_at``, so the shorter of the two is used. Then a live owner looks
    overdue only if its own lease was shorter and has been renewed.
    """
    if record.state is not State.IN_PROGRESS or record.lease_over:
        return None
    left = record.lease_until - record.now
    lease = min(lease_seconds, record.lease_until - record.created_at)
    return left if left < lease * OVERDUE_AT else None
