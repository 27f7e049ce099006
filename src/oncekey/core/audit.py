"""Changes by an operator or a resolver, as values: what a store writes beside a move, and what it reads later."""

from __future__ import annotations

from oncekey.core.values import value


@value
class Audit:
    """Which operator or resolver moved a row, and why. The store keeps it with the state before and after."""

    who: str
    why: str


@value
class AuditLine:
    """One row of ``idempotency_audit``. ``event``, ``before`` and ``after`` are words for a key, or for a job."""

    at: float
    who: str
    event: str
    scope: str
    key: str
    job_id: str | None
    before: str
    after: str | None
    """None: the row was deleted."""
    why: str
