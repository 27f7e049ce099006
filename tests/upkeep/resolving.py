"""Runs of the reconciler with one resolver."""

from __future__ import annotations

from collections.abc import Callable

from oncekey import OnceKey, StillUnknown
from oncekey.core.verdicts import Verdict
from oncekey.upkeep import Inquiry, Reconciler
from tests.upkeep.key_store import OPERATION

QUARANTINE = 300.0
"""The policy's default."""


def resolve(once: OnceKey, resolver: Callable[[Inquiry], Verdict], **how: object) -> dict[str, int]:
    """One run with this resolver: what it did."""
    if OPERATION not in once.resolvers:
        once.resolve_with(OPERATION, resolver)
    reconciler = Reconciler(once, **how)  # type: ignore[arg-type]
    try:
        return {name: number for name, number in reconciler.run().as_json().items() if number}
    finally:
        reconciler.close()


def remembering(seen: list[Inquiry]) -> Callable[[Inquiry], Verdict]:
    def resolver(inquiry: Inquiry) -> Verdict:
        seen.append(inquiry)
        return StillUnknown()

    return resolver
