"""What was seen of a handler during one attempt.

``protect()`` wraps endpoints (``web/endpoints.py`` and one module per framework). The wrapper reports here when the
endpoint is entered, when it returns and when it raises; the integrations report a refused validation. Nothing here
decides: ``judgment.py`` reads this and decides what becomes of the key.

An exception speaks for one operation: the one that it leaves first. A handler may call a protected function, whose
``NotExecuted`` says that the function did nothing; the handler may have charged before. So the attempt of a function or
a message writes its owner token on each exception that leaves it (:func:`leaves`). For every other operation that
exception is an ordinary one, whatever its class and its status (:func:`is_of`).
"""

from __future__ import annotations

from oncekey.errors import NotExecuted, OutcomeUnknown, Refused, StoreError

SPEAKING_ERRORS = (Refused, NotExecuted, OutcomeUnknown, StoreError)
"""Exceptions by which a handler, or a verb that it called, tells oncekey the outcome. oncekey answers them itself."""

_LEFT = "_oncekey_owner"
"""In the ``__dict__`` of an exception: the owner token of the attempt that it left first."""


def leaves(error: BaseException, owner: str) -> None:
    """Note that the exception leaves the attempt of this owner, unless it has left another one before.

    Not a StoreError: it says nothing about effects, and one object goes to all attempts of a batch that failed.
    """
    if not isinstance(error, StoreError):
        error.__dict__.setdefault(_LEFT, owner)


class Leaving:
    """Marks each exception that leaves its ``with`` as the attempt's."""

    __slots__ = ("_owner",)

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            leaves(error, self._owner)


def is_of(error: BaseException, owner: str) -> bool:
    """Whether the exception belongs to the attempt of this owner: it has left no other one."""
    return error.__dict__.get(_LEFT, owner) == owner  # type: ignore[no-any-return]


class Evidence:
    """What the wrapped endpoint and the web integration reported. One object per attempt."""

    # The defaults are of the class: an attempt sets only what was seen of it.
    covered = False
    """Every endpoint that this request can reach is wrapped. So 0 calls mean that no endpoint was entered."""
    calls = 0
    """How often the endpoint was entered. Middleware that retries enters it more than once."""
    running = 0
    """Calls that have neither returned nor raised."""
    returned: int | None = None
    """The status of the response that the last call returned."""
    raised = False
    """The last call raised an Exception. A cancelled call sets neither this nor ``returned``."""
    raised_status: int | None = None
    """The status that the raised exception itself has: an HTTPException's, or Refused's."""
    raised_name = ""
    """The class of the raised exception, for the record."""
    error: BaseException | None = None
    """The raised exception, if it is one of SPEAKING_ERRORS."""
    cause: BaseException | None = None
    """The raised exception, for its traceback in the log. It is dropped when the attempt is judged, because a traceback
    holds the request."""
    broke_off = False
    """The app returned or raised before it had sent its whole response."""
    refused = False
    """The framework's validation refused the request before the endpoint was entered."""

    def __init__(self, owner: str = "", *, covered: bool = False) -> None:
        self.owner = owner
        """The owner token of the attempt."""
        if covered:
            self.covered = True

    @property
    def ended(self) -> bool:
        """The endpoint certainly runs no more: its last call raised, or returned a response that was sent whole. After
        a cancellation a thread may still run, and after a body that broke off a generator."""
        return not self.running and (self.raised or (self.returned is not None and not self.broke_off))

    def entered(self) -> None:
        if self.calls or self.cause is not None:  # forget what an earlier call, or the code around it, did
            self.returned = self.raised_status = self.error = self.cause = None
            self.raised = False
        self.calls += 1
        self.running += 1

    def returned_with(self, status: int) -> None:
        self.running -= 1
        self.returned = status

    def raised_with(self, error: BaseException, status: int | None) -> None:
        """The endpoint raised. ``status``: the one that the exception itself has, or None.

        A cancelled endpoint does not count as raised: a timeout around it answers in its place. The status of an
        exception from an operation inside of this one says nothing about this one.
        """
        self.running -= 1
        self.raised = isinstance(error, Exception)
        self.raised_status = None
        if is_of(error, self.owner):
            self.raised_status = error.status if isinstance(error, Refused) else status
        self.heard(error)

    def heard(self, error: BaseException) -> None:
        """An exception was raised, by the endpoint or by the code around it."""
        self.raised_name = type(error).__name__
        self.cause = error
        if isinstance(error, SPEAKING_ERRORS):
            if not is_of(error, self.owner):
                self.raised_name += " (of another protected operation)"
            elif self.error is None:
                self.error = error

    def speaks(self, error: BaseException | None) -> bool:
        """Whether the exception tells the outcome of this attempt: one of SPEAKING_ERRORS that left no other."""
        return isinstance(error, SPEAKING_ERRORS) and is_of(error, self.owner)

    def refused_by_validation(self) -> None:
        """Validation refused the request. The endpoint was not entered, also if the error handler fails."""
        if not self.calls:
            self.refused = True
