"""Whether a key that is not known may be reserved: what ``Engine.begin`` asks before it writes.

Requests with a known key are never asked about: they get the stored answer at any age, and count for no limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oncekey.core.decision import TurnedAway, free_for_a_new_request
from oncekey.core.policy import Policy
from oncekey.core.problem_texts import Situation
from oncekey.core.record import Found, Record, Reservation
from oncekey.engine.arrivals import Arrival
from oncekey.engine.flows import Flow, Pause
from oncekey.engine.limiter import Counts, Limiter
from oncekey.errors import OperatorError
from oncekey.limits import RatesDown

ASKING_SECONDS = 0.005
"""How long a request waits before it looks again whether another one of its key has been counted."""


class Admission:
    """The admission of one request."""

    def __init__(self, policy: Policy, limiter: Limiter, tenant: str, refused: TurnedAway | None = None) -> None:
        self._policy = policy
        self._limiter = limiter
        self._tenant = tenant
        self._refused = refused
        """The request itself cannot have a new key: it is too old, or its key is refused."""
        self._places: list[Counts] = []
        self.over = False
        """The store has answered the reservation: nothing is asked again."""
        self._is_counted = False
        """This request was counted for its key; False: another one was."""
        self._made: bool | None = None
        """Whether this request made the row; None: the store has not said so."""

    def first_answer(self, wanted: Reservation) -> Flow[Found | TurnedAway]:
        """Read the row, so that a refusal writes nothing; reserve the key if it is new and may be taken."""
        with self._arriving(wanted) as arrival:
            seen: Record | None = yield (wanted.scope, wanted.key)
            if seen is not None and not free_for_a_new_request(seen):
                return Found(seen)
            if (refused := (yield from self._of_new_key(wanted, arrival))) is not None:
                return refused
            found: Found = yield wanted
            self.over = True
            self._made = found.record is not None and found.record.owner == wanted.owner
            if self._made and not self._is_counted:
                self._limiter.arrivals.used_again(arrival)
            return found

    @contextmanager
    def _arriving(self, wanted: Reservation) -> Iterator[Arrival]:
        """From before the row is read until the store has answered the reservation, or will not."""
        at, arrivals = (wanted.scope, wanted.key), self._limiter.arrivals
        arrival = arrivals.enter(at)
        try:
            yield arrival
        finally:
            for counts in self._places:
                counts.taken(self._tenant, made=self._made is not False)
            self._places.clear()
            arrivals.leave(at, arrival)

    def _of_new_key(self, wanted: Reservation, arrival: Arrival) -> Flow[TurnedAway | None]:
        """None: the key may be reserved."""
        if self._refused is not None:
            return self._refused
        arrivals = self._limiter.arrivals
        while not arrivals.may_ask(arrival):
            if arrival.counted:
                return None
            yield Pause((wanted.scope, wanted.key), ASKING_SECONDS)
        refused: TurnedAway | None = None
        try:
            refused = yield from self._limited()
            self._is_counted = refused is None
        finally:
            arrivals.answered(arrival, counted=self._is_counted)
        if refused is not None:
            self._made = False
        return refused

    def _limited(self) -> Flow[TurnedAway | None]:
        limiter, rate = self._limiter, self._policy.rate
        if rate is not None:
            counts = limiter.store_counts(rate)
            if counts is not None:
                if (full := (yield from self._take(counts, limiter.rate_not_counted))) is not None:
                    return _limited(full)
            else:
                try:
                    wait: float | None = yield from limiter.hit(rate, self._tenant)
                except RatesDown:
                    return TurnedAway(Situation.STORE_UNAVAILABLE)
                if wait is not None:
                    return _limited(wait)
        # A sender of webhooks is no tenant that could be hostile: its signature holds.
        if limiter.caps is None or self._policy.sender is not None:
            return None
        full = yield from self._take(limiter.caps, limiter.cap_not_counted)
        return None if full is None else _limited(full)

    def _take(self, counts: Counts, not_counted: Callable[[OperatorError], bool]) -> Flow[float | None]:
        """None: the key is taken. Otherwise the seconds to wait. ``not_counted``: whether the key is taken although the
        store could not count."""
        try:
            full: float | None = yield from counts.take(self._tenant)
        except OperatorError as error:
            if not not_counted(error):
                raise
            return None
        if full is None:
            self._places.append(counts)
        return full


def _limited(seconds: float) -> TurnedAway:
    return TurnedAway(Situation.LIMITED, retry_after=seconds)
