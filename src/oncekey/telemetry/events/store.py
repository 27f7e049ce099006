"""Events of the store: its failures, the queue and the circuit breaker in front of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from logging import ERROR

from oncekey.telemetry.events.base import Event, StoreEvent


@dataclass(frozen=True, slots=True)
class StoreFailed(StoreEvent):
    """The store failed, or did not answer in time. ``requests``: how many requests failed by it.

    A failed batch of reservations is one line in the log, with the number of its requests. Hooks and exporters get that
    event with 0 requests, and then an event of each request, which is not logged. So the counter has the number of
    requests. A line that repeats, with whatever number, is logged once a minute.
    """

    metric = "api.idempotency.store.error.count"
    level = ERROR
    unit = "{request}"
    requests: int = field(default=1, compare=False)

    @property
    def amount(self) -> int:
        return self.requests


@dataclass(frozen=True, slots=True)
class QueueFull(StoreEvent):
    """The queue in front of the store was full: a request was refused."""

    metric = "api.idempotency.store.queue_full.count"
    level = ERROR


@dataclass(frozen=True, slots=True)
class BreakerOpened(StoreEvent):
    """The store failed too often: requests are refused without asking it."""

    metric = "api.idempotency.breaker.opened.count"
    level = ERROR


@dataclass(frozen=True, slots=True)
class BreakerClosed(Event):
    """The store answers again."""

    metric = "api.idempotency.breaker.closed.count"
    level = ERROR  # as BreakerOpened, so that an operator sees the end of the alarm
