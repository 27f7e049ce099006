"""The keeper: a thread that renews the leases of handlers that live long, and stores what could not be stored.

A thread and not a task, so that a handler that blocks its event loop does not lose its lease by it. Handlers that end
within a third of their lease cost it nothing but two dictionary operations.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oncekey.core.record import Record, StoredResponse, swap
from oncekey.core.states import Actor, Event, State
from oncekey.core.values import value
from oncekey.engine import forks
from oncekey.engine.operation import Operation
from oncekey.engine.tickets import QuietTicket, Ticket
from oncekey.errors import OperatorError, StoreError
from oncekey.telemetry import events
from oncekey.telemetry.events import about

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine

_log = logging.getLogger("oncekey")

RENEW_AT = 1 / 3
"""Of the lease: two renewals may be lost before the lease is."""
LOOKS_PER_LEASE = 12
LONGEST_LOOK_SECONDS = 5.0
MAX_UNFINISHED = 1_000
"""Outcomes held while the store is down. Past this the lease runs out instead, and ``effects`` says what it means."""


@value
class Unfinished:
    """A handler's outcome that the store has not taken yet."""

    operation: Operation
    event: Event
    response: StoredResponse | None
    reason: str | None


@dataclass(slots=True)
class _Tally:
    """How one look's renewals went; counted in the lane's thread."""

    waiting: int
    renewed: int = 0


class Keeper:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: dict[str, Operation] = {}
        self._unfinished: list[Unfinished] = []
        self._look_seconds = LONGEST_LOOK_SECONDS
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._storing = threading.Lock()
        self._closing = False
        forks.enroll(self)

    def watch(self, operation: Operation) -> None:
        """Renew this operation's lease until :meth:`unwatch`."""
        lease = operation.policy.lease_seconds
        now = time.monotonic()
        operation.renew_at = now + lease * RENEW_AT
        self._live[operation.record.owner] = operation
        if (max_run := operation.policy.max_run) is not None:
            operation.runs_until = now + max_run.total_seconds()
            lease = min(lease, max_run.total_seconds())
        if self._thread is None or lease < self._look_seconds * LOOKS_PER_LEASE:
            self._look_within(lease / LOOKS_PER_LEASE)

    def unwatch(self, operation: Operation) -> None:
        self._live.pop(operation.record.owner, None)

    def adopt(self, unfinished: Unfinished) -> None:
        """Keep the lease and keep trying to store this outcome, for as long as the record is still its owner's."""
        if len(self._unfinished) >= MAX_UNFINISHED:
            _log.error("more than %d outcomes wait for the store: one more is left to its lease", MAX_UNFINISHED)
            self.unwatch(unfinished.operation)
            return
        self._unfinished.append(unfinished)
        self._look_within(1.0)

    def _look_within(self, seconds: float) -> None:
        if self._closing:
            return
        self._look_seconds = min(self._look_seconds, seconds)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="oncekey-keeper", daemon=True)
            thread.start()  # may fail, out of threads: then the next one tries again
            self._thread = thread
        self._wake.set()

    def _run(self) -> None:
        while not self._closing and self._thread in (None, threading.current_thread()):
            try:
                self._wake.wait(self._look_seconds)
                self._wake.clear()
                self.look()
            except BaseException:
                _log.exception("the keeper stumbled; it goes on")

    def look(self) -> None:
        """Renew what is due, in one batch, and try to store what is unfinished."""
        self._renew_due()
        self._store_unfinished()

    def _renew_due(self) -> None:
        now = time.monotonic()
        for each in list(self._live.values()):
            if each.runs_until is not None and each.runs_until <= now:
                self._ran_too_long(each)
        due = [each for each in list(self._live.values()) if each.renew_at <= now and not self._given_up(each)]
        if any(operation.enlisted is not None for operation in due):
            due = [operation for operation in due if not self._holds_its_row(operation, now)]
        tally = _Tally(len(due))
        for operation in due:
            self._renew(operation, now, tally)

    def _given_up(self, operation: Operation) -> bool:
        """Its handler is over, and something that nobody thought of kept it from being ended: renewed for ever, its key
        would be in progress for ever. Its lease runs out instead, and ``effects`` says what that means."""
        task = operation.task
        if task is None or not (task.done() or task.get_loop().is_closed()):
            return False
        if any(item.operation is operation for item in self._unfinished):
            return False
        _log.error("a request has ended without an end for its key: its lease is left to run out")
        self.unwatch(operation)
        return True

    def _ran_too_long(self, operation: Operation) -> None:
        """Its ``max_run`` is over: leave the key to its lease, and end the handler where that can be done."""
        if any(item.operation is operation for item in self._unfinished):
            return  # it has ended, and waits for the store
        operation.runs_until = None
        self.unwatch(operation)
        task, max_run = operation.task, operation.policy.max_run
        seconds = 0.0 if max_run is None else max_run.total_seconds()
        handler = "cancelled" if task is not None else "goes on in its thread, without a lease"
        self._engine.emitter.emit(events.RanTooLong(*about(operation.record), max_seconds=seconds, handler=handler))
        if task is not None:
            with suppress(RuntimeError):  # its loop is closed: nothing runs there any more
                task.get_loop().call_soon_threadsafe(task.cancel, "max_run is over")

    def _holds_its_row(self, operation: Operation, now: float) -> bool:
        """Enlisted: the lock on its row is its lease, and no renewal would pass it."""
        enlisted = operation.enlisted
        if enlisted is None or not enlisted.is_open:
            return False
        operation.renew_at = now + operation.policy.lease_seconds * RENEW_AT
        enlisted.overdue()
        return True

    def _renew(self, operation: Operation, now: float, tally: _Tally) -> None:
        lease = operation.policy.lease_seconds
        operation.renew_at = now + lease * RENEW_AT
        change = swap(operation.record, Event.RENEW, Actor.OWNER, lease_seconds=lease)
        with suppress(StoreError):  # the next look tries again
            self._engine.lanes.submit(QuietTicket(change, lambda done: self._renewed(operation, done, tally)))

    def _renewed(self, operation: Operation, done: Ticket, tally: _Tally) -> None:
        tally.renewed += done.result is not None
        tally.waiting -= 1
        if tally.waiting == 0 and tally.renewed and self._engine.emitter.wants(events.LeaseRenewed):
            self._engine.emitter.emit(events.LeaseRenewed(rows=tally.renewed))
        if done.error is None and done.result is None and operation.record.owner in self._live:
            # Not renewed: lost, or just held by somebody for a moment. The row tells.
            at = (operation.record.scope, operation.record.key)
            self._engine.lanes.submit(QuietTicket(at, lambda seen: self._suspected(operation, seen)))

    def _suspected(self, operation: Operation, seen: Ticket) -> None:
        record: Record | None = seen.result
        if seen.error is not None or operation.record.owner not in self._live:
            return
        if record is None or record.owner != operation.record.owner or record.state is not State.IN_PROGRESS:
            operation.lost = True
            self.unwatch(operation)
            self._engine.emitter.emit(events.LeaseLost(*about(operation.record), move=Event.RENEW))

    def _store_unfinished(self) -> None:
        with self._storing:  # the thread and whoever closes, one after the other
            while self._unfinished:
                item = self._unfinished.pop(0)
                flow = self._engine.finish(item.operation, item.event, item.response, item.reason)
                try:
                    self._engine.run_blocking(flow, item.operation.policy.begin_seconds)
                except OperatorError:
                    # Still down, or just this one cannot be stored: the others come first at the next look.
                    self._unfinished.append(item)
                    return
                except BaseException:
                    self._unfinished.append(item)
                    raise
                if item.operation.enlisted is not None:  # it was written or left, and now waits for the app's own end
                    self._unfinished.append(item)
                    return
                self.unwatch(item.operation)
                self._renew_due()  # storing may have taken its time

    def open(self) -> None:
        """Look again, after a close."""
        self._closing = False
        self._thread = None  # one that has not ended yet does so when there is another
        if self._unfinished:
            self._look_within(1.0)

    def close(self, timeout: float) -> None:
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
        try:
            self._store_unfinished()
        except Exception:
            _log.exception("outcomes could not be stored before the end")

    def after_fork(self) -> None:
        """In a child: handlers in flight are the parent's, and so is the thread."""
        self._live = {}
        self._unfinished = []
        self._thread = None
        self._storing = threading.Lock()
        self._wake = threading.Event()
