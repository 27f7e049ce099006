"""What an exporter is told, and the part that all exporters of metrics share.

An exporter is one module and one line in ``registry.py``. It subclasses :class:`Metrics` and writes three methods:
``add``, ``record`` and ``shift``. An exporter of traces overrides the methods of :class:`Exporter` as well. Without an
exporter none of this is imported by a request, and nothing is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from oncekey.core.jobs import Job
from oncekey.core.record import tenant_of
from oncekey.core.values import value
from oncekey.errors import ConfigurationError
from oncekey.telemetry import events, instruments
from oncekey.telemetry.bounds import Busiest, FirstSeen
from oncekey.telemetry.events import Event
from oncekey.telemetry.instruments import Instrument, Readings

_log = logging.getLogger("oncekey")
_T = TypeVar("_T")

MAX_OPERATIONS = 200
"""How many operations have series of their own. If the app lists no routes, every path counts as an operation."""
MAX_TENANTS = 1_000
FAILED = "failed"
"""The word of :class:`Asked` for a question without an answer."""


class Attempt(Protocol):
    """The operation of a running handler, as far as exporters need it."""

    observed: Any
    """Free for exporters: each keeps its own value under its own name. None: nothing is kept yet."""

    @property
    def name(self) -> str: ...
    @property
    def attempt(self) -> int: ...


@value
class Asked:
    """A question of a request to the store, after it was answered."""

    operation: str
    began_ns: int
    """Nanoseconds since the epoch."""
    seconds: float
    decision: str
    """What the answer means for the request, in one word, such as ``execute``. ``failed``: none came. Empty: it was not
    decided yet."""
    other_owner: str | None = None
    """The owner token in the row, if another attempt had reserved the key. It carries that attempt's trace context."""


class Exporter:
    """Everything that can be told. Each method may be overridden, and must be quick: it runs inside of requests.

    What a method raises is logged once per method, and the app or the request goes on. The functions that
    :meth:`around_effect` and :meth:`around_job` return are a part of the work: what these raise, the work raises.
    """

    traces: ClassVar[bool] = False
    """Whether :meth:`trace_context` returns something."""
    serves: ClassVar[bool] = False
    """Whether :meth:`serve` exists: a server can fetch the metrics."""

    def on_event(self, event: Event) -> None:
        """Something happened."""

    def began(self, asked: Asked) -> None:
        """The store answered the question for a key. Called in the context of the request."""

    def entered(self, attempt: Attempt) -> None:
        """The handler begins. Called inside of the context in which the handler will run."""

    def handled(self, attempt: Attempt, seconds: float) -> None:
        """The handler has answered or raised. Called once, before its end is stored."""

    def finished(self, asked: Asked) -> None:
        """The end of an attempt is stored, or could not be."""

    def batch(self, verb: str, keys: int) -> None:
        """The store was asked about so many keys in one statement."""

    def around_effect(self, name: str, attempt: Attempt, work: Callable[..., _T]) -> Callable[..., _T]:  # noqa: ARG002
        """The function that is called in place of an effect's own. It may return an awaitable, as ``work`` may."""
        return work

    def around_job(self, job: Job, work: Callable[..., _T]) -> Callable[..., _T]:  # noqa: ARG002
        """The same for the task of a job."""
        return work

    def trace_context(self) -> str:
        """The trace in which the caller runs, as text for an owner token. Empty: none."""
        return ""

    def expect(self, operations: Iterable[str]) -> None:
        """These operations exist: show their counters from the beginning, with 0."""

    def routes(self, operations: Iterable[str]) -> None:
        """All routes of an app that is about to start, with the patterns of their paths: ``POST /orders/{id}``."""

    def show_store(self, read: Readings | None) -> None:
        """Upkeep runs in this process: show the numbers that ``read`` returns. It asks the store, and blocks.
        None: upkeep has ended."""

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Serve the metrics over HTTP in a thread. Returns the function that ends it."""
        raise NotImplementedError  # pragma: no cover


def tell(exporters: Sequence[Exporter], method: str, *what: Any) -> None:
    """Call a method of every exporter. One that raises harms neither the request nor the other exporters."""
    for exporter in exporters:
        answer(exporter, method, None, *what)


def answer(exporter: Exporter, method: str, otherwise: _T, *what: Any) -> _T:
    """What a method of the exporter returns, or ``otherwise`` if it raises."""
    try:
        returned: _T = getattr(exporter, method)(*what)
    except Exception:  # noqa: BLE001 - of whatever kind: telemetry must not break a request
        reported: set[str] = vars(exporter).setdefault("_oncekey_reported", set())
        if method not in reported:  # once: a broken exporter fails at every request
            reported.add(method)
            _log.exception(
                "the exporter %s failed in %s(): requests go on without it; later failures of this method are not "
                "logged",
                *(type(exporter).__name__, method),
            )
        return otherwise
    return returned


class Metrics(Exporter):
    """Turns what is told into counters, histograms and gauges, with bounded labels.

    ``tenants``: how many tenants have counters of their own; all others are counted as ``other``. 0: the counters have
    no label ``tenant``.
    """

    def __init__(self, *, tenants: int = 0, fixed_tenants: bool = False) -> None:
        if tenants not in range(MAX_TENANTS + 1):
            raise ConfigurationError(f"tenants={tenants!r}: it takes 0 to {MAX_TENANTS}, each is a series per counter")
        self.tenants = tenants
        self._operations = FirstSeen(MAX_OPERATIONS)
        self._tasks = FirstSeen(MAX_OPERATIONS)
        self._busiest = Busiest(max(1, tenants), partial(self._guarded, "drop_tenant"), fixed=fixed_tenants)

    # -- what an exporter of metrics writes

    def add(self, kind: type[Event], labels: tuple[str, ...], amount: int) -> None:
        """Increase the counter of this event. ``labels``: the values of :meth:`label_names`."""
        raise NotImplementedError  # pragma: no cover

    def record(self, histogram: Instrument, labels: tuple[str, ...], number: float) -> None:
        raise NotImplementedError  # pragma: no cover

    def shift(self, gauge: Instrument, labels: tuple[str, ...], by: int) -> None:
        """Change a gauge of this process."""
        raise NotImplementedError  # pragma: no cover

    def drop_tenant(self, tenant: str) -> None:
        """This tenant is counted as ``other`` from now on: drop its series, if that is possible."""

    # -- what they share

    def _guarded(self, method: str, *what: Any) -> None:
        """Call a method that the exporter wrote. The log names it if it raises, and what follows is still done."""
        answer(self, method, None, *what)

    def label_names(self, kind: type[Event]) -> tuple[str, ...]:
        return (*kind.labels, "tenant") if self.tenants and _has_tenant(kind) else kind.labels

    def on_event(self, event: Event) -> None:
        kind = type(event)
        values = [self._bounded(name, getattr(event, name)) for name in kind.labels]
        if self.tenants and _has_tenant(kind):
            scope: str = getattr(event, "scope")  # noqa: B009 - not every event has one
            values.append(self._busiest.label(tenant_of(scope)))
        self._guarded("add", kind, tuple(values), event.amount)
        if isinstance(event, events.ReconcileResolved):
            self._guarded("record", instruments.AGE, (values[0],), event.age_seconds)
        elif isinstance(event, events.BreakerOpened):
            self._guarded("shift", instruments.BREAKER, (), 1)
        elif isinstance(event, events.BreakerClosed):
            self._guarded("shift", instruments.BREAKER, (), -1)

    def _bounded(self, name: str, text: str) -> str:
        if name == "operation":
            return self._operations.label(text)
        return self._tasks.label(text) if name == "task" else text

    def began(self, asked: Asked) -> None:
        self._guarded("record", instruments.BEGIN, (self._operations.label(asked.operation),), asked.seconds)

    def entered(self, attempt: Attempt) -> None:
        self._guarded("shift", instruments.RUNNING, (self._operations.label(attempt.name),), 1)

    def handled(self, attempt: Attempt, seconds: float) -> None:
        operation = self._operations.label(attempt.name)
        self._guarded("shift", instruments.RUNNING, (operation,), -1)
        self._guarded("record", instruments.HANDLER, (operation,), seconds)

    def finished(self, asked: Asked) -> None:
        self._guarded("record", instruments.FINISH, (self._operations.label(asked.operation),), asked.seconds)

    def routes(self, operations: Iterable[str]) -> None:
        self._operations.know(operations)

    def batch(self, verb: str, keys: int) -> None:
        self._guarded("record", instruments.BATCH, (verb,), float(keys))

    def expect(self, operations: Iterable[str]) -> None:
        operations = tuple(operations)
        for kind in instruments.USUAL:
            if not kind.labels:
                self._guarded("add", kind, (), 0)
            elif kind.labels == ("operation",) and not self.tenants:
                for operation in operations:
                    self._guarded("add", kind, (self._operations.label(operation),), 0)
        self._guarded("add", events.StoreFailed, ("reserve",), 0)
        self._guarded("shift", instruments.BREAKER, (), 0)


def _has_tenant(kind: type[Event]) -> bool:
    return "scope" in kind.__dataclass_fields__
