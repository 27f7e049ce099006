"""The engine of an app that has exporters of metrics or traces: it measures, and tells them.

An app without exporters has a plain Engine, which measures nothing and asks nothing. So everything here is a subclass
of a part of the engine, and the plain part has no line for it.

=====================  =====================================  ====================================================
what                   where it is measured                   the exporter's method
=====================  =====================================  ====================================================
a question for a key   the router on the flat way, otherwise  ``began``
                       the flow ``Engine.begin``
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

from oncekey.core.decision import Decision, TurnedAway, Unreadable, decide
from oncekey.core.policy import Policy
from oncekey.core.record import Found, Record, Reservation, StoredResponse
from oncekey.core.states import Event
from oncekey.core.swaps import End, Swap
from oncekey.engine.admission import Admission
from oncekey.engine.batching.router import Router
from oncekey.engine.batching.thread_lane import ThreadLane
from oncekey.engine.batching.ticket import Work, whole
from oncekey.engine.engine import Engine
from oncekey.engine.flows import Finished, Flow
from oncekey.engine.operation import Operation, _current
from oncekey.engine.process import Owners
from oncekey.errors import OperatorError
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
        self._in_flows: set[str] = set()
        self.router_type = partial(ObservedRouter, self._exporters, self._in_flows)  # type: ignore[assignment]
        for exporter in exporters:
            emitter.add(exporter)
        super().__init__(store, emitter=emitter, **options)
        self.enter = self._enter
        for exporter in exporters:
            if exporter.traces:
                self.owners = TracedOwners(partial(answer, exporter, "trace_context", ""))

    def know_routes(self, operations: Callable[[], Sequence[str]]) -> None:
        super().know_routes(operations)
        tell(self._exporters, "routes", operations())

    def begin(
        self,
        wanted: Reservation,
        policy: Policy,
        first: Found | None = None,
        admission: Admission | None = None,
    ) -> Flow[Decision]:
        questions = Questions(self._exporters, self._in_flows, admission)
        return super().begin(wanted, policy, first, questions)  # type: ignore[arg-type]  # it has what begin() uses

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


class Questions:
    """Stands before the admission of a request, and measures each question of ``Engine.begin`` for the key as a whole:
    reading the row, counting for limits, and reserving the key.

    The flow runs in the context of its request, so an exporter of traces finds the request's own span there.
    """

    over = False
    """``Engine.begin`` asks here again, if it has to look again."""

    def __init__(self, exporters: Sequence[Exporter], in_flows: set[str], admission: Admission | None) -> None:
        self._exporters = exporters
        self._in_flows = in_flows
        self._admission = admission
        """None: a key that is not known may be reserved."""

    def first_answer(self, wanted: Reservation) -> Flow[Found | TurnedAway]:
        began_ns, began = time.time_ns(), time.monotonic()
        answer: Found | TurnedAway | None = None
        self._in_flows.add(wanted.owner)
        try:
            if self._admission is None or self._admission.over:
                answer = yield wanted
            else:
                answer = yield from self._admission.first_answer(wanted)
            return answer
        finally:
            self._in_flows.discard(wanted.owner)
            asked = _asked(self._exporters, wanted, began_ns, time.monotonic() - began, answer)
            tell(self._exporters, "began", asked)


class ObservedRouter(Router):
    """``in_flows``: the owners whose reservation a flow measures (:class:`Questions`). The router measures the others,
    which are those of the flat way."""

    def __init__(self, exporters: Sequence[Exporter], in_flows: set[str], store: Store, **options: Any) -> None:
        super().__init__(store, **options)
        self._exporters = exporters
        self._in_flows = in_flows

    def ask(self, work: Work, loop: asyncio.AbstractEventLoop, timeout: float) -> asyncio.Future[Any]:
        if not isinstance(work, Reservation | End) or (isinstance(work, Reservation) and work.owner in self._in_flows):
            return super().ask(work, loop, timeout)
        if isinstance(work, End) and isinstance(work.of, Operation):
            handled(self._exporters, work.of)
        began_ns, began = time.time_ns(), time.monotonic()
        try:
            future = super().ask(work, loop, timeout)
        except OperatorError:
            self._answered(work, began_ns, began, None)
            raise
        # The callback runs in a copy of this context: an exporter of traces finds the request's own span there.
        future.add_done_callback(partial(self._answered, work, began_ns, began))
        return future

    def _answered(
        self, work: Reservation | End, began_ns: int, began: float, future: asyncio.Future[Any] | None
    ) -> None:
        """``future`` None: the router did not take the work."""
        seconds = time.monotonic() - began
        failed = future is None or future.cancelled() or future.exception() is not None
        result = None if future is None or failed else future.result()
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
    """``result``: what a lane or an admission answered; None: it did not. Only traces need the decision, which costs a
    Record."""
    if isinstance(result, TurnedAway):
        return Asked(wanted.operation, began_ns, seconds, WORDS[TurnedAway])
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
