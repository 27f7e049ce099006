"""What the client is told about an attempt that stored no response. Pure; ``problems.py`` has the texts.

An answer claims only what is certain: "not executed" only if nothing happened in this attempt, and nothing before it.
"""

from __future__ import annotations

from oncekey.core.decision import Busy, Decision
from oncekey.core.evidence import SPEAKING_ERRORS
from oncekey.core.problems import Situation
from oncekey.core.states import Event
from oncekey.errors import LeaseLost, NotExecuted, Refused


def in_place_of_success(event: Event) -> Situation:
    """The app's response is a success that is not stored."""
    return Situation.UNKNOWN if event is Event.DOUBT else Situation.FAILED


def after_error(
    error: BaseException | None, event: Event, *, rolled_back: bool, nothing_before: bool, held_too_long: bool
) -> Situation | None:
    """The handler raised ``error``, and the key moved by ``event``. None: the framework answers.

    ``rolled_back``: every effect of the route is in one transaction, which is rolled back with this move.
    ``nothing_before``: no earlier attempt and no step. ``held_too_long``: oncekey ended the transaction, which caused
    what the handler raised.
    """
    if not isinstance(error, SPEAKING_ERRORS):
        if event is Event.RELEASE and held_too_long:
            return not_finished(rolled_back, nothing_before)
        return None
    if event is Event.DOUBT:
        return Situation.UNKNOWN
    if isinstance(error, Refused):
        return Situation.REFUSED if event is Event.DISCARD else Situation.REFUSED_LATE
    by_its_word = isinstance(error, NotExecuted) and not isinstance(error, LeaseLost)
    return not_finished(by_its_word or rolled_back, nothing_before)


def not_finished(nothing_happened: bool, nothing_before: bool) -> Situation:
    """``nothing_happened`` is about this attempt. An earlier attempt, or an earlier step, may have done something."""
    return Situation.NOT_EXECUTED if nothing_happened and nothing_before else Situation.NOT_FINISHED


def after_lost_key(decision: Decision) -> Situation:
    """The handler ran, and its response was not stored, because another attempt has the key or had it."""
    taken_over = isinstance(decision, Busy) and decision.record is not None
    return Situation.IN_FLIGHT if taken_over else Situation.NOT_STORED
