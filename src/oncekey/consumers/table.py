"""What a consumer tells its broker about one delivery: one literal table.

A broker delivers a message at least once. Each delivery ends in one ``Situation``; ``TABLE`` says by which ``Action``
the consumer answers the broker. The adapters do what the table says and decide nothing themselves.

Two rules stand behind the rows. A message is acknowledged only if its outcome is in the store. And no row runs a
message again whose outcome is not known: the handler runs only if the store reserved the message's key for this very
delivery.
"""

from __future__ import annotations

import time
from typing import Final, Literal

from oncekey.core.values import Word, value

OnUnknown = Literal["park", "keep"]
"""What becomes of a message whose outcome is unknown: it is parked beside the dead letters, or the broker keeps it and
delivers it again later. In both cases it does not run."""


class Situation(Word):
    """How one delivery ended."""

    # The handler ran.
    HANDLED = "handled"
    DEFERRED = "deferred"
    REFUSED = "refused"
    FAILED = "failed"
    EXHAUSTED = "exhausted"
    NOT_STORED = "not_stored"
    # It may have run, now or before.
    UNKNOWN = "unknown"
    # The handler did not run.
    DUPLICATE = "duplicate"
    GIVEN_UP = "given_up"
    IN_FLIGHT = "in_flight"
    OTHER_BODY = "other_body"
    NOT_COMPARABLE = "not_comparable"
    ANSWER_LOST = "answer_lost"
    BAD_ID = "bad_id"
    TOO_LARGE = "too_large"
    NO_STORE = "no_store"


class Action(Word):
    """What the consumer does with the message at the broker."""

    ACK = "ack"
    """It is done with: the broker forgets it."""
    RETRY = "retry"
    """The broker keeps it, and delivers it again after a delay."""
    PARK = "park"
    """Copied to the parking place, then acknowledged. Move it back when its key is settled."""
    DEAD_LETTER = "dead_letter"
    """Copied to the dead letters, then acknowledged. A person must look at it."""


Delay = Literal["none", "short", "growing", "long"]


@value
class Row:
    """What one situation means, for each setting of ``unknown``."""

    park: Action
    keep: Action
    delay: Delay
    reason: str
    """For the log, and for the header ``oncekey-reason`` of a copy. It contains no id and no body."""

    def action(self, unknown: OnUnknown) -> Action:
        return self.park if unknown == "park" else self.keep


_ACK, _RETRY, _PARK, _DEAD = Action

# fmt: off
TABLE: Final[dict[Situation, Row]] = {
    #                                unknown="park", "keep",  delay
    Situation.HANDLED:       Row(_ACK,   _ACK,   "none",    "it was handled"),
    Situation.DUPLICATE:     Row(_ACK,   _ACK,   "none",    "an earlier delivery was handled"),
    Situation.DEFERRED:      Row(_ACK,   _ACK,   "none",    "its job is in the outbox, which finishes it"),
    Situation.FAILED:        Row(_RETRY, _RETRY, "growing", "the handler failed, and what it did is undone, remembered "
                                                            "or harmless to repeat"),
    Situation.NOT_STORED:    Row(_RETRY, _RETRY, "short",   "the handler ended, and its outcome is not in the store "
                                                            "yet: the next delivery looks again"),
    Situation.IN_FLIGHT:     Row(_RETRY, _RETRY, "short",   "another delivery of it is being handled"),
    Situation.NO_STORE:      Row(_RETRY, _RETRY, "short",   "its key could not be looked up in the store, so it "
                                                            "was not run"),
    Situation.NOT_COMPARABLE: Row(_RETRY, _RETRY, "long",   "a newer version of oncekey wrote its key, or the keyring "
                                                            "lacks a key: the log says which"),
    Situation.UNKNOWN:       Row(_PARK,  _RETRY, "long",    "it may have been handled: it does not run again until "
                                                            "its key is settled (a resolver, or oncekey keys resolve)"),
    Situation.REFUSED:       Row(_DEAD,  _DEAD,  "none",    "the handler refused it before it did anything"),
    Situation.EXHAUSTED:     Row(_DEAD,  _DEAD,  "none",    "the handler failed at every attempt that it may have"),
    Situation.GIVEN_UP:      Row(_DEAD,  _DEAD,  "none",    "it failed for good at an earlier delivery"),
    Situation.OTHER_BODY:    Row(_DEAD,  _DEAD,  "none",    "a message with the same id and another body came before: "
                                                            "give each message an id of its own"),
    Situation.ANSWER_LOST:   Row(_DEAD,  _DEAD,  "none",    "a message with this id was handled or refused, and the "
                                                            "encryption key is lost that could tell whether it was "
                                                            "this one"),
    Situation.BAD_ID:        Row(_DEAD,  _DEAD,  "none",    "it has no id by which oncekey could recognise it"),
    Situation.TOO_LARGE:     Row(_DEAD,  _DEAD,  "none",    "its body is larger than Policy(max_request_bytes=…)"),
}
# fmt: on

SHORT_SECONDS: Final = 1.0
LONG_SECONDS: Final = 60.0

HELD: Final = frozenset({Situation.NO_STORE, Situation.NOT_STORED, Situation.IN_FLIGHT})
"""In these situations an adapter keeps the message and asks the store again itself. Giving the message back would count
as a delivery, and a broker with a limit of deliveries drops a message that has used them up: an outage of the store
would lose it."""
HOLD_SECONDS: Final = 600.0
"""For how long an adapter keeps such a message before it gives it back. RabbitMQ closes the channel of a consumer that
does not acknowledge a message for 30 minutes."""
LONGEST_PAUSE: Final = 10.0
"""The pauses between two questions to the store double up to this."""


def delay_seconds(delay: Delay, attempt: int, short: float = SHORT_SECONDS) -> float:
    """After how many seconds a message is delivered again. ``attempt``: how often it was run; ``short``: the policy's
    ``retry_after``."""
    if delay == "none":
        return 0.0
    if delay == "long":
        return LONG_SECONDS
    grown: float = short * 2 ** min(max(attempt - 1, 0), 16) if delay == "growing" else short
    return min(grown, LONG_SECONDS)


@value
class Outcome:
    """How one delivery ended, and what the consumer does with the message at the broker."""

    situation: Situation
    action: Action
    delay: float = 0.0
    """With RETRY: after how many seconds the broker should deliver it again."""
    detail: str = ""
    """More than the table's reason, if there is more."""

    @property
    def reason(self) -> str:
        return self.detail or TABLE[self.situation].reason


class Hold:
    """One message that is kept, from its first delivery to the answer for the broker."""

    def __init__(self) -> None:
        self._until = time.monotonic() + HOLD_SECONDS
        self._asked = 0

    def pause(self, ended: Outcome) -> float | None:
        """After how many seconds the store is asked again. None: the broker gets its answer now."""
        if ended.situation not in HELD or time.monotonic() >= self._until:
            return None
        self._asked += 1
        grown: float = ended.delay * 2 ** min(self._asked - 1, 16)
        return max(ended.delay, min(grown, LONGEST_PAUSE))


def at_the_limit(ended: Outcome, limit: str) -> Outcome:
    """In place of a retry, if the broker does not deliver the message again. ``limit``: the broker's setting."""
    action = _PARK if ended.situation is Situation.UNKNOWN else _DEAD
    return Outcome(ended.situation, action, 0.0, f"{ended.reason}. The broker delivers it no more ({limit})")


def outcome(
    situation: Situation,
    unknown: OnUnknown,
    *,
    attempt: int = 1,
    short: float = SHORT_SECONDS,
    detail: str = "",
) -> Outcome:
    row = TABLE[situation]
    action = row.action(unknown)
    return Outcome(situation, action, delay_seconds(row.delay, attempt, short) if action is _RETRY else 0.0, detail)
