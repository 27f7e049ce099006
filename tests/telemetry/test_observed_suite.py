"""The public suite for frameworks, with both exporters on: measuring changes no answer and no key."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from oncekey.engine.observed import ObservedEngine
from oncekey.engine.once import OnceKey
from oncekey.telemetry.otel import OpenTelemetry
from oncekey.telemetry.prometheus import Prometheus
from oncekey.testing.framework_suite import FrameworkSuite
from tests.web.frameworks import framework_of

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every OnceKey that the suite makes has exporters."""
    plain = OnceKey.__init__

    def init(self: OnceKey, *given: Any, **options: Any) -> None:
        exporters = [OpenTelemetry(), Prometheus(registry=CollectorRegistry(), tenants=5)]
        plain(self, *given, **options, telemetry=exporters)
        assert isinstance(self.engine, ObservedEngine)

    monkeypatch.setattr(OnceKey, "__init__", init)


class TestStarlette(FrameworkSuite):
    framework = framework_of("starlette-async")


class TestFastapiWithThreads(FrameworkSuite):
    framework = framework_of("fastapi-sync")


class TestFlask(FrameworkSuite):
    framework = framework_of("flask")
