"""The steps of a phased request: what is remembered of each, so that a later attempt does not do it again.

A **phase** is local work: its row is written in the transaction that did the work, so it is ``done`` or there is no
row. An **effect** is one call outside of the database: its row is ``intended`` before the call and ``done`` after it.
After a crash, an effect that is only ``intended`` may have happened; ``engine/steps.py`` decides what follows.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any

import orjson

from oncekey.core.values import value
from oncekey.errors import StepError

MAX_RESULT_BYTES = 64 * 1024
"""A remembered result is what later steps need (an id, an amount), not a document."""
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

    def written_over(self, old: Step | None) -> Step:
        """The row after this step is written over ``old``: a kind stays, and a provider's id is not forgotten."""
        if old is None:
            return self
        return replace(self, kind=old.kind, provider_id=self.provider_id or old.provider_id)

    def carries(self, downstream_key: str | None, provider_id: str | None) -> bool:
        """Whether the step has this downstream key or this provider's id."""
        return (downstream_key is not None and self.downstream_key == downstream_key) or (
            provider_id is not None and self.provider_id == provider_id
        )

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


def remembered_result(name: str, result: Any) -> bytes:
    """A step's result as it is stored; StepError if it cannot be stored."""
    try:
        kept = orjson.dumps(result)
    except TypeError as error:
        raise StepError(f"the result of step '{name}' is not JSON: return what JSON can hold ({error})") from error
    if len(kept) > MAX_RESULT_BYTES:
        raise StepError(
            f"the result of step '{name}' has {len(kept)} bytes, more than the {MAX_RESULT_BYTES} that are remembered: "
            "return an id, and keep the rest in a table of your own"
        )
    return kept


def checked_provider_id(name: str, taken: object) -> str | None:
    """The provider's id of a step; StepError if a webhook could not use it."""
    if taken is None or (isinstance(taken, str) and taken and taken.isprintable()):
        return taken
    raise StepError(f"provider_id of step '{name}' must be printable text, and at least one letter")
