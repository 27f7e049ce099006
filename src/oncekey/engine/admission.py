"""Whether a key that is not known may be reserved: what ``Engine.begin`` asks before it writes.

Requests with a known key are never asked about: they get the stored answer at any age, and count for no limit.
"""

from __future__ import annotations

from oncekey.core.decision import TurnedAway
from oncekey.core.policy import Policy
from oncekey.core.problem_texts import Situation
from oncekey.engine.flows import Flow
from oncekey.engine.limiter import Counts, Limiter
from oncekey.errors import OperatorError
from oncekey.limits import RatesDown

CAP_RETRY_SECONDS = 60.0
"""A tenant that has all its keys gets a new one when an old one expires, which takes long."""


class Admission:
    """The admission of one request."""

    def __init__(self, policy: Policy, limiter: Limiter, tenant: str, refused: TurnedAway | None = None) -> None:
        self._policy = policy
        self._limiter = limiter
        self._tenant = tenant
        self._refused = refused
        """The request itself cannot have a new key."""
        self._places: list[Counts] = []

    def of_new_key(self) -> Flow[TurnedAway | None]:
        """None: reserve the key, inside of ``with admission``."""
        refused = self._refused or (yield from self._limited())
        if refused is not None:
            self.__exit__()
        return refused

    def _limited(self) -> Flow[TurnedAway | None]:
        limiter, rate = self._limiter, self._policy.rate
        if rate is not None:
            counts = limiter.store_counts(rate)
            if counts is not None:
                if not (yield from self._take(counts)):
                    return _limited(rate.seconds / rate.amount)
            else:
                try:
                    wait: float | None = yield from limiter.hit(rate, self._tenant)
                except RatesDown:
                    return TurnedAway(Situation.STORE_UNAVAILABLE)
                if wait is not None:
                    return _limited(wait)
        # A sender of webhooks is no tenant that could be hostile: its signature holds.
        if limiter.caps is not None and self._policy.sender is None and not (yield from self._take(limiter.caps)):
            return _limited(CAP_RETRY_SECONDS)
        return None

    def _take(self, counts: Counts) -> Flow[bool]:
        try:
            taken: bool = yield from counts.take(self._tenant)
        except OperatorError as error:
            if not self._limiter.not_counted(error):
                raise
            return True
        if taken:
            self._places.append(counts)
        return taken

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for counts in self._places:
            counts.taken(self._tenant)
        self._places.clear()


def _limited(seconds: float) -> TurnedAway:
    return TurnedAway(Situation.LIMITED, retry_after=seconds)
