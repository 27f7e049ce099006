"""What becomes of a key when its handler has ended: one pure function, and the table that it implements.

``judge`` gets what was seen of the endpoint (``evidence.py``), the status that is about to be sent, and the policy. It
names the owner's move, and says whether the enlisted transaction is committed and whether the app's response is sent.

The columns are the route's ``effects``. ``phased`` is like ``repeatable``, and its steps are kept. "Final 4xx" is every
4xx except 408 (treated as 5xx) and ``Policy.retryable_statuses`` (425 and 429 by default).

======================================================  =============  ======================  ====================
what was seen                                           external       transactional           phased, repeatable
======================================================  =============  ======================  ====================
endpoint never entered, 3xx or 4xx, first attempt       discarded      discarded               discarded
the same on a later attempt                             released       released                released
never entered, 5xx or 408, after validation refused     discarded      discarded               discarded
the request (its error handler failed)
never entered, 5xx or 408 otherwise                     unknown        roll back, retryable    retryable
never entered, under 300 (middleware answers)           completed      commit, completed       completed
returned under 400                                      completed      commit, completed       completed
returned under 400; the response broke off, or          unknown        roll back, retryable    retryable
middleware sent 400 or more in its place
returned a final 4xx                                    failed         commit, failed          failed
raised, and it became a final 4xx                       failed         roll back, failed       failed
raised a 3xx of its own                                 completed      commit, completed       completed
raised, and an error handler answered under 400         unknown, ours  roll back, ours, retry  retryable, ours
retryable status, returned or raised by itself          retryable      roll back, retryable    retryable
5xx or 408 returned; an answer in the endpoint's        unknown        roll back, retryable    retryable
place; an exception that became 5xx
an effect that may not be repeated is intended and      (none)         (none)                  unknown; under 400:
not done                                                                                       completed, and told
not wrapped: under 400                                  completed      commit, completed       completed
not wrapped: final 4xx                                  failed         roll back, failed       failed
not wrapped: 5xx, 408, retryable statuses               as returned    roll back, retryable    retryable
======================================================  =============  ======================  ====================

"Ours" means that oncekey sends its own error instead of the app's success: a response under 400 is sent only if it is
stored together with its rows. The handler can say more:

* ``raise NotExecuted`` and ``op.not_executed()`` make every row "retryable", except a completed one;
* ``raise OutcomeUnknown`` makes it "unknown";
* ``raise Refused`` and ``op.refuse()`` select the first two rows, if the handler used no verb of the operation before.

An exception of a protected function that the handler called says none of this (``evidence.py``).

If the endpoint itself gives a 5xx or 408, ``Policy.on_server_error`` replaces the row; an HTTPException that the
endpoint raises counts as given by it. If middleware entered the endpoint more than once, the last call says nothing
about the earlier calls: without a success, the row is "an answer in the endpoint's place".
"""

from __future__ import annotations

from typing import Final, Literal

from oncekey.core.evidence import Evidence
from oncekey.core.policy import Policy
from oncekey.core.record import StoredResponse
from oncekey.core.states import Effects, Event
from oncekey.core.values import value

HandlerWord = Literal["refused", "not_executed", "outcome_unknown"]
"""What a handler declared itself, by an exception or a verb."""

Notice = Literal["answered before the endpoint", "not wrapped"]
"""What is logged for the developer, once per route."""


@value
class Judgment:
    event: Event
    commits: bool = False
    """The enlisted transaction is committed with the move; otherwise it is rolled back first."""
    ours: bool = False
    """The app's response is a success that is not stored: the client gets oncekey's error in its place."""
    notice: Notice | None = None


@value
class Move:
    """How an owner ends its attempt."""

    event: Event
    response: StoredResponse | None
    reason: str | None


_COMPLETE: Final = Judgment(Event.COMPLETE, commits=True)
_ANSWERED_BEFORE: Final = Judgment(Event.COMPLETE, commits=True, notice="answered before the endpoint")
_COMPLETE_UNWRAPPED: Final = Judgment(Event.COMPLETE, commits=True, notice="not wrapped")
_FAIL: Final = Judgment(Event.FAIL, commits=True)
_FAIL_ROLLED_BACK: Final = Judgment(Event.FAIL)
_RELEASE: Final = Judgment(Event.RELEASE)
_GIVEN_BACK: Final = Judgment(Event.RELEASE)  # not _RELEASE: the app's response, also under 400, is sent
_DOUBT: Final = Judgment(Event.DOUBT)
_DISCARD: Final = Judgment(Event.DISCARD)
_NO_SUCCESS: Final = (Event.DOUBT, Event.RELEASE, Event.FAIL)


def judge(
    seen: Evidence,
    status: int | None,
    policy: Policy,
    *,
    word: HandlerWord | None = None,
    first_attempt: bool = True,
    begun: bool = False,
    open_effect: bool = False,
) -> Judgment:
    """The owner's move for a handler that ended this way; see the table above.

    ``status``: of the response that is about to be sent; None: there is none, or its body broke off. ``begun``: the
    handler used a verb of the operation. ``open_effect``: an effect that may not be repeated is intended and not done.
    """
    if seen.returned is not None and seen.returned < 400 and status is not None and status < 400 and word is None:
        return _COMPLETE  # nearly all requests
    if seen.calls > 1 and word != "outcome_unknown":
        word = None  # the last call cannot know what the call before it did
    judgment = _said(word, status, first_attempt, begun) or _seen(seen, status, policy, first_attempt, begun)
    if word == "not_executed" or (word == "refused" and not begun and not open_effect):
        judgment = _RELEASE if judgment.event in (Event.DOUBT, Event.FAIL) else judgment
    elif open_effect and judgment.event is not Event.COMPLETE:
        judgment = _DOUBT
    if status is not None and status < 400 and (judgment is _DOUBT or judgment is _RELEASE):
        return Judgment(judgment.event, ours=True)
    return judgment


def _said(word: HandlerWord | None, status: int | None, first_attempt: bool, begun: bool) -> Judgment | None:
    """The judgment that follows from the handler's own word alone; None: the evidence decides too."""
    if word == "outcome_unknown":
        return _DOUBT
    if word == "refused" and not begun and (status is None or status >= 300):
        return _unused(first_attempt)
    return None


def _seen(seen: Evidence, status: int | None, policy: Policy, first_attempt: bool, begun: bool) -> Judgment:
    if not seen.calls:
        return _never_entered(seen, status, policy, first_attempt, begun)
    if seen.running or (seen.returned is None and not seen.raised):
        return undone(policy)  # an answer in the endpoint's place
    judgment = _returned(seen.returned, status, policy) if seen.returned is not None else _raised(seen, status, policy)
    if seen.calls > 1 and judgment.event is not Event.COMPLETE:
        return undone(policy)  # an earlier call of the same request may have had its effect
    return judgment


def _never_entered(seen: Evidence, status: int | None, policy: Policy, first_attempt: bool, begun: bool) -> Judgment:
    if not seen.covered:
        return _not_wrapped(status, policy)
    if begun:  # a dependency used a verb, so work has begun, although the endpoint was not entered
        return _raised(seen, status, policy) if status is None or status >= 400 else _ANSWERED_BEFORE
    if status is not None and status < 300:
        return _ANSWERED_BEFORE
    if seen.refused or (status is not None and status != 408 and status < 500):
        return _unused(first_attempt)
    return undone(policy)


def _unused(first_attempt: bool) -> Judgment:
    """A later attempt gives the key back as it was: a discard would erase the key's history."""
    return _DISCARD if first_attempt else _GIVEN_BACK


def _not_wrapped(status: int | None, policy: Policy) -> Judgment:
    if status is None:
        return undone(policy)
    if status < 400:
        return _COMPLETE_UNWRAPPED
    if _is_server_error(status):
        return _server_error(status, status, policy)
    return _client_error(status, policy, _FAIL_ROLLED_BACK)


def _returned(returned: int, status: int | None, policy: Policy) -> Judgment:
    if status is None:
        return undone(policy)
    if returned < 400:
        return _COMPLETE if status < 400 else undone(policy)
    if _is_server_error(returned):
        return _server_error(returned, status, policy)
    if _is_server_error(status):
        return undone(policy)  # middleware failed on the way out
    judgment = _client_error(returned, policy, _FAIL)
    return _COMPLETE if judgment is _FAIL and status < 400 else judgment


def _raised(seen: Evidence, status: int | None, policy: Policy) -> Judgment:
    own = seen.raised_status
    if status is None or _is_server_error(status):
        if own is not None and _is_server_error(own) and _says_more(own, policy):
            return _server_error(own, status, policy)
        return undone(policy)
    if status < 400:
        return _COMPLETE if own == status and status >= 300 else undone(policy)
    if status in policy.retryable_statuses and own != status:
        return undone(policy)  # only the endpoint itself can say "not processed"
    return _client_error(status, policy, _FAIL_ROLLED_BACK)


def _is_server_error(status: int) -> bool:
    """408 is one: a timeout says nothing about what was done before it."""
    return status >= 500 or status == 408


def _says_more(status: int, policy: Policy) -> bool:
    return policy.on_server_error != "auto" or status in policy.retryable_statuses


def _server_error(given: int, status: int | None, policy: Policy) -> Judgment:
    """A 5xx or 408 that the endpoint itself gave; ``status`` is what the client gets, and what is replayed."""
    if given in policy.retryable_statuses:
        return _RELEASE
    match policy.on_server_error:
        case "retry":
            return _RELEASE
        case "replay" if status is not None and status >= 400:
            return _FAIL_ROLLED_BACK
        case "unknown":
            return _DOUBT
        case _:
            return undone(policy)


def _client_error(status: int, policy: Policy, final: Judgment) -> Judgment:
    return _RELEASE if status in policy.retryable_statuses or not policy.final_client_errors else final


def undone(policy: Policy) -> Judgment:
    """The handler did not say what became of its effects. With ``external`` effects the outcome is unknown; all other
    effects are rolled back, resumable or harmless to repeat."""
    return _DOUBT if policy.effects_kind is Effects.EXTERNAL else _RELEASE


def reason_for(seen: Evidence, status: int) -> str:
    """The ``last_error`` of an attempt that stored no response; ``status``: of the response that is sent."""
    if seen.raised:
        return f"the handler raised {seen.raised_name}, answered with {status}"
    if seen.returned is not None and seen.returned != status:
        return f"the handler returned {seen.returned}, and {status} was sent in its place"
    return f"the handler answered {status}" if seen.returned is not None else f"answered {status} in its place"


def is_false_success(event: Event, judged: int | None, sent: int) -> bool:
    """Whether middleware changed a response after it was judged, to a success that the key does not have.

    ``judged``: the status that was judged; None: the handler raised. ``sent``: the status that would be sent.
    """
    return sent < 400 and sent != judged and event in _NO_SUCCESS
