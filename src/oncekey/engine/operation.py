"""The Operation: what a handler holds while its key is its own."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from typing import Final

from oncekey.core.policy import Policy
from oncekey.core.record import Record
from oncekey.errors import ApplicationError, NoOperation


class Operation:
    """One attempt at one key. Get it with :func:`current`, or in FastAPI with ``Depends``."""

    __slots__ = ("_verbs_used", "lost", "policy", "raised", "record", "refused", "renew_at", "scope", "tells_apart")

    def __init__(self, record: Record, policy: Policy, scope: str) -> None:
        self.record = record
        self.policy = policy
        self.scope = scope
        self.lost = False
        """The lease went to somebody else: nothing that this attempt still does will be stored."""
        self.refused = False
        """The framework or the handler turned the request away before the operation began."""
        self.raised = False
        """The handler raised, and its framework made a response of it."""
        self.tells_apart = False
        """Whether ``raised`` can be relied on. Where it cannot, a 5xx counts as raised: the careful reading."""
        self.renew_at = 0.0
        self._verbs_used = False

    @property
    def key(self) -> str:
        return self.record.key

    @property
    def attempt(self) -> int:
        return self.record.attempt

    @property
    def owner(self) -> str:
        return self.record.owner

    @property
    def name(self) -> str:
        """The route, e.g. ``POST /payments``."""
        return self.record.operation

    def downstream_key(self, name: str) -> str:
        """A key for a call to somebody else: the same for every attempt, different for every ``name``.

        Safe to show: the client's key cannot be computed from it. Derived from the fingerprint too, so that a key
        that is reused for another request after its expiry is another request downstream as well.
        """
        self._verbs_used = True
        digest = hashlib.sha256(b"oncekey-downstream-1")
        for part in (self.record.scope.encode(), self.key.encode(), self.record.fingerprint, name.encode()):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return f"oncekey-{digest.hexdigest()[:40]}"

    def refuse(self) -> None:
        """Say that this request is turned away before anything happened: the key stays unused.

        For handlers that validate by themselves and answer with a 4xx of their own; ``raise Refused(...)`` does both.
        """
        if self._verbs_used:
            raise ApplicationError("refuse() comes before any other verb: this operation has already begun")
        self.refused = True

    @property
    def discardable(self) -> bool:
        return self.refused and not self._verbs_used


_current: Final[ContextVar[Operation | None]] = ContextVar("oncekey_operation", default=None)


def current() -> Operation:
    """The Operation of the protected request that is running here."""
    operation = _current.get()
    if operation is None:
        raise NoOperation(
            "no protected request is running here: is the route protected, and is this its own thread or task?"
        )
    return operation
