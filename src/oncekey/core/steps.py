"""The steps of a phased request: what is remembered of each, so that a later attempt does not do it again.

A **phase** is local work: its row is written in the transaction that did the work, so it is ``done`` or there is no
row. An **effect** is one call outside of the database: its row is ``intended`` before the call and ``done`` after it.
After a crash, an effect that is only ``intended`` may have happened; ``engine/steps.py`` decides what follows.
"""

from __future__ import annotations

from enum import StrEnum

from oncekey.core.values import value

STARTED = "started"
"""The recovery point of a record whose first step is intended and not done."""
REQUEST = "oncekey:request"
"""The name under which the request itself is kept among the steps (``core/kept_request.py``). It is no step."""


class StepKind(StrEnum):
    PHASE = "phase"
    EFFECT = "effect"


class StepState(StrEnum):
    INTENDED = "intended"
    DONE = "done"


@value
class Step:
    """One row of ``idempotency_steps``, without the key that it belongs to."""

    name: str
    kind: StepKind
    state: StepState
    repeatable: bool
    result: bytes | None = None
    """JSON; None while it is only intended."""
    downstream_key: str | None = None
    provider_id: str | None = None
    """The provider's id of the effect, so that a webhook can find the key."""

    @property
    def is_request(self) -> bool:
        """It is the kept request, and no step of the app."""
        return self.name == REQUEST


@value
class StepsOf:
    """Ask a store for the steps of one key."""

    scope: str
    key: str


@value
class Find:
    """Ask a store which keys have a step or a job that carries one of these."""

    downstream_key: str | None = None
    provider_id: str | None = None

    @property
    def scope(self) -> str:
        """With ``key``, its place in a batch."""
        return self.downstream_key or ""

    @property
    def key(self) -> str:
        return self.provider_id or ""
