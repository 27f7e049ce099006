"""Turns rows of the outbox into Jobs, and builds what both SQL stores write about attempts that failed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from oncekey.core.jobs import Conclusion, Job, JobState
from oncekey.core.record import StoredResponse
from oncekey.core.sealed import MARK

HISTORY_KEPT = 20
"""How many attempts a row remembers; the oldest are dropped first."""
ERROR_CHARS = 500
SEALED_CHARS = 3_000
"""The length of ``ERROR_CHARS`` characters of UTF-8 when they are encrypted. They are cut before that."""
LEASE_RAN_OUT = "the worker's lease ran out"
TIMED_OUT = "its key expired before it was done"
TIMED_OUT_IN_DOUBT = "its job was tried, and not done before the key expired"

_STATES = {state.value: state for state in JobState}
_TRANSLATE = {0: "\ufffd"}


def job(row: Sequence[Any]) -> Job:
    """A row of outbox_columns.sql as a Job. It reads by position, which is faster, since it runs for every job."""
    return Job(
        row[0], row[1], row[2], row[3], row[4], row[5], row[6].encode(), row[7], bool(row[8]), _STATES[row[9]], row[10],
        row[11], row[12], row[13], row[14], row[15], row[16].encode(), row[17], row[18], row[19],
    )  # fmt: skip


def kept_error(conclusion: Conclusion) -> str | None:
    """The error that the row keeps of this attempt. A release has one only if the task had begun."""
    return None if conclusion.error is None else shortened(conclusion.error)


def shortened(error: str) -> str:
    """The error cut to its length, without characters that a database refuses: a task's error can hold any."""
    length = SEALED_CHARS if error.startswith(MARK) else ERROR_CHARS
    return error[:length].translate(_TRANSLATE).encode("utf-8", "replace").decode()


def remembering(history: str, attempt: int, at: float, error: str) -> str:
    """The history with one more attempt that failed."""
    entries = orjson.loads(history)[-(HISTORY_KEPT - 1) :]
    entries.append({"attempt": attempt, "at": at, "error": error})
    return orjson.dumps(entries).decode()


def headers_of(response: StoredResponse | None) -> str | None:
    return None if response is None else orjson.dumps(response.headers).decode()
