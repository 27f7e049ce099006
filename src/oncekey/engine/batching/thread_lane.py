"""Group commit: turns many callers into few batches.

A **thread lane** is a thread with its own store connection. While it commits one batch, callers queue up. Then it takes
all of them as the next batch. The more callers there are, the more of them share one statement, one round trip and one
fsync. At one caller a lane costs what the direct call costs. Only the lane touches its connection, so a caller that is
cancelled leaves nothing half-read behind (hazard 4).

What a lane promises its callers:

* every ticket gets an outcome, also while the store is down;
* a batch that fails as a whole is tried again row by row, so that one bad row fails alone (hazard 25);
* a batch whose answer was lost is sent again: the owner tokens tell what happened (hazards 8 and 9);
* a reservation whose caller has left is undone, at once or when the store answers again.

``router.py`` starts the lanes, refuses tickets when a queue is full, and ends the lanes.
"""

from __future__ import annotations

import logging
import queue
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from oncekey.core.record import Found, Reservation
from oncekey.core.states import Event, State
from oncekey.core.swaps import Swap, undo
from oncekey.engine.batching.batch import MAX_BATCH, batches
from oncekey.engine.batching.ticket import AsyncTicket, Ticket, mark_asked
from oncekey.engine.batching.verbs import Report, verbs_of
from oncekey.errors import OnceKeyError, SchemaError, StoreError, StoreUnavailable
from oncekey.stores.api import SharedCommit, Store
from oncekey.stores.cache.front import Cache

_log = logging.getLogger("oncekey")

UNDO = "undo"
"""The verb of a report about reservations whose caller has left."""
CLOSED = "this OnceKey is closed"
_RETRY_SECONDS = 1.0
"""How often an idle lane tries again to undo reservations whose caller has left."""


class _Signal(Enum):
    """What a queue holds besides tickets."""

    WAKE = "there is a reservation to undo"
    STOP = "end when the queue is empty"


class ThreadLane:
    """One thread, one connection, one queue."""

    def __init__(
        self,
        store: Store,
        on_error: Report,
        prepare: Callable[[], None],
        cache: Cache | None = None,
    ) -> None:
        self._queue: queue.SimpleQueue[list[Ticket] | _Signal] = queue.SimpleQueue()
        self._gathered: dict[AbstractEventLoop, list[Ticket]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self.queued = 0
        self._store = store
        self._shared_commit = store if isinstance(store, SharedCommit) and cache is None else None
        self._on_error = on_error
        self._prepare = prepare
        self._ready = False
        self._failing = False  # the last call of the store failed, and that is reported
        self._loop_failures: list[tuple[str, Exception]] = []
        self._verbs = verbs_of(store, cache)
        self._to_undo: dict[tuple[str, Event], Swap] = {}  # by owner token: the reservations to undo
        self.thread = threading.Thread(target=self._run, name="oncekey-lane", daemon=True)
        self.thread.start()

    # -- queueing ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """This lane has run ``prepare``."""
        return self._ready

    def gather(self, ticket: AsyncTicket) -> None:
        """Queue all tickets of one turn of an event loop together, so this thread wakes up once and not for each."""
        ticket.arm()
        gathered = self._gathered.get(ticket.loop)
        if not gathered or gathered[0].left():  # left: the loop never ran _flush
            ticket.loop.call_soon(self._flush, ticket.loop)
            gathered = self._gathered.setdefault(ticket.loop, [])
        gathered.append(ticket)
        self.queued += 1

    def _flush(self, loop: AbstractEventLoop) -> None:
        if gathered := self._gathered.pop(loop, None):
            self.queued -= len(gathered)
            self.enqueue(gathered)

    def enqueue(self, tickets: list[Ticket]) -> None:
        with self._lock:
            if not self._stopped:
                self.queued += len(tickets)
                self._queue.put(tickets)
                return
        self._fail("any", [tickets], StoreUnavailable(CLOSED))
        self._deliver(tickets)

    def stop(self) -> None:
        """Refuse tickets from now on. The lane still does what is gathered or queued."""
        for loop in list(self._gathered):
            self._flush(loop)
        with self._lock:
            self._stopped = True
            self._queue.put(_Signal.STOP)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        more = True
        while more:
            tickets: list[Ticket] = []
            try:
                more = self._collect(tickets)
                if tickets or self._loop_failures:
                    self._process(tickets)
                while self._to_undo and self._undo() and not more:
                    pass  # at the end, undo everything that can be undone
            except BaseException as error:  # a bug of ours: the lane must live, and its callers get an error
                _log.exception("a lane failed unexpectedly; it goes on")
                # Tickets that already have a result are not failed: a handler may have it by now.
                self._fail("any", [[each for each in tickets if each.result is None and each.error is None]], error)
                self._deliver(tickets)
                more = not (self._stopped and self._queue.empty())
        self._store.disconnect()

    def _collect(self, into: list[Ticket]) -> bool:
        """Take the queued tickets; wait if there are none. False: the lane must end."""
        try:
            item = self._queue.get(timeout=_RETRY_SECONDS if self._to_undo else None)
            while isinstance(item, list):
                with self._lock:
                    self.queued -= len(item)
                # A reservation whose caller has left is dropped. Every other ticket still matters.
                for ticket in item:
                    if not (isinstance(ticket.work, Reservation) and ticket.left()):
                        into.append(ticket)
                    elif ticket.asked:
                        self._undo_later(undo(ticket.work))
                if len(into) >= MAX_BATCH:
                    return True
                item = self._queue.get_nowait()
        except queue.Empty:
            return True
        return item is not _Signal.STOP

    def _process(self, tickets: list[Ticket]) -> None:
        """Run the tickets verb by verb, then deliver the outcomes."""
        asked: dict[str, list[list[list[Ticket]]]] = {}
        for kind, verb, _ in self._verbs:
            of_verb = [ticket for ticket in tickets if isinstance(ticket.work, kind)]
            asked[verb] = list(batches(of_verb)) if len(of_verb) > 1 else [[of_verb]] if of_verb else []
        begins, ends = asked["reserve"], asked["swap"]
        if self._shared_commit is not None:
            while begins and ends and self._answer_together(self._shared_commit, begins[0], ends[0]):
                del begins[0], ends[0]
        for _, verb, call in self._verbs:
            for places in asked[verb]:
                self._answer(verb, call, places)
        if self._loop_failures:
            self._report_loop_failures()
        self._deliver(tickets)

    def _answer_together(self, store: SharedCommit, begins: list[list[Ticket]], ends: list[list[Ticket]]) -> bool:
        """Run both in one commit. False: it failed, and the caller runs each by itself."""
        wanted, changes = [place[0].work for place in begins], [place[0].work for place in ends]
        try:
            found, moved = self._ask(lambda work: list(store.both(*work)), [wanted, changes])
        except Exception:
            mark_asked([*begins, *ends])
            return False
        for place, result in zip([*begins, *ends], [*found, *moved], strict=True):
            for ticket in place:
                ticket.result = result
        return True

    def _answer(self, verb: str, call: Callable[[list[Any]], list[Any]], places: list[list[Ticket]]) -> None:
        work = [place[0].work for place in places]
        try:
            results = self._ask(call, work)
        except StoreUnavailable as error:
            # The batch or its answer was lost. Asking again is safe, and shows which of the two.
            mark_asked(places)
            try:
                results = self._ask(call, work)
            except Exception:
                return self._fail(verb, places, error)
        except SchemaError as error:
            return self._fail(verb, places, error)
        except Exception as error:
            if len(places) == 1:
                return self._fail(verb, places, error)
            mark_asked(places)
            for place in places:
                self._answer(verb, call, [place])
            return None
        for place, result in zip(places, results, strict=True):
            for ticket in place:
                ticket.result = result
        self._look_for_claims(places)
        return None

    def _look_for_claims(self, places: list[list[Ticket]]) -> None:
        """Find claims that moved their row the first time, when the answer was lost. Asked again, they found nothing to
        move. Such a row has the claim's owner token, and only this caller can finish it."""
        claims = [(place, claim) for place in places if (claim := place[0].lost_claim()) is not None]
        if not claims:
            return
        try:
            rows = self._ask(self._store.read, [(claim.scope, claim.key) for _, claim in claims])
        except Exception as error:
            self._fail("read", [place for place, _ in claims], error)
            return
        for (place, claim), row in zip(claims, rows, strict=True):
            if row is not None and row.owner == claim.new_owner and row.state is State.IN_PROGRESS:
                for ticket in place:
                    ticket.result = row

    def _ask(self, call: Callable[[list[Any]], list[Any]], work: list[Any]) -> list[Any]:
        if not self._ready:
            self._prepare()
            self._ready = True
        results = call(work)
        self._failing = False
        return results

    def _fail(self, verb: str, places: list[list[Ticket]], error: BaseException) -> None:
        if not isinstance(error, OnceKeyError):
            # The message is left out: a driver's message may contain the key or the body (hazard 28).
            error = StoreError(f"the store failed in '{verb}' with {type(error).__name__}")
        # A ticket with a Found has its result, and its reservation is in use.
        failed = [ticket for place in places for ticket in place if not isinstance(ticket.result, Found)]
        self._failing = True
        self._on_error(verb, error, len(failed))
        for ticket in failed:
            ticket.error = error
            if isinstance(ticket.work, Reservation | Swap):
                self._undo_later(undo(ticket.work))

    def _report_loop_failures(self) -> None:
        """Report failures of a loop lane whose work this lane could do. If it could not, that is reported already."""
        failures, self._loop_failures = self._loop_failures, []
        if not self._failing:
            for verb, error in failures[-1:]:
                self._on_error(verb, error, 0)

    # -- undoing reservations ------------------------------------------------------------------------------------

    def _undo_later(self, change: Swap | None) -> None:
        if change is not None and len(self._to_undo) < MAX_BATCH * 40:
            self._to_undo[change.owner, change.event] = change

    def _undo(self) -> bool:
        """Undo the reservations of callers that have left. False: the store cannot be reached, or refuses all calls.

        No request fails by this. While the store is down, the lane tries every second, and reports it once."""
        wanted = list(self._to_undo.values())[:MAX_BATCH]
        batch = list({(change.scope, change.key): change for change in wanted}.values())
        try:
            self._ask(self._store.swap, batch)
        except (StoreUnavailable, SchemaError) as error:
            if not self._failing:
                self._failing = True
                self._on_error(UNDO, error, 0)
            return False
        except Exception as error:
            self._on_error(UNDO, error, 0)
            for change in batch:  # one of them is bad; the others are undone without it
                try:
                    self._ask(self._store.swap, [change])
                except StoreUnavailable:
                    return False
                except Exception:  # noqa: S110 - on_error has this already
                    pass
        for change in batch:
            del self._to_undo[change.owner, change.event]
        return True

    # -- delivering ----------------------------------------------------------------------------------------------

    def _deliver(self, tickets: list[Ticket]) -> None:
        by_loop: dict[AbstractEventLoop, list[Ticket]] = {}
        for ticket in tickets:
            if ticket.left():
                self.caller_left(ticket)
            elif isinstance(ticket, AsyncTicket):
                by_loop.setdefault(ticket.loop, []).append(ticket)
            else:
                self._hand_over(ticket)
        for loop, theirs in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._hand_over_all, theirs)  # one wake-up for the whole batch
            except RuntimeError:  # the loop is closed, so all its callers have left
                for ticket in theirs:
                    self.caller_left(ticket)

    def _hand_over_all(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._hand_over(ticket)

    def _hand_over(self, ticket: Ticket) -> None:
        try:
            taken = ticket.deliver()
        except Exception:
            _log.exception("a result could not be delivered to its caller")
            return
        if not taken:
            self.caller_left(ticket)

    def caller_left(self, ticket: Ticket) -> None:
        """The caller has left: undo what its ticket reserved or claimed."""
        work = ticket.work
        if isinstance(work, Reservation | Swap) and _took(work, ticket.result):
            self.undo(work)

    def undo(self, work: Reservation | Swap) -> None:
        """Undo a reservation or a claim whose caller has left."""
        self._undo_later(undo(work))
        self._queue.put(_Signal.WAKE)

    def take_over(self, tickets: list[AsyncTicket], failure: tuple[str, Exception] | None = None) -> None:
        """Take over tickets that a loop lane could not answer. Their batch may have committed, so the lane undoes
        reservations whose caller is gone. ``failure``: the verb and the error, if the store failed in the loop."""
        if failure is not None:
            self._loop_failures.append(failure)
        for ticket in tickets:
            ticket.asked = True
            if not (ticket.left() or ticket.loop.is_closed()):
                ticket.arm()
        self.enqueue(list(tickets))


def _took(work: Reservation | Swap, result: Any) -> bool:
    if isinstance(work, Reservation):
        return isinstance(result, Found) and result.record is not None and result.record.owner == work.owner
    return result is not None and work.new_owner is not None
