"""The names, units and buckets of every metric, once for all exporters.

Counters are not listed here: every event is one (``events``). A name has dots and no unit, as OpenTelemetry writes it.
Prometheus makes ``api_idempotency_begin_duration_seconds`` of ``api.idempotency.begin.duration`` and the unit ``s``. So
both exporters have the same names in Prometheus, and the alerts and the dashboard fit both. The labels of OpenTelemetry
have a prefix there, which the setting in docs/tracing.md removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from oncekey.core.values import value
from oncekey.telemetry import events
from oncekey.telemetry.events import Event, JobEvent, KeyEvent, StoreEvent

PREFIX = "api.idempotency"
SECONDS = "s"
KEYS = "{key}"


@value
class Instrument:
    """A histogram, if it has ``buckets``; otherwise a gauge."""

    name: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BY_OPERATION = ("operation",)


def _named(name: str, unit: str, about: str, labels: tuple[str, ...], buckets: tuple[float, ...] = ()) -> Instrument:
    return Instrument(f"{PREFIX}.{name}", unit, about, labels, buckets)


# What each process measures.
BEGIN = _named(
    "begin.duration",
    SECONDS,
    "How long it took to read or reserve a key, and to count it for limits.",
    _BY_OPERATION,
    _QUICK,
)
FINISH = _named("finish.duration", SECONDS, "How long it took to store the end of an attempt.", _BY_OPERATION, _QUICK)
HANDLER = _named("handler.duration", SECONDS, "How long the handler of a request ran.", _BY_OPERATION, _SLOW)
BATCH = _named(
    *("batch.size", KEYS, "How many keys one statement of the store had."),
    *(("verb",), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)),
)
AGE = _named(
    *("unknown.age", SECONDS, "The age of a key with an unknown outcome when it was settled."),
    *(_BY_OPERATION, (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)),
)
HISTOGRAMS = (BEGIN, FINISH, HANDLER, BATCH, AGE)

RUNNING = _named("handler.running", "{request}", "Handlers that are running, in all processes.", _BY_OPERATION)
BREAKER = _named("breaker.open", "{process}", "Processes whose circuit breaker refuses requests.", ())
PROCESS_GAUGES = (RUNNING, BREAKER)

# What upkeep reads from the store, for all processes. A store counts each of them up to 10,000.
STORE_UP = _named("store.up", "{store}", "1 if upkeep could read the numbers of the store, otherwise 0.", ())
BY_STATE = _named("keys", KEYS, "Keys that are in progress, pending or unknown.", ("state",))
UNKNOWN = _named("unknown.keys", KEYS, "Keys whose outcome is unknown: the 20 operations with the most.", _BY_OPERATION)
DEAD = _named("dead_letters", "{letter}", "Keys and jobs that an operator must look at.", ("kind",))
OLDEST_UNKNOWN = _named("unknown.oldest", SECONDS, "The age of the oldest key whose outcome is unknown.", ())
LEASE_OVER = _named("sweeper.lag", SECONDS, "How long the oldest expired lease has waited for the sweeper.", ())
EXPIRED_OVER = _named("reaper.lag", SECONDS, "How long the oldest expired key has waited for the reaper.", ())
RECONCILE_OVER = _named("reconciler.lag", SECONDS, "How long the oldest due unknown key has waited.", ())
OUTBOX_READY = _named("outbox.ready", "{job}", "Jobs of the outbox that are due and not running.", ())
OUTBOX_LAG = _named("outbox.lag", SECONDS, "How long the oldest due job of the outbox has waited.", ())
STORE_GAUGES = (
    *(STORE_UP, BY_STATE, UNKNOWN, DEAD, OLDEST_UNKNOWN),
    *(LEASE_OVER, EXPIRED_OVER, RECONCILE_OVER, OUTBOX_READY, OUTBOX_LAG),
)

Reading = tuple[Instrument, tuple[str, ...], float]
"""A gauge, the values of its labels, and its number."""
Readings = Callable[[], Iterable[Reading]]


def _kinds() -> tuple[type[Event], ...]:
    bases = (Event, KeyEvent, JobEvent, StoreEvent)
    found = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]
    return tuple(kind for kind in found if kind not in bases)


COUNTERS = _kinds()
"""Every event."""
USUAL: tuple[type[Event], ...] = (
    *(events.Reserved, events.Replayed, events.FoundInFlight, events.Misused, events.Retried, events.FoundUnknown),
    *(events.StoreFailed, events.ZombieFound, events.Pruned),
    *(events.ReconcileScheduled, events.ReconcileResolved, events.ReconcileFailed),
)
"""The twelve counters that any idempotency layer has. They begin at 0 for every listed route, so that the first event
is an increase."""


def counter_name(kind: type[Event]) -> str:
    return kind.metric.removesuffix(".count")


def counter_help(kind: type[Event]) -> str:
    """The first sentence of the event's docstring, in one line."""
    words = " ".join((kind.__doc__ or "").split())
    return words.partition(". ")[0].rstrip(".") + "."
