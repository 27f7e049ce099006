"""The keeper: a thread that renews the leases of long handlers, and stores results that could not be stored at once.

It is a thread and not a task, so that a handler that blocks its event loop does not lose its lease. A handler that ends
within a third of its lease costs the keeper two dictionary operations.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oncekey.core.leases import LOOKS_PER_LEASE, RENEW_AT
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import FINAL, Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.core.values import value
from oncekey.engine import process
from oncekey.engine.batching.ticket import QuietTicket, Ticket
from oncekey.engine.operation import Operation
from oncekey.errors import OperatorError, StoreError
from oncekey.telemetry import events
from oncekey.telemetry.events import about

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine

_log = logging.getLogger("oncekey")

LONGEST_LOOK_SECONDS = 5.0
MAX_UNFINISHED = 1_000
"""How many outcomes wait while the store is down. For any more the lease runs out, and ``effects`` says what that
means."""


@value
class Unfinished:
    """A handler's outcome that is not stored yet."""

    operation: Operation
    event: Event
    response: StoredResponse | None
    reason: str | None


@dataclass(slots=True)
class _Tally:
    """Counts the renewals of one look, in the lane's thread."""

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
        process.enroll(self)

    def watch(self, operation: Operation) -> None:
        """Renew this operation's lease until :meth:`unwatch`."""
        lease = operation.policy.lease_seconds
        now = time.monotonic()
        operation.renew_at = now + lease * RENEW_AT
        self._live[operation.owner] = operation
        if (max_run := operation.policy.max_run) is not None:
            operation.runs_until = now + max_run.total_seconds()
            lease = min(lease, max_run.total_seconds())
        if self._thread is None or lease < self._look_seconds * LOOKS_PER_LEASE:
            self._look_within(lease / LOOKS_PER_LEASE)

    def keeps(self, record: Record) -> bool:
        """Whether the owner of this row is a live request of this process."""
        return record.owner in self._live

    def unwatch(self, operation: Operation) -> None:
        self._live.pop(operation.owner, None)

    def adopt(self, unfinished: Unfinished) -> None:
        """Renew the lease and try to store this outcome, for as long as its owner holds the key."""
        if len(self._unfinished) >= MAX_UNFINISHED:
            _log.error(
                "more than %d outcomes wait for the store, so this one is dropped: the lease of its key runs out, and "
                "effects= says what that means",
                MAX_UNFINISHED,
            )
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
            thread.start()  # may fail, out of threads: then the next call tries again
            self._thread = thread
        self._wake.set()

    def _run(self) -> None:
        while not self._closing and self._thread in (None, threading.current_thread()):
            try:
                self._wake.wait(self._look_seconds)
                self._wake.clear()
                self.look()
            except BaseException:
                _log.exception("the keeper failed unexpectedly; it goes on")

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
        """Whether the handler's task is over and the request was not ended, which is a bug. With renewals its key would
        be in progress for ever. So the lease runs out, and ``effects`` says what that means."""
        task = operation.task
        if task is None or not (task.done() or task.get_loop().is_closed()):
            return False
        if any(item.operation is operation for item in self._unfinished):
            return False
        _log.error(
            "a request has ended without finishing its key: the lease runs out, and effects= says what that means"
        )
        self.unwatch(operation)
        return True

    def _ran_too_long(self, operation: Operation) -> None:
        """Its ``max_run`` is over: stop the renewals, and cancel the handler if it runs in a task."""
        if any(item.operation is operation for item in self._unfinished):
            return  # the handler has ended; its outcome waits for the store
        operation.runs_until = None
        self.unwatch(operation)
        task, max_run = operation.task, operation.policy.max_run
        seconds = 0.0 if max_run is None else max_run.total_seconds()
        handler = "cancelled" if task is not None else "goes on in its thread, without a lease"
        self._engine.emitter.emit(events.RanTooLong(*about(operation.record), max_seconds=seconds, handler=handler))
        if task is not None:
            with suppress(RuntimeError):  # the loop is closed, so the task does not run
                task.get_loop().call_soon_threadsafe(task.cancel, "max_run is over")

    def _holds_its_row(self, operation: Operation, now: float) -> bool:
        """Whether an enlisted transaction locks the key's row. The lock acts as the lease, and blocks renewals."""
        enlisted = operation.enlisted
        if enlisted is None or not enlisted.is_open:
            return False
        limit = operation.policy.lease_seconds * RENEW_AT
        if now < enlisted.opened_at + limit:  # it was opened long after the last renewal
            operation.renew_at = enlisted.opened_at + limit
            return True
        operation.renew_at = now + limit
        enlisted.overdue(operation, limit)
        return True

    def _renew(self, operation: Operation, now: float, tally: _Tally) -> None:
        lease = operation.policy.lease_seconds
        again_at = now + lease * RENEW_AT
        operation.renew_at = now + lease  # not before its answer: a slow store would get ever more renewals
        change = swap(operation.record, Event.RENEW, Actor.OWNER, lease_seconds=lease)
        ticket = QuietTicket(change, lambda done: self._renewed(operation, done, again_at, tally))
        try:
            self._engine.router.submit(ticket)
        except StoreError:
            operation.renew_at = again_at

    def _renewed(self, operation: Operation, done: Ticket, again_at: float, tally: _Tally) -> None:
        operation.renew_at = again_at
        tally.renewed += done.result is not None
        tally.waiting -= 1
        if tally.waiting == 0 and tally.renewed and self._engine.emitter.wants(events.LeaseRenewed):
            self._engine.emitter.emit(events.LeaseRenewed(rows=tally.renewed))
        if done.error is None and done.result is None and operation.owner in self._live:
            # Not renewed: the lease is lost, or another transaction holds the row. Read the row to know.
            at = (operation.record.scope, operation.record.key)
            self._engine.router.submit(QuietTicket(at, lambda seen: self._suspected(operation, seen)))

    def _suspected(self, operation: Operation, seen: Ticket) -> None:
        record: Record | None = seen.result
        if seen.error is not None or operation.owner not in self._live:
            return
        if record is not None and record.owner == operation.owner and record.state in FINAL:
            # This owner's end is stored, and the answer was lost: the storing finds it. There is no lease to renew.
            operation.renew_at = math.inf
            return
        if record is None or record.owner != operation.owner or record.state is not State.IN_PROGRESS:
            operation.lost = True
            self.unwatch(operation)
            self._engine.emitter.emit(events.LeaseLost(*about(operation.record), move=Event.RENEW))

    def _store_unfinished(self) -> None:
        with self._storing:  # the keeper's thread and close() take turns
            while self._unfinished:
                item = self._unfinished.pop(0)
                flow = self._engine.finish(item.operation, item.event, item.response, item.reason)
                try:
                    self._engine.run_blocking(flow, item.operation.policy.begin_seconds)
                except OperatorError:
                    # The store is down, or only this outcome cannot be stored: at the next look the others come first.
                    self._unfinished.append(item)
                    return
                except BaseException:
                    self._unfinished.append(item)
                    raise
                if item.operation.enlisted is not None:  # commit='caller': the app has still to end the transaction
                    self._unfinished.append(item)
                    return
                self.unwatch(item.operation)
                self._renew_due()  # storing may have taken long

    def open(self) -> None:
        """Start again, after a close."""
        self._closing = False
        self._thread = None  # an old thread ends when it sees that it was replaced
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
            _log.exception("outcomes could not be stored at the close")

    def after_fork(self) -> None:
        """In a child: running handlers and the thread belong to the parent."""
        self._live = {}
        self._unfinished = []
        self._thread = None
        self._storing = threading.Lock()
        self._wake = threading.Event()
