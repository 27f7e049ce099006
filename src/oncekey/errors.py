"""Every error that oncekey raises, in one tree, split by who has to act.

::

    OnceKeyError
    ├── ApplicationError        the developer of the app acts
    │   ├── ConfigurationError      a policy, route or store URL that makes no sense
    │   ├── EnlistError             a session that cannot be enlisted, or that the handler ended itself
    │   ├── Dead                    raised BY a task: trying again is no use, a human must look
    │   ├── IllegalTransition       code asked for a move that core/states.py does not have
    │   ├── JobLost                 another worker has the job: nothing that this attempt does is stored
    │   ├── NoOperation             current() was called outside a protected request
    │   ├── NotAuthenticated        raised BY the app's scope function: the caller is nobody (401)
    │   ├── NotAuthorized           raised BY the app's authorize function: the caller may not do this (403)
    │   ├── NotExecuted             raised BY a handler: nothing happened, a retry may run (503)
    │   │   └── LeaseLost               raised by enlist(): the key went to another attempt
    │   ├── OutcomeUnknown          raised BY a handler: it may have happened (409)
    │   ├── Refused                 raised BY a handler: refused before the operation began (4xx)
    │   └── StepError               a phase or effect that cannot be run or remembered as it stands
    └── OperatorError           whoever runs the service acts
        ├── KeyNotFound             an operator asked for a key or a job that is not there
        ├── LedgerError             a ledger that cannot be read or compared: the message says where
        ├── MoveRefused             an operator's change that the state of things does not allow: it says why
        ├── SchemaError             tables missing, too old or too new: the message says what to run
        └── StoreError
            ├── StoreUnavailable    no answer, or none in time: the request gets a 503
            └── StoreOverloaded     the queue in front of the store is full: the request gets a 503

What a *client* did wrong is never an exception of this tree: it is a decision (core/decision.py) or a
:class:`oncekey.core.header.BadKey`, and becomes a problem document (core/problems.py).
"""

from __future__ import annotations


class OnceKeyError(Exception):
    """The root: catch this to catch everything that oncekey raises on purpose."""


class ApplicationError(OnceKeyError):
    """The app's developer must act."""


class ConfigurationError(ApplicationError, ValueError):
    """A setting makes no sense; the message names it and says what would."""


class Dead(ApplicationError):
    """Raise it in a task when trying again is no use: the job is a dead letter at once, with this as its reason."""


class EnlistError(ApplicationError):
    """A session or connection cannot be enlisted as it is, or the handler ended it; the message says what to change."""


class IllegalTransition(ApplicationError):
    """A move that the state table does not have. Always a bug, never a race."""


class JobLost(ApplicationError):
    """The lease of a task's job went to another worker: what this attempt still does will not be stored. Stop."""


class NoOperation(ApplicationError, LookupError):
    """``current()`` was called where no protected request is running."""


class NotAuthenticated(ApplicationError):
    """Raise it in the scope function when the caller is nobody: 401, before any key is looked up."""


class NotAuthorized(ApplicationError):
    """Raise it in ``OnceKey(authorize=…)`` when the caller may not use the operation: 403, and nothing is looked up."""


class NotExecuted(ApplicationError):
    """Raise it in a handler when it is certain that nothing happened: the key can be retried."""


class LeaseLost(NotExecuted):
    """The key went to another attempt: what this one wrote in its transaction is rolled back.

    Let it pass: the client gets what the key's record says by now.
    """


class StepError(ApplicationError):
    """A step that cannot be run or remembered as it stands: the message says what to change in the handler."""


class OutcomeUnknown(ApplicationError):
    """Raise it in a handler when the work may have happened: the key waits for reconciliation."""


class Refused(ApplicationError):
    """Raise it in a handler, before it did anything, for a request it will not take: the key stays unused.

    For frameworks that validate nothing themselves (Starlette, Flask). FastAPI's and Litestar's own
    validation is recognised without it.
    """

    def __init__(self, detail: str, *, status: int = 422) -> None:
        if not 400 <= status < 500:
            raise ConfigurationError(f"Refused takes a 4xx status, not {status}")
        super().__init__(detail)
        self.detail = detail
        self.status = status


class OperatorError(OnceKeyError):
    """Whoever runs the service must act."""


class LedgerError(OperatorError):
    """A ledger cannot be read or compared; the message names the file and line, or the entry."""


class KeyNotFound(OperatorError, LookupError):
    """Nothing is known of the key or job that an operator asked for."""


class MoveRefused(OperatorError):
    """What an operator asked for cannot be done to the key or job as it is; nothing was changed."""


class SchemaError(OperatorError):
    """The tables are missing, older or newer than this version; the message says what to run."""


class StoreError(OperatorError):
    """The store could not do what was asked. Before a handler is called, it is not called because of it."""


class StoreUnavailable(StoreError):
    """The store is down, hung, slow or refuses: what was asked may or may not have happened."""


class StoreOverloaded(StoreError):
    """More callers are waiting for the store than the queue holds: nothing was asked of the store."""
