"""Sends events to the logger ``oncekey`` and to the app's own hook, and knows which events a decision has.

On the hot path ask :meth:`Emitter.wants` first, so that an event without a reader is never built.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from oncekey.core.decision import (
    LEASE_RAN_OUT,
    Busy,
    Claim,
    Decision,
    Deferred,
    Execute,
    Mismatch,
    Replay,
    TurnedAway,
    Unknown,
    Unreadable,
)
from oncekey.core.policy import Policy
from oncekey.core.record import Record, Reservation, StoredResponse, tenant_of
from oncekey.core.states import Event as Move
from oncekey.core.states import State
from oncekey.telemetry import events
from oncekey.telemetry.events import Event, about
from oncekey.telemetry.route_warnings import PAUSE_SECONDS, Warnings

if TYPE_CHECKING:
    from oncekey.telemetry.exporter import Exporter
    from oncekey.telemetry.registry import Telemetry

LOGGER = logging.getLogger("oncekey")
_NO_ROUTES = Warnings()
_PACED = 100
"""How many events :meth:`Emitter.emit_paced` remembers."""

Hook = Callable[[Event], None]
"""The app's own listener. It runs inside the request, so it must be quick: do slow work elsewhere."""


def log_event(event: Event, error: BaseException | None = None, warnings: Warnings | None = None) -> None:
    """Log one line on the logger ``oncekey``, at the event's level, with the event itself as ``event``.

    Tenant and endpoint stand apart, as the commands take them. ``warnings`` knows the routes: a line names the route,
    not the path. ``error``: what the app's own code raised; its traceback follows the line.
    """
    if not LOGGER.isEnabledFor(event.level):
        return
    members = {item.name: getattr(event, item.name) for item in fields(event)}
    known = _NO_ROUTES if warnings is None else warnings
    if "operation" in members:
        members["operation"] = known.route_of(members["operation"])
    shown = " ".join(
        _scope_shown(known, value) if name == "scope" else f"{name}={_shown(value)}" for name, value in members.items()
    )
    LOGGER.log(event.level, "%s %s", type(event).__name__, shown, exc_info=error, extra={"event": event})


def _scope_shown(warnings: Warnings, scope: str) -> str:
    tenant, endpoint = warnings.pasteable(scope)
    return f"scope={_shown(tenant)}" + ("" if endpoint is None else f" endpoint={_shown(endpoint)}")


def _shown(value: object) -> str:
    """The value, quoted and escaped unless it is one plain word: a client's path must not forge log lines."""
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(" \"'=") else repr(text)


class Emitter:
    """Sends events to the log, to the app's hook and to exporters. A hook that raises cannot break a request."""

    __slots__ = ("_complained", "_hooks", "_silent_until", "exporters", "wants_each", "warnings")

    def __init__(self, hook: Hook | None = None, exporters: Sequence[Exporter] = ()) -> None:
        self._hooks: tuple[Hook, ...] = () if hook is None else (hook,)
        self._complained: set[int] = set()
        self._silent_until: dict[Event, float] = {}
        self.warnings = Warnings()
        self.exporters: tuple[Exporter, ...] = ()
        self.wants_each: Callable[[], bool] = (
            partial(LOGGER.isEnabledFor, logging.DEBUG) if hook is None else lambda: True
        )
        """Whether the log or a hook takes the events that every request has: Reserved, Replayed, Completed."""
        for exporter in exporters:
            self.add(exporter)

    def add(self, exporter: Exporter) -> None:
        """Send events to this exporter, too."""
        from oncekey.telemetry.exporter import answer  # an app without exporters does not import it

        self.exporters = (*self.exporters, exporter)
        self._hooks = (*self._hooks, partial(answer, exporter, "on_event", None))
        self.wants_each = lambda: True

    def add_all(self, telemetry: Telemetry) -> None:
        """Send events to these exporters, too. One that is here already is not added twice."""
        from oncekey.telemetry.registry import exporters_of

        for exporter in exporters_of(telemetry):
            if exporter not in self.exporters:
                self.add(exporter)

    def wants(self, event_type: type[Event]) -> bool:
        """Whether the log or a hook takes such an event. Cheap: loggers cache the answer."""
        return True if self._hooks else LOGGER.isEnabledFor(event_type.level)

    def emit(self, event: Event, *, error: BaseException | None = None) -> None:
        log_event(event, error, self.warnings)
        self.send(event)

    def emit_paced(self, event: Event, sent: Event | None = None) -> None:
        """As :meth:`emit`, with at most one line a minute for equal events: a store that is down fails several times a
        second, for hours. ``sent``: what hooks and exporters get in place of the event that is logged."""
        now = time.monotonic()
        if now >= self._silent_until.get(event, now):
            if len(self._silent_until) >= _PACED:
                self._silent_until.clear()
            self._silent_until[event] = now + PAUSE_SECONDS
            log_event(event, None, self.warnings)
        self.send(event if sent is None else sent)

    def send(self, event: Event) -> None:
        """As :meth:`emit`, without a line in the log."""
        for hook in self._hooks:
            try:
                hook(event)
            except Exception:
                if id(hook) not in self._complained:  # once: a broken hook fails at every request
                    self._complained.add(id(hook))
                    LOGGER.exception(
                        "the on_event hook failed on %s; its later failures are not logged", type(event).__name__
                    )

    # -- what the engine reports ---------------------------------------------------------------------------------

    def claimed(self, claim: Claim, moved: Record) -> None:
        """Report a request that changed an existing key: it claimed the key, released it, or made it unknown."""
        emit, event = self.emit, claim.event
        if event is Move.DOUBT:
            if claim.record.state is State.IN_PROGRESS:
                emit(events.ZombieFound(*about(moved)))
            if claim.reason != LEASE_RAN_OUT:
                emit(events.Doubted(*about(moved), reason=claim.reason or ""))
            emit(events.ReconcileScheduled(*about(moved), in_seconds=0.0))
            emit(events.FoundUnknown(*about(moved)))
        elif event is Move.TAKE_OVER:
            emit(events.ZombieFound(*about(moved)))
            emit(events.TakenOver(*about(moved)))
        elif event is Move.RETRY:
            emit(events.Retried(*about(moved)))
        elif event is Move.RELEASE:
            emit(events.ZombieFound(*about(moved)))
            emit(events.Released(*about(moved), reason=claim.reason or ""))
        elif self.wants(events.Reserved):
            emit(events.Reserved(*about(moved)))

    def decided(self, decision: Decision, policy: Policy) -> None:
        """Report what a request found at its key, or that it reserved it."""
        emit, wants = self.emit, self.wants
        if isinstance(decision, Execute):
            if wants(events.Reserved):
                emit(events.Reserved(*about(decision.record)))
            return
        if isinstance(decision, Replay):
            if wants(events.Replayed):
                response = decision.record.response
                emit(events.Replayed(*about(decision.record), status=response.status if response else 0))
            return
        match decision:
            case Busy(record) if record is not None:
                if wants(events.FoundInFlight):
                    emit(events.FoundInFlight(*about(record)))
                if policy.in_flight == "wait":
                    emit(events.WaitedOut(*about(record), seconds=policy.wait.total_seconds()))
            case Deferred(record) if wants(events.FoundInFlight):
                emit(events.FoundInFlight(*about(record)))
            case Mismatch(record):
                emit(events.Misused(*about(record)))
            case Unknown(record):
                emit(events.FoundUnknown(*about(record)))
            case Unreadable(record, reason):
                emit(events.FoundUnreadable(*about(record), reason=reason))

    def turned_away(self, wanted: Reservation, refused: TurnedAway) -> None:
        """Report a request whose key is new and is not taken."""
        operation = wanted.operation
        if refused.personal is not None:
            tenant, kind = tenant_of(wanted.scope), refused.personal
            self.emit(events.PersonalKeyFound(tenant, operation, kind=kind, answer="refused"))
        else:
            self.emit(events.TurnedAway(wanted.scope, operation, reason=refused.situation))

    def finished(self, event: Move, record: Record, response: StoredResponse | None, reason: str | None) -> None:
        """Report an attempt whose end is stored."""
        emit, wants = self.emit, self.wants
        match event:
            case Move.COMPLETE if response is not None:
                if wants(events.Completed):
                    emit(events.Completed(*about(record), status=response.status))
                if response.body is None:
                    emit(events.Tombstoned(*about(record), reason=reason or "the response could not be kept"))
            case Move.FAIL if response is not None:
                emit(events.Failed(*about(record), status=response.status))
            case Move.RELEASE:
                emit(events.Released(*about(record), reason=reason or ""))
            case Move.DOUBT:
                emit(events.Doubted(*about(record), reason=reason or ""))
                emit(events.ReconcileScheduled(*about(record), in_seconds=0.0))
            case Move.DISCARD if wants(events.Discarded):
                emit(events.Discarded(*about(record)))
