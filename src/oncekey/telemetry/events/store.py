"""Events of the store: its failures, the queue and the circuit breaker in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from logging import ERROR

from oncekey.telemetry.events.base import Event, StoreEvent


@dataclass(frozen=True, slots=True)
class StoreFailed(StoreEvent):
    """The store failed, or did not answer in time."""

    metric = "api.idempotency.store.error.count"
    level = ERROR


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
