"""The SDK of OpenTelemetry for tests, and what they ask of a span."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from oncekey.telemetry.otel import OpenTelemetry


class Sdk:
    """What an app sets up: an SDK that keeps spans and metrics in memory."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = provider.get_tracer("the app")
        self._reader = InMemoryMetricReader()
        self.providers: dict[str, Any] = {
            "tracer_provider": provider,
            "meter_provider": MeterProvider(metric_readers=[self._reader]),
        }

    def exporter(self, **options: Any) -> OpenTelemetry:
        return OpenTelemetry(**self.providers, **options)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def the(self, name: str) -> ReadableSpan:
        [span] = self.spans(name)
        return span

    def text(self) -> str:
        return "".join(span.to_json() for span in self._spans.get_finished_spans())

    def metrics(self) -> list[Metric]:
        data = self._reader.get_metrics_data()
        return list(data.resource_metrics[0].scope_metrics[0].metrics) if data and data.resource_metrics else []

    def points(self) -> dict[str, list[Any]]:
        return {metric.name: list(metric.data.data_points) for metric in self.metrics()}


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def id_of(span: ReadableSpan) -> int:
    return place_of(span)[1]


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def place_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id
