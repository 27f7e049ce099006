"""Metrics and traces for OpenTelemetry: ``OnceKey(telemetry="otel")``.

It uses OpenTelemetry's API only. Your app sets up the SDK: without it, the API does nothing.

**Metrics** have the names of ``instruments.py``. Their attributes have the namespace of the spans: the label
``operation`` is ``idempotency.operation``. **Spans**, all inside of the request's own span:

* ``idempotency.begin``: the question for the key. A replay, and every other request that found the key, is *linked* to
  the trace of the attempt that has the key.
* ``idempotency.handler``: the handler runs. Spans that the app makes are inside of it.
* ``idempotency.effect``: one call of ``op.effect``.
* ``idempotency.finish``: the end of the attempt is stored.
* ``idempotency.job``: a worker runs a job. It is linked to the trace of the request that enqueued it.

The trace of an attempt is part of its owner token, which the row of the key and every job keep. So it needs no column,
and processes without this exporter ignore it. No span has a key or a message of an exception.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, TraceFlags, TracerProvider

from oncekey.core.jobs import Job
from oncekey.telemetry import instruments
from oncekey.telemetry.events import Event
from oncekey.telemetry.exporter import FAILED, Asked, Attempt, Metrics
from oncekey.telemetry.instruments import Instrument, Readings, counter_help, counter_name
from oncekey.telemetry.store_numbers import StoreNumbers

NAME = "oncekey"
_MARK = "."
"""Between an owner token and its trace. A token has hexadecimal digits and a hyphen."""
_NAMESPACE = "idempotency."
_HERE = "otel"
"""The place of this exporter in ``Attempt.observed``."""


class OpenTelemetry(Metrics):
    """``tenants``: as in ``Prometheus(tenants=…)``, but the first so many tenants keep their places."""

    traces = True

    def __init__(
        self,
        *,
        tenants: int = 0,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        super().__init__(tenants=tenants, fixed_tenants=True)
        self._tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider)
        meter = metrics.get_meter(NAME, meter_provider=meter_provider)
        self._counters = {
            kind: meter.create_counter(counter_name(kind), kind.unit, counter_help(kind))
            for kind in instruments.COUNTERS
        }
        self._histograms = {
            each.name: meter.create_histogram(
                each.name, each.unit, each.help, explicit_bucket_boundaries_advisory=each.buckets
            )
            for each in instruments.HISTOGRAMS
        }
        self._gauges = {
            each.name: meter.create_up_down_counter(each.name, each.unit, each.help)
            for each in instruments.PROCESS_GAUGES
        }
        self._store = StoreNumbers()
        for each in instruments.STORE_GAUGES:
            meter.create_observable_gauge(each.name, [self._observing(each)], each.unit, each.help)

    # -- metrics ---------------------------------------------------------------------------------------------------

    def add(self, kind: type[Event], labels: tuple[str, ...], amount: int) -> None:
        self._counters[kind].add(amount, _attributes(self.label_names(kind), labels))

    def record(self, histogram: Instrument, labels: tuple[str, ...], number: float) -> None:
        self._histograms[histogram.name].record(number, _attributes(histogram.labels, labels))

    def shift(self, gauge: Instrument, labels: tuple[str, ...], by: int) -> None:
        self._gauges[gauge.name].add(by, _attributes(gauge.labels, labels))

    def show_store(self, read: Readings | None) -> None:
        self._store.show(read)

    def _observing(self, gauge: Instrument) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for of, labels, number in self._store.now():
                if of is gauge:
                    yield Observation(number, _attributes(gauge.labels, labels))

        return observe

    # -- spans -----------------------------------------------------------------------------------------------------

    def trace_context(self) -> str:
        here = trace.get_current_span().get_span_context()
        return f"{_MARK}{here.trace_id:032x}{here.span_id:016x}{here.trace_flags:02x}" if here.is_valid else ""

    def began(self, asked: Asked) -> None:
        super().began(asked)
        if asked.decision:
            trace.get_current_span().set_attribute("idempotency.decision", asked.decision)
        self._past("idempotency.begin", asked, "idempotency.decision", links_to(asked.other_owner))

    def finished(self, asked: Asked) -> None:
        super().finished(asked)
        self._past("idempotency.finish", asked, "idempotency.outcome")

    def _past(self, name: str, asked: Asked, attribute: str, links: list[Link] | None = None) -> None:
        """A span of something that is over."""
        attributes = {"idempotency.operation": asked.operation}
        if asked.decision:
            attributes[attribute] = asked.decision
        span = self._tracer.start_span(name, attributes=attributes, links=links, start_time=asked.began_ns)
        if asked.decision == FAILED:
            span.set_status(StatusCode.ERROR)
        span.end(asked.began_ns + int(asked.seconds * 1e9))

    def entered(self, attempt: Attempt) -> None:
        super().entered(attempt)
        attributes: dict[str, str | int] = {
            "idempotency.operation": attempt.name,
            "idempotency.attempt": attempt.attempt,
        }
        outside = contexts.get_current()
        span = self._tracer.start_span("idempotency.handler", attributes=attributes)
        attempt.observed[_HERE] = span, outside
        contexts.attach(trace.set_span_in_context(span, outside))

    def handled(self, attempt: Attempt, seconds: float) -> None:
        super().handled(attempt, seconds)
        span, outside = attempt.observed[_HERE]
        span.end()
        if trace.get_current_span() is span:
            # Not by its token: the end may be in another context. What follows the handler is outside of its span.
            contexts.attach(outside)

    def around_effect(self, name: str, attempt: Attempt, work: Callable[..., Any]) -> Callable[..., Any]:
        attributes = {"idempotency.operation": attempt.name, "idempotency.step": name}
        return self._around(
            lambda: self._tracer.start_span("idempotency.effect", kind=SpanKind.CLIENT, attributes=attributes), work
        )

    def around_job(self, job: Job, work: Callable[..., Any]) -> Callable[..., Any]:
        attributes: dict[str, str | int] = {
            "idempotency.operation": job.operation,
            "idempotency.task": job.task,
            "idempotency.attempt": job.attempt,
        }
        links = links_to(job.key_owner)
        return self._around(
            lambda: self._tracer.start_span(
                "idempotency.job", kind=SpanKind.CONSUMER, attributes=attributes, links=links
            ),
            work,
        )

    def _around(self, start: Callable[[], Span], work: Callable[..., Any]) -> Callable[..., Any]:
        """Calls ``work`` inside of a new span, which ends when the work does. Work may be async."""

        def call(*arguments: Any) -> Any:
            span = start()
            with _inside(span, ends=False):
                result = work(*arguments)
            if inspect.isawaitable(result):
                return _awaited(span, result)
            span.end()
            return result

        return call


def _attributes(names: tuple[str, ...], values: tuple[str, ...]) -> dict[str, str]:
    return {_NAMESPACE + name: text for name, text in zip(names, values, strict=True)}


async def _awaited(span: Span, result: Any) -> Any:
    with _inside(span, ends=True):
        return await result


@contextmanager
def _inside(span: Span, *, ends: bool) -> Iterator[None]:
    """Make this span the current one. An exception ends it as failed, with its class and without its message."""
    token = contexts.attach(trace.set_span_in_context(span))
    try:
        yield
    except BaseException as error:
        span.set_status(StatusCode.ERROR, type(error).__name__)
        span.end()
        raise
    else:
        if ends:
            span.end()
    finally:
        contexts.detach(token)


def links_to(owner: str | None) -> list[Link]:
    """The link to the trace in an owner token. Empty: the token has none."""
    _, mark, text = (owner or "").rpartition(_MARK)
    if not mark or len(text) != 50:
        return []
    try:
        trace_id, span_id, flags = (int(part, 16) for part in (text[:32], text[32:48], text[48:]))
    except ValueError:
        return []
    return [Link(SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags)))]
