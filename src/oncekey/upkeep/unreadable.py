"""Keys that upkeep leaves to other processes, because something of them does not open in this one.

A process may lack a key of the ring: while a deploy adds it, while a deploy switches encryption on, or for good, if the
key is lost. Another process that has it looks every few seconds, so this one waits a minute before it acts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from oncekey.core.record import Record
from oncekey.core.sealed import key_ids_in
from oncekey.core.steps import Step
from oncekey.engine.sealed_steps import unreadable

_log = logging.getLogger("oncekey")

LEFT_SECONDS = 60.0
"""How long after its time a key that this process cannot read is left to other processes."""

_TOLD = (
    "%s leaves requests to other processes that it cannot read: something of them was encrypted with key %s, which "
    "does not open here. Give every process the same keyring, OnceKey(encryption=…). This is said once per key"
)


class UnreadableWatch:
    """Finds such keys for one duty, and logs the numbers of their encryption keys, each once."""

    def __init__(self, duty: str) -> None:
        self._duty = duty
        self._told: set[int] = set()

    def why(self, record: Record, found: Sequence[Step]) -> str | None:
        """Why this process cannot read the request of a key; None: it can."""
        reason = unreadable(record, found)
        if reason is not None:
            errors = (record.last_error or "").encode()
            for number in sorted(key_ids_in((*(step.result or b"" for step in found), errors)) - self._told):
                self._told.add(number)
                _log.warning(_TOLD, self._duty, number)
        return reason


def is_left(record: Record) -> bool:
    """Whether it is too early to act on a key that this process cannot read."""
    return record.now - (record.reconcile_at or 0.0) < LEFT_SECONDS
