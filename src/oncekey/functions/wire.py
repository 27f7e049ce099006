"""What a remote caller is told: the situation of ``core/problem_texts.py`` for each exception of an attempt.

For servers that are not HTTP: ``grpc.py`` and ``mcp.py`` put it into their own form. The texts are those of HTTP
clients, so they speak neither of settings nor of commands.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from oncekey.core.personal_data import Personal
from oncekey.core.problem_texts import ENTRIES, Situation
from oncekey.core.states import Event
from oncekey.core.values import value
from oncekey.engine import personal_keys
from oncekey.engine.once import OnceKey
from oncekey.errors import (
    InProgress,
    KeyReused,
    NotAuthenticated,
    NotAuthorized,
    NotExecuted,
    OutcomeUnknown,
    PersonalKey,
    Refused,
    StoreError,
)
from oncekey.functions.attempt import Attempt
from oncekey.functions.refusals import AnswerLost, NotComparable, NotStored

_log = logging.getLogger("oncekey")
_T = TypeVar("_T")


@value
class Told:
    situation: Situation
    detail: str
    retry_after: float | None

    @property
    def type(self) -> str:
        """The type of the problem, as in HTTP."""
        return f"urn:oncekey:problem:{self.situation}"


def tell(situation: Situation, happened: str | None = None, retry_after: float | None = None) -> Told:
    entry = ENTRIES[situation]
    seconds = entry.retry_seconds if retry_after is None else retry_after
    return Told(situation, f"{happened or entry.happened} {entry.advice}", seconds)


def told(error: BaseException, attempt: Attempt | None) -> Told | None:
    """What the caller is told of an exception; None: it is not one of oncekey's, or it is about another key, of an
    operation that the handler called. Then the server answers it.

    ``attempt`` None: the key was not asked for yet.
    """
    if attempt is not None and not attempt.owns(error):
        return None
    match error:
        case NotAuthenticated():
            return tell(Situation.NOT_AUTHENTICATED, str(error) or None)
        case NotAuthorized():
            return tell(Situation.NOT_AUTHORIZED, str(error) or None)
        case NotStored():
            return tell(Situation.NOT_STORED)
        case InProgress():
            return tell(Situation.IN_FLIGHT, retry_after=error.retry_after)
        case KeyReused():
            return tell(Situation.MISMATCH)
        case PersonalKey():
            return tell(Situation.KEY_PERSONAL, personal_keys.why(Personal(error.kind)))
    if attempt is not None and attempt.runs and attempt.move is not None:
        return _of_the_body(error, attempt.move.event)
    match error:
        case AnswerLost():
            return tell(Situation.ANSWER_LOST)
        case OutcomeUnknown():
            return tell(Situation.UNKNOWN)
        case NotComparable():
            return tell(Situation.UNREADABLE)
        case StoreError():
            return tell(Situation.STORE_UNAVAILABLE)
    return None


def _of_the_body(error: BaseException, event: Event) -> Told | None:
    """The work itself raised it."""
    if not isinstance(error, NotExecuted | OutcomeUnknown | Refused | StoreError):
        return None
    if event is Event.DOUBT:
        return tell(Situation.UNKNOWN)
    if isinstance(error, Refused):
        return tell(Situation.REFUSED if event is Event.DISCARD else Situation.REFUSED_LATE, error.detail)
    return tell(Situation.NOT_EXECUTED if isinstance(error, NotExecuted) else Situation.NOT_FINISHED)


async def detached(once: OnceKey, work: Coroutine[Any, Any, _T]) -> _T:
    """Await the work in a task of its own. A server that cancels the call, because its client has left, does not cancel
    the work: the client comes back with the same key."""
    task = asyncio.get_running_loop().create_task(work)
    once.engine.tasks.add(task)  # type: ignore[arg-type]  # drain() waits for it
    task.add_done_callback(once.engine.tasks.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a handler failed after its client had left", exc_info=error)
