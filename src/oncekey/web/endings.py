"""How an attempt ends: from what the app answered, or raised, to the owner's move and the answer that the client gets.

``core/judgment.py`` judges what becomes of the key, and ``core/situations.py`` what the client is told;
``core/problems.py`` has the texts. ``exchange.py`` does what these functions return.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from oncekey.core import situations
from oncekey.core.decision import Deferred, Replay, Unknown, decide
from oncekey.core.judgment import Judgment, Move, judge, reason_for
from oncekey.core.problems import TAKEN_OVER, Answer, Situation
from oncekey.core.record import Reservation
from oncekey.core.states import Effects, Event
from oncekey.engine.flows import Finished
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import Refused
from oncekey.web import unknown_outcomes
from oncekey.web.responses import UNAVAILABLE_RETRY_SECONDS, answer_headers, answer_to, refusal, storable, unknown

_log = logging.getLogger("oncekey")

_WITH_RESPONSE = frozenset({Event.COMPLETE, Event.FAIL})

_NOTICES = {
    "answered before the endpoint": (
        "%s was answered with a success before its endpoint was entered, by middleware or a dependency. The answer is "
        "stored and will be replayed. If it is not the operation's answer, let that middleware run outside of oncekey"
    ),
    "not wrapped": (
        "%s was answered by an app whose endpoints oncekey cannot see. A 4xx counts as its final answer, a 5xx as an "
        "unknown outcome. Protect the app itself with its framework's protect(), or accept this"
    ),
}

_ANSWERED_FOR_EXCEPTION = (
    "%s: its {work} raised %s, and middleware or an error handler answered %s in its place. A success after an "
    "exception is not stored, so the client got an error of oncekey instead, and a retry runs again. Let that code "
    "answer with a 4xx or 5xx. This is said once per {unit}"
)
_NOT_AWAITED = (
    "%s: op.%s(…) was not awaited, so it did not happen, and the response is not stored: write "
    "`await op.%s(…)`, or op.blocking.%s(…) in a plain function"
)


def answered(
    operation: Operation, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | None, once: OnceKey
) -> tuple[Move, Answer | None]:
    """The move for a complete response, and oncekey's answer if the client must not get that response.

    ``body`` None: it was streamed to the client, and the key becomes a tombstone.
    """
    error = operation.evidence.error
    replaces = error is not None and status == 500  # the framework's page for an exception of ours, unknown to it
    if replaces and isinstance(error, Refused) and operation.begun:
        return _refused_late(operation, error, once)
    judgment = _judged(operation, status)
    event = judgment.event
    # An exception that became a 4xx commits nothing, so a verb that was not awaited does not matter.
    if operation.unawaited and judgment.commits and (verbs := _not_awaited(operation)):
        event = _judged(operation, None).event  # as a response that broke off
        return Move(event, None, f"op.{verbs[0]} was not awaited"), in_place_of(event, operation, once)
    if event not in _WITH_RESPONSE:
        instead = in_place_of(event, operation, once) if judgment.ours else None
        if judgment.ours and event is Event.RELEASE and operation.evidence.raised and operation.engine is not None:
            said = operation.evidence.raised_name, str(status)
            operation.engine.tell_once(operation.name, _ANSWERED_FOR_EXCEPTION, *said)
        if replaces or (status == 500 and operation.evidence.raised):
            instead = _told(operation, error, event, once) or instead
        return Move(event, None, _held_too_long(operation) or reason_for(operation.evidence, status)), instead
    response = storable(status, headers, body, operation.policy)
    reason = None
    if response.body is None:
        reason = "streamed" if body is None else "too large"
    if operation.deferred:
        if event is Event.COMPLETE:
            event = Event.DEFER
        else:
            operation.commits = False  # an error response does not defer the request, so its writes are rolled back
    return Move(event, response, reason), None


def raised(operation: Operation, error: BaseException, once: OnceKey) -> tuple[Move, Answer | None]:
    """The move for an app that raised, or that returned without a whole response; and oncekey's answer, if the
    exception is one of oncekey's."""
    operation.evidence.heard(error)
    operation.evidence.broke_off = True
    speaks = operation.evidence.speaks(error)
    if speaks and isinstance(error, Refused) and operation.begun:
        return _refused_late(operation, error, once)
    event = _judged(operation, None).event
    reason = _held_too_long(operation) or operation.evidence.raised_name
    return Move(event, None, reason), _told(operation, error if speaks else None, event, once)


def answer_instead(finished: Finished, operation: Operation, wanted: Reservation, once: OnceKey) -> Answer:
    """The answer to a request whose handler ran and whose response was not stored."""
    if finished.undone:
        situation = situations.not_finished(_all_in_one_transaction(operation), _nothing_before(operation))
        return refusal(once, situation, retry_after=UNAVAILABLE_RETRY_SECONDS)
    decision = decide(finished.record, wanted)
    if isinstance(decision, Replay | Unknown | Deferred):
        return answer_to(decision, operation.policy, once)  # as a retry would
    situation = situations.after_lost_key(decision)
    detail = TAKEN_OVER if situation is Situation.IN_FLIGHT else None
    return refusal(once, situation, detail=detail, retry_after=operation.policy.retry_after.total_seconds())


def _judged(operation: Operation, status: int | None) -> Judgment:
    judgment = judge(
        operation.evidence,
        status,
        operation.policy,
        word=operation.word,
        first_attempt=operation.attempt == 1,
        begun=operation.begun,
        open_effect=operation.record.effects is not operation.policy.effects_kind and operation.has_open_effect,
    )
    operation.commits = judgment.commits
    if operation.policy.effects_kind is Effects.PHASED:
        operation.judged_effects = operation.record.effects
    engine = operation.engine
    if engine is not None and judgment.notice is not None:
        engine.tell_once(operation.name, _NOTICES[judgment.notice])
    error, operation.evidence.cause = operation.evidence.cause, None
    if engine is not None and judgment.event is Event.DOUBT and not operation.lost:  # a lost key is not this attempt's
        unknown_outcomes.tell(engine, operation, status, error)
    return judgment


def _not_awaited(operation: Operation) -> list[str]:
    """The verbs that were called and never started; the log names each. They cannot start any more."""
    verbs = operation.close_unawaited()
    for verb in dict.fromkeys(verbs):
        _log.error(_NOT_AWAITED, operation.name, verb, verb, verb)
    return verbs


def _refused_late(operation: Operation, error: Refused, once: OnceKey) -> tuple[Move, Answer]:
    """The operation has begun, so this refusal is its answer, like any other 4xx."""
    answer = refusal(once, Situation.REFUSED_LATE, detail=error.detail, status=error.status)
    move, _ = answered(operation, answer.status, answer_headers(answer, None, None), answer.body, once)
    return move, unknown(once, operation.key) if move.event is Event.DOUBT else answer


def in_place_of(event: Event, operation: Operation, once: OnceKey) -> Answer:
    """The answer in place of a success that is not stored."""
    situation = situations.in_place_of_success(event)
    return unknown(once, operation.key) if situation is Situation.UNKNOWN else refusal(once, situation)


def _held_too_long(operation: Operation) -> str:
    """Why oncekey ended the enlisted transaction, if it did. That also caused what the handler raised afterwards."""
    return operation.enlisted.held_too_long if operation.enlisted is not None else ""


def _told(operation: Operation, error: BaseException | None, event: Event, once: OnceKey) -> Answer | None:
    """oncekey's answer to one of its own exceptions; None: the framework answers."""
    situation = situations.after_error(
        error,
        event,
        rolled_back=_all_in_one_transaction(operation),
        nothing_before=_nothing_before(operation),
        held_too_long=bool(_held_too_long(operation)),
    )
    if situation is None:
        return None
    if situation is Situation.UNKNOWN:
        return unknown(once, operation.key)
    if isinstance(error, Refused):
        return refusal(once, situation, detail=error.detail, status=error.status)
    return refusal(once, situation, retry_after=UNAVAILABLE_RETRY_SECONDS)


def _nothing_before(operation: Operation) -> bool:
    return operation.attempt == 1 and operation.steps is None


def _all_in_one_transaction(operation: Operation) -> bool:
    return operation.policy.effects_kind is Effects.TRANSACTIONAL
