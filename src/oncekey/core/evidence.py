"""What was seen of a handler during one attempt.

``protect()`` wraps endpoints (``web/endpoints.py`` and one module per framework). The wrapper reports here when the
endpoint is entered, when it returns and when it raises; the integrations report a refused validation. Nothing here
decides: ``judgment.py`` reads this and decides what becomes of the key.
"""

from __future__ import annotations

from oncekey.errors import NotExecuted, OutcomeUnknown, Refused, StoreError

SPEAKING_ERRORS = (Refused, NotExecuted, OutcomeUnknown, StoreError)
"""Exceptions by which a handler, or a verb that it called, tells oncekey the outcome. oncekey answers them itself."""


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

    def __init__(self, *, covered: bool = False) -> None:
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

        A cancelled endpoint does not count as raised: a timeout around it answers in its place.
        """
        self.running -= 1
        self.raised = isinstance(error, Exception)
        self.raised_status = error.status if isinstance(error, Refused) else status
        self.heard(error)

    def heard(self, error: BaseException) -> None:
        """An exception was raised, by the endpoint or by the code around it."""
        self.raised_name = type(error).__name__
        self.cause = error
        if isinstance(error, SPEAKING_ERRORS) and self.error is None:
            self.error = error

    def refused_by_validation(self) -> None:
        """Validation refused the request. The endpoint was not entered, also if the error handler fails."""
        if not self.calls:
            self.refused = True
