"""The engine of an app that has exporters of metrics or traces: it measures, and tells them.

An app without exporters has a plain Engine, which measures nothing and asks nothing. So everything here is a subclass
of a part of the engine, and the plain part has no line for it.

=====================  =====================================  ====================================================
what                   where it is measured                   the exporter's method
=====================  =====================================  ====================================================
a question for a key   the router, and the ticket of a        ``began``
                       thread
the handler            the context in which it runs, until    ``entered``, ``handled``
                       its end is to be stored
storing its end        the router on the flat way, otherwise  ``finished``
                       the flow ``Engine.finish``
batches                the lanes                              ``batch``
=====================  =====================================  ====================================================
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from oncekey.core.decision import Decision, Unreadable, decide
from oncekey.core.record import Found, Record, Reservation, StoredResponse
from oncekey.core.states import Event
from oncekey.core.swaps import End, Swap
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.thread_lane import ThreadLane
from oncekey.engine.batching.ticket import SyncTicket, Work, whole
from oncekey.engine.engine import Engine
from oncekey.engine.flows import Finished, Flow
from oncekey.engine.operation import Operation, _current
from oncekey.engine.process import Owners
from oncekey.stores.api import InLoop, Store
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.exporter import FAILED, Asked, Exporter, answer, tell

WORDS: Mapping[type, str] = {
    kind: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Decision)
}
"""A decision in one word: ``execute``, ``turned_away``."""


class ObservedEngine(Engine):
    """``exporters``: whom to tell. Their methods are named in the table above."""

    def __init__(self, exporters: Sequence[Exporter], store: Store, *, emitter: Emitter, **options: Any) -> None:
        self._exporters = tuple(exporters)
        self.router_type = partial(ObservedRouter, self._exporters)  # type: ignore[assignment]
        for exporter in exporters:
            emitter.add(exporter)
        super().__init__(store, emitter=emitter, **options)
        self.sync_ticket = partial(ObservedTicket, self._exporters)
        self.enter = self._enter
        for exporter in exporters:
            if exporter.traces:
                self.owners = TracedOwners(partial(answer, exporter, "trace_context", ""))

    def know_routes(self, operations: Callable[[], Sequence[str]]) -> None:
        super().know_routes(operations)
        tell(self._exporters, "routes", operations())

    def _enter(self, operation: Operation) -> None:
        _current.set(operation)
        operation.observed = {"began": time.monotonic()}
        tell(self._exporters, "entered", operation)

    def finish(
        self, operation: Operation, event: Event, response: StoredResponse | None = None, reason: str | None = None
    ) -> Flow[Finished]:
        handled(self._exporters, operation)
        flow = super().finish(operation, event, response, reason)
        # The flow may run in a thread of oncekey's own. What is told belongs to the request that is here now.
        return self._timed(operation.name, event, flow, contextvars.copy_context())

    def _timed(self, name: str, event: Event, flow: Flow[Finished], context: contextvars.Context) -> Flow[Finished]:
        began_ns, began = time.time_ns(), time.monotonic()
        word = FAILED
        try:
            finished = yield from flow
            word = event.value if finished.stored else "lost"
            return finished
        finally:
            asked = Asked(name, began_ns, time.monotonic() - began, word)
            context.run(tell, self._exporters, "finished", asked)

    def around_effect(self, operation: Operation, name: str, work: Callable[[], Any]) -> Callable[[], Any]:
        """The function of an effect, inside of what each exporter puts around it."""
        for exporter in self._exporters:
            work = answer(exporter, "around_effect", work, name, operation, work)
        return work


def handled(exporters: Sequence[Exporter], operation: Operation) -> None:
    """The handler has ended. Later calls for the same operation, as by the keeper, do nothing."""
    if operation.observed is not None:
        tell(exporters, "handled", operation, time.monotonic() - operation.observed["began"])
        operation.observed = None


class ObservedRouter(Router):
    def __init__(self, exporters: Sequence[Exporter], store: Store, **options: Any) -> None:
        super().__init__(store, **options)
        self._exporters = exporters

    def ask(self, work: Work, loop: asyncio.AbstractEventLoop, timeout: float) -> asyncio.Future[Any]:
        if not isinstance(work, Reservation | End):
            return super().ask(work, loop, timeout)
        if isinstance(work, End) and isinstance(work.of, Operation):
            handled(self._exporters, work.of)
        began_ns, began = time.time_ns(), time.monotonic()
        future = super().ask(work, loop, timeout)
        # The callback runs in a copy of this context: an exporter of traces finds the request's own span there.
        future.add_done_callback(partial(self._answered, work, began_ns, began))
        return future

    def _answered(self, work: Reservation | End, began_ns: int, began: float, future: asyncio.Future[Any]) -> None:
        seconds = time.monotonic() - began
        failed = future.cancelled() or future.exception() is not None
        result = None if failed else future.result()
        if isinstance(work, Reservation):
            tell(self._exporters, "began", _asked(self._exporters, work, began_ns, seconds, result))
        elif isinstance(work.of, Operation):
            word = FAILED if failed else "lost" if result is None else Event.COMPLETE.value
            tell(self._exporters, "finished", Asked(work.of.name, began_ns, seconds, word))

    def _new_lane(self) -> ThreadLane:
        return ObservedLane(self._exporters, self._store, self._on_error, self.prepare, self._cache)

    def _connected(self, connection: InLoop) -> InLoop:
        return super()._connected(ObservedInLoop(self._exporters, connection))


def _asked(exporters: Sequence[Exporter], wanted: Reservation, began_ns: int, seconds: float, result: Any) -> Asked:
    """``result``: what a lane answered; None: it did not. Only traces need the decision, which costs a Record."""
    if result is None or not any(exporter.traces for exporter in exporters):
        return Asked(wanted.operation, began_ns, seconds, FAILED if result is None else "")
    found: Found = whole(wanted, result)
    decided = decide(found.record, wanted)
    # The flat way asks without the parts of the request. If a row needs them, because a deploy has changed the recipe
    # or the key of fingerprints, the general way compares, and no word is said here.
    compared = wanted.parts is not None or not isinstance(decided, Unreadable)
    decision = WORDS[type(decided)] if compared else ""
    record = found.record
    other = record.owner if record is not None and record.owner != wanted.owner else None
    return Asked(wanted.operation, began_ns, seconds, decision, other)


class ObservedTicket(SyncTicket):
    """Measures how long its thread waits. Told in that thread, so that the request's own span is the current one."""

    __slots__ = ("_exporters",)

    def __init__(self, exporters: Sequence[Exporter], work: Work) -> None:
        super().__init__(work)
        self._exporters = exporters

    def wait(self, timeout: float) -> Any:
        if not isinstance(self.work, Reservation):
            return super().wait(timeout)
        began_ns, began, found = time.time_ns(), time.monotonic(), None
        try:
            found = super().wait(timeout)
            return found
        finally:
            asked = _asked(self._exporters, self.work, began_ns, time.monotonic() - began, found)
            tell(self._exporters, "began", asked)


class ObservedLane(ThreadLane):
    def __init__(self, exporters: Sequence[Exporter], *parts: Any) -> None:
        self._exporters = exporters  # first: the thread starts in the next line
        super().__init__(*parts)

    def _ask(self, call: Callable[[list[Any]], list[Any]], work: list[Any]) -> list[Any]:
        results = super()._ask(call, work)
        first = work[0]
        if isinstance(first, list):
            tell(self._exporters, "batch", "both", sum(map(len, work)))
        elif isinstance(first, Reservation | Swap):
            tell(self._exporters, "batch", "reserve" if isinstance(first, Reservation) else "swap", len(work))
        return results


class ObservedInLoop:
    """The verbs of an event loop."""

    def __init__(self, exporters: Sequence[Exporter], store: InLoop) -> None:
        self._exporters = exporters
        self._store = store

    async def reserve(self, batch: Sequence[Reservation]) -> Sequence[float | Record | None]:
        found = await self._store.reserve(batch)
        tell(self._exporters, "batch", "reserve", len(batch))
        return found

    async def swap(self, batch: Sequence[End | Swap]) -> Sequence[float | None]:
        moved = await self._store.swap(batch)
        tell(self._exporters, "batch", "swap", len(batch))
        return moved

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[Sequence[float | Record | None], Sequence[float | None]]:
        answers = await self._store.both(begins, ends)
        tell(self._exporters, "batch", "both", len(begins) + len(ends))
        return answers

    def abandon(self) -> None:
        self._store.abandon()


class TracedOwners(Owners):
    """Owner tokens that carry the trace of their request. The row keeps the token, and so does every job."""

    def __init__(self, trace_context: Callable[[], str]) -> None:
        self._trace_context = trace_context
        super().__init__()

    def after_fork(self) -> None:
        super().after_fork()
        plain, trace_context = self.new, self._trace_context
        self.new = lambda: plain() + trace_context()
