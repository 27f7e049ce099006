"""What was seen of a handler during one attempt.

Endpoints are wrapped when an app is protected (``web/endpoints.py`` and one module per framework). The wrapper reports
here when the endpoint is entered, when it returns and when it raises; the integrations report what stood in the
endpoint's way. Nothing here decides: ``judgment.py`` reads this and says what becomes of the key.
"""

from __future__ import annotations

from oncekey.errors import NotExecuted, OutcomeUnknown, Refused, StoreError

SPEAKING_ERRORS = (Refused, NotExecuted, OutcomeUnknown, StoreError)
"""Exceptions by which a handler, or a verb that it called, speaks to oncekey. Their answers are ours."""


class Evidence:
    """What the wrapped endpoint and the web integration reported. One object per attempt."""

    __slots__ = (
        "calls",
        "cause",
        "covered",
        "error",
        "raised",
        "raised_name",
        "raised_status",
        "refused",
        "returned",
        "running",
    )

    def __init__(self, *, covered: bool = False) -> None:
        self.covered = covered
        """Every endpoint that this request can reach is wrapped: without a call, the endpoint was never entered."""
        self.calls = 0
        """How often the endpoint was entered. Middleware that tries again enters it more than once."""
        self.running = 0
        """Calls that have neither returned nor raised."""
        self.returned: int | None = None
        """The status of the response that the last call returned."""
        self.raised = False
        """The last call raised an Exception. One that was cancelled said nothing: neither this nor ``returned``."""
        self.raised_status: int | None = None
        """The status that the raised exception names itself: an HTTPException's, or Refused's."""
        self.raised_name = ""
        """The class of what was raised, for the record."""
        self.error: BaseException | None = None
        """What was raised, where it is one of SPEAKING_ERRORS."""
        self.cause: BaseException | None = None
        """Whatever was raised, for its traceback in the log. Kept until the attempt is judged, and no longer: a
        traceback holds the request."""
        self.refused = False
        """The request validation turned the request away before the endpoint was entered."""

    def entered(self) -> None:
        self.calls += 1
        self.running += 1
        self.returned = self.raised_status = self.error = self.cause = None
        self.raised = False

    def returned_with(self, status: int) -> None:
        self.running -= 1
        self.returned = status

    def raised_with(self, error: BaseException, status: int | None) -> None:
        """The endpoint raised. ``status``: the one that the exception names itself, if it names one.

        An endpoint that was cancelled has said nothing: a timeout around it gives the answer in its place.
        """
        self.running -= 1
        self.raised = isinstance(error, Exception)
        self.raised_status = error.status if isinstance(error, Refused) else status
        self.heard(error)

    def heard(self, error: BaseException) -> None:
        """Something was raised: by the endpoint, or by what runs around it."""
        self.raised_name = type(error).__name__
        self.cause = error
        if isinstance(error, SPEAKING_ERRORS) and self.error is None:
            self.error = error

    def refused_by_validation(self) -> None:
        """Whatever a handler of the validation error does, and if it fails, the endpoint was not entered."""
        if not self.calls:
            self.refused = True
