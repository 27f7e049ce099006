"""Every error that oncekey raises, in one tree: its branches say who must act.

::

    OnceKeyError
    ├── ApplicationError        the developer of the app must act
    │   ├── CallFailed              a function or message whose key ended as failed: it will not run again
    │   ├── ConfigurationError      a policy, route or store URL that makes no sense
    │   ├── EnlistError             a session that cannot be enlisted, or that the handler ended itself
    │   ├── Dead                    raised BY a task: another attempt would not help, a human must look
    │   ├── InProgress              another call of the function with this key is running: call it again later
    │   ├── IllegalTransition       code asked for a move that core/states.py or core/jobs.py does not have
    │   ├── JobLost                 another worker has the job: the result of this attempt is not stored
    │   ├── KeyReused               a function was called with a key that belongs to other arguments
    │   ├── MessageNotRun           once.message: this delivery must not run; it says what to tell the broker
    │   ├── NoOperation             current() was called outside a protected request
    │   ├── NotAuthenticated        raised BY the app's scope function: the caller is not known (401)
    │   ├── NotAuthorized           raised BY the app's authorize function: the caller may not do this (403)
    │   ├── NotExecuted             raised BY a handler: nothing happened, a retry may run (503)
    │   │   └── LeaseLost               raised by enlist(): the key went to another attempt
    │   ├── OutcomeUnknown          raised BY a handler, or to the caller of a function: it may have happened (409)
    │   ├── PersonalKey             a function was called with a key that looks like personal data: nothing ran
    │   ├── Refused                 raised BY a handler: refused before the operation began (4xx)
    │   ├── ResultNotKept           a function ran, and its result cannot be given to a second caller
    │   └── StepError               a phase or effect that cannot be run or remembered as it is written
    ├── ClientError             oncekey.client: a request of ours to another API
    │   ├── IntentChanged           another request under an intent that already has one: not sent
    │   ├── IntentExpired           the server may have forgotten the key: not sent
    │   ├── JarError                the key jar is locked, full or damaged: not sent
    │   ├── OutcomeUnsettled        the server does not know whether the operation happened
    │   └── RedirectRefused         the server redirects to a place where the key must not go: not followed
    └── OperatorError           the operator of the service must act
        ├── KeyNotFound             an operator asked for a key or a job that does not exist
        ├── LedgerError             a ledger that cannot be read or compared: the message says where
        ├── MoveRefused             an operator's change that the key or job does not allow: it says why
        ├── SchemaError             tables missing, too old or too new: the message says what to run
        └── StoreError
            ├── StoreUnavailable    the store did not answer in time: the request gets a 503
            └── StoreOverloaded     the queue in front of the store is full: the request gets a 503

A mistake of a *client* of a protected API is never an exception of this tree: it is a decision (core/decision.py) or a
:class:`oncekey.core.header.BadKey`, and becomes a problem document (core/problems.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OnceKeyError(Exception):
    """The root: catch this to catch everything that oncekey raises on purpose."""


class ApplicationError(OnceKeyError):
    """The app's developer must act."""


class CallFailed(ApplicationError):
    """The key of a function or message has failed for good: it does not run again with this key.

    ``status`` and ``body`` are what the key was settled with: by a late ``Refused``, a job, a resolver or an operator.
    """

    def __init__(self, message: str, *, status: int = 500, body: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class ConfigurationError(ApplicationError, ValueError):
    """A setting makes no sense; the message names it and says what it takes."""


class Dead(ApplicationError):
    """Raise it in a task when another attempt would not help: the job becomes a dead letter, with this message."""


class EnlistError(ApplicationError):
    """A session or connection cannot be enlisted as it is, or the handler ended it; the message says what to change."""


class InProgress(ApplicationError):
    """Another call with the same key is running, here or in another process: call again after ``retry_after`` seconds
    with the same key."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class IllegalTransition(ApplicationError):
    """A move that the state table does not have. Always a bug, never a race."""


class JobLost(ApplicationError):
    """Another worker took over the job of this task: the result of this attempt will not be stored. Stop."""


class KeyReused(ApplicationError):
    """A function was called with a key that an earlier call with other arguments has used: nothing ran.

    Another piece of work needs a key of its own.
    """


class MessageNotRun(ApplicationError):
    """``once.message``: this delivery of a message was not run. ``outcome.action`` says what to tell the broker.

    Most often the message is a duplicate of one that was handled, and the broker gets an acknowledgement.
    """

    def __init__(self, reason: str, outcome: Any) -> None:
        super().__init__(reason)
        self.outcome = outcome
        """An :class:`oncekey.consumers.Outcome`."""


class NoOperation(ApplicationError, LookupError):
    """``current()`` was called where no protected request is running."""


class NotAuthenticated(ApplicationError):
    """Raise it in the scope function when the caller is not known: 401, before any key is looked up."""


class NotAuthorized(ApplicationError):
    """Raise it in ``OnceKey(authorize=…)`` when the caller may not use the operation: 403, and nothing is looked up."""


class NotExecuted(ApplicationError):
    """Raise it in a handler when it is certain that nothing happened: the key can be retried."""


class LeaseLost(NotExecuted):
    """Another attempt took over the key: what this attempt wrote in its transaction is rolled back.

    Do not catch it: the client gets the response that the key's record has by now.
    """


class StepError(ApplicationError):
    """A step cannot be run or remembered as it is written: the message says what to change in the handler."""


class OutcomeUnknown(ApplicationError):
    """Raise it in a handler when the work may have happened: the key becomes unknown, and is reconciled.

    A protected function (``oncekey.functions``) raises it to a caller whose key is unknown. If that caller is itself a
    handler or a protected function, it is an ordinary exception there: the caller's ``effects`` decide.
    """


class PersonalKey(ApplicationError, ValueError):
    """A function was called with a key that looks like personal data, and has ``pii="refuse"``: nothing ran.

    ``kind`` is what it looks like: ``email``, ``phone``, ``card`` or ``token``.
    """

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Refused(ApplicationError):
    """Raise it in a handler that refuses a request before it did anything: the key stays unused.

    It is for frameworks that validate nothing themselves (Starlette, Flask). oncekey recognises the validation
    of FastAPI and Litestar without it.
    """

    def __init__(self, detail: str, *, status: int = 422) -> None:
        if not 400 <= status < 500:
            raise ConfigurationError(f"Refused takes a 4xx status, not {status}")
        super().__init__(detail)
        self.detail = detail
        self.status = status


class ResultNotKept(ApplicationError):
    """A function ran, its key is completed, and its result is not kept: it is not JSON, or too large.

    ``result`` is the result for the first caller. A later caller gets None.
    """

    result: object = None


class ClientError(OnceKeyError):
    """``oncekey.client`` did not send a request, or cannot say what became of it. ``key`` is its Idempotency-Key."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class IntentChanged(ClientError):
    """The request is not the one that this intent stands for. Nothing was sent."""


class IntentExpired(ClientError):
    """The server may have forgotten the key, and would run the request as a new one. Nothing was sent.

    ``names`` are the intents. ``outcomes``, after ``resume``: what became of all intents, also of those that were sent.
    """

    def __init__(
        self, message: str, *, key: str | None = None, names: tuple[str, ...] = (), outcomes: Sequence[Any] = ()
    ) -> None:
        super().__init__(message, key=key)
        self.names = names
        self.outcomes = list(outcomes)


class JarError(ClientError):
    """The key jar cannot be read or written; the message says what to do. The request was not sent."""


class OutcomeUnsettled(ClientError):
    """The server does not know whether the operation happened, and its operator settles it. Keep the key.

    ``reference`` is what to name to that operator, ``retry_after`` the seconds after which it makes sense to ask again.
    """

    def __init__(
        self, message: str, *, key: str | None = None, reference: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message, key=key)
        self.reference = reference
        self.retry_after = retry_after


class RedirectRefused(ClientError):
    """The server redirects the request to ``location``, where its key must not go. It was not followed."""

    def __init__(self, message: str, *, key: str | None = None, location: str = "") -> None:
        super().__init__(message, key=key)
        self.location = location


class OperatorError(OnceKeyError):
    """The operator of the service must act."""


class LedgerError(OperatorError):
    """A ledger cannot be read or compared; the message names the file and line, or the entry."""


class KeyNotFound(OperatorError, LookupError):
    """The key or job that an operator asked for does not exist."""


class MoveRefused(OperatorError):
    """The key or job does not allow the operator's change in its present state; nothing was changed."""


class SchemaError(OperatorError):
    """The tables are missing, older or newer than this version; the message says what to run."""


class StoreError(OperatorError):
    """The store could not do what was asked. If the handler has not been called yet, it will not be called."""


class StoreUnavailable(StoreError):
    """The store is down, hangs, is slow or refuses: what was asked may have happened or not."""


class StoreOverloaded(StoreError):
    """The queue in front of the store is full: nothing was asked of the store."""
