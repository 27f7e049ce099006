"""Verdicts about an unknown outcome, from a resolver, a webhook or an operator, and what became of them.

Owns the values that resolvers return and webhooks pass. Pure: ``engine/settlement.py`` applies a verdict,
``upkeep/reconciler.py`` asks the resolvers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any

import orjson

from oncekey.core.by_operation import ByOperation
from oncekey.core.doubts import in_doubt
from oncekey.core.downstream import downstream_key
from oncekey.core.kept_request import request_in
from oncekey.core.record import Record, StoredResponse
from oncekey.core.responses import NOTHING, written
from oncekey.core.sealed import readable, shown
from oncekey.core.steps import Step, checked_provider_id, remembered_result
from oncekey.core.values import value
from oncekey.errors import ConfigurationError, StepError


class Confirmed:
    """It happened, and this is its response: the key is completed, and every retry gets it.

    Also for an operation that ended with an error: a declined payment is ``Confirmed(402, {...})``. Later phases
    are skipped, so a phased request that has steps needs ``final=True``, as after a declined payment.
    :class:`Happened` lets the request go on instead.
    """

    __slots__ = ("final", "reason", "response")

    def __init__(
        self,
        status: int,
        json: Any = NOTHING,
        *,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str = "",
        final: bool = False,
    ) -> None:
        self.final = final
        self.response: StoredResponse = written("Confirmed", status, json, body, headers)
        self.reason = reason or f"confirmed with status {status}"


@value
class Refuted:
    """It is certain that it did not happen, **and never will**: the key may be retried.

    Accepted only when the route's ``Policy(quarantine=…)`` is over: before that, what was sent may still be on its way.
    For a phased request it means that no effect in doubt has happened; steps that are done stay done.
    """

    reason: str


class Happened:
    """An effect of a phased request happened, and ``result`` is what its function would have returned. The next attempt
    gets it from ``op.effect``, and continues after it.

    ``effect`` is its name. None: the only effect in doubt, or the one to which a webhook's ``downstream_key`` or
    ``provider_id`` belongs. If the effect is done and none is in doubt (the key expired half done), the effect
    keeps its own result, and the request goes on.
    """

    __slots__ = ("effect", "provider_id", "reason", "result")

    def __init__(
        self, result: Any, effect: str | None = None, *, provider_id: str | None = None, reason: str = ""
    ) -> None:
        try:
            self.result: bytes = remembered_result(effect or "…", result)
            self.provider_id = checked_provider_id(effect or "…", provider_id)
        except StepError as error:
            raise ConfigurationError(f"Happened(…): {error}") from error
        self.effect = effect
        self.reason = reason or "it happened"


@value
class NotHappened:
    """It is certain that an effect of a phased request did not happen, **and never will**: the next attempt calls it.

    Accepted only when the quarantine is over, as :class:`Refuted` is. ``effect`` as in :class:`Happened`.
    """

    reason: str
    effect: str | None = None


@value
class StillUnknown:
    """The provider does not know yet: the reconciler asks again later."""

    reason: str = "not known yet"


Verdict = Confirmed | Refuted | Happened | NotHappened | StillUnknown
VERDICTS = (Confirmed, Refuted, Happened, NotHappened, StillUnknown)


class Outcome(StrEnum):
    """What became of a verdict."""

    SETTLED = "settled"  # this verdict moved the key
    PARTLY = "partly"  # this verdict settled one effect; other effects are in doubt, so the key stays unknown
    ALREADY = "already"  # an earlier verdict, or the owner, settled it: the key is final, or agrees with this verdict
    CONTRADICTED = "contradicted"  # what is stored says the opposite: nothing was changed, and the log has a WARNING
    OPEN = "open"  # the key is not unknown: its owner, its job or a retry will settle it
    TOO_EARLY = "too_early"  # refuted before the quarantine was over: say it again after ``retry_in`` seconds
    UNDECIDED = "undecided"  # the verdict was StillUnknown
    REFUSED = "refused"  # the verdict does not fit the key: nothing was changed, and ``reason`` says why
    NOT_FOUND = "not_found"  # no such key, or it has expired
    AMBIGUOUS = "ambiguous"  # several keys have this id: nothing was changed


@value
class Settlement:
    """The answer to a verdict. After every outcome it is safe to give the same verdict again."""

    outcome: Outcome
    record: Record | None = None
    retry_in: float | None = None
    """Seconds after which the same verdict can succeed; None: it cannot, or the time is not known."""
    reason: str | None = None
    """Why the verdict was refused or contradicted, or which effects are still in doubt."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: acknowledge the webhook. Otherwise let the provider deliver it again."""
        return self.outcome in (Outcome.SETTLED, Outcome.PARTLY, Outcome.ALREADY, Outcome.CONTRADICTED)


class Inquiry:
    """What a resolver is asked about: one key whose outcome is unknown. To read, not to change."""

    __slots__ = ("_record", "request", "steps")

    def __init__(self, record: Record, steps: tuple[Step, ...]) -> None:
        self._record = record
        self.steps = tuple(step for step in steps if not step.is_request)
        """The steps of a phased request, in the order in which they were first written."""
        self.request = request_in(steps)
        """The request, if its route has ``Policy(keep_request=True)``; otherwise None."""

    @property
    def scope(self) -> str:
        return self._record.scope

    @property
    def key(self) -> str:
        return self._record.key

    @property
    def operation(self) -> str:
        return self._record.operation

    @property
    def attempt(self) -> int:
        return self._record.attempt

    @property
    def recovery_point(self) -> str | None:
        """The last step that is done."""
        return self._record.recovery_point

    @property
    def last_error(self) -> str | None:
        """What the last resolver said, then why the outcome is unknown."""
        error = self._record.last_error
        return None if error is None else shown(error)

    @property
    def created_at(self) -> float:
        """Seconds since the epoch, on the store's clock."""
        return self._record.created_at

    @property
    def age(self) -> float:
        """How many seconds ago the key was created, on the store's clock."""
        return max(0.0, self._record.now - self._record.created_at)

    @property
    def tries(self) -> int:
        """How often a resolver was asked before."""
        return self._record.reconcile_tries

    @property
    def in_doubt(self) -> tuple[str, ...]:
        """The names of the effects that were called and did not say how they ended."""
        return tuple(step.name for step in in_doubt(self._record, self.steps))

    @property
    def provider_id(self) -> str | None:
        """The provider's id of the last step that has one."""
        return next((step.provider_id for step in reversed(self.steps) if step.provider_id), None)

    def downstream_key(self, name: str) -> str:
        """The key that the handler gave to the provider under this name (``Operation.downstream_key``)."""
        return downstream_key(self._record, name)

    def result(self, name: str) -> Any:
        """What the step of this name returned; None: it is not done."""
        found = next((step.result for step in self.steps if step.name == name), None)
        return None if found is None else orjson.loads(readable(found, f"the result of step '{name}'"))


Resolver = Callable[[Inquiry], Verdict | Awaitable[Verdict]]
"""Asks a provider. It may be sync or async. An exception counts as still unknown."""
Resolvers = ByOperation[Resolver]
