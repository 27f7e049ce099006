"""Steps whose results are encrypted with a key that this process does not have."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from oncekey.core.record import Record
from oncekey.core.sealed import is_sealed, is_sealed_text, not_readable, readable
from oncekey.core.steps import Step
from oncekey.errors import StoreError

_log = logging.getLogger("oncekey")


def unreadable(record: Record, found: Sequence[Step]) -> str | None:
    """Why this process cannot go on with a request: the first value of it that does not open; None: all of them do."""
    step = next((step for step in found if is_sealed(step.result)), None)
    if step is not None:
        what = "the kept request" if step.is_request else f"the result of step '{step.name}'"
        return not_readable(step.result or b"", what)
    if is_sealed_text(record.last_error):
        return not_readable((record.last_error or "").encode(), "the error of the last attempt")
    return None


def check_readable(found: Sequence[Step]) -> None:
    """Raise StoreError if one of these steps cannot be read: no step of the attempt may run then, not even a new one,
    because it could need that result. The client gets 503, and may retry when the key is there."""
    for step in found:
        if is_sealed(step.result):
            try:
                readable(step.result or b"", f"the result of step '{step.name}'")
            except StoreError as error:
                _log.error("a half-done request was refused with 503, and none of its steps ran: %s", error)
                raise
