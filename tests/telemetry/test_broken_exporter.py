"""An exporter of the app's own that raises: the app starts, requests go on, and the log names its method once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.events import QueueFull, Reserved
from oncekey.telemetry.exporter import Exporter, Metrics
from oncekey.web import fastapi


class BrokenEverywhere(Exporter):
    traces = True

    def __getattribute__(self, name: str) -> Any:
        if name in ("traces", "serves", "__class__", "__dict__"):
            return super().__getattribute__(name)

        def fail(*_: object) -> None:
            raise RuntimeError("the exporter is broken")

        return fail


class BrokenMetrics(Metrics):
    """``broken``: the methods that raise. ``calls`` has those that do not."""

    def __init__(self, *broken: str, tenants: int = 0) -> None:
        super().__init__(tenants=tenants)
        self.broken = broken
        self.calls: list[str] = []

    def add(self, *_: object) -> None:
        self._called("add")

    def record(self, *_: object) -> None:
        self._called("record")

    def shift(self, *_: object) -> None:
        self._called("shift")

    def drop_tenant(self, *_: object) -> None:
        self._called("drop_tenant")

    def _called(self, method: str) -> None:
        if method in self.broken:
            raise RuntimeError("the exporter is broken")
        self.calls.append(method)


async def pay_three_times(once: OnceKey) -> list[int]:
    app = FastAPI()

    async def pay() -> dict[str, bool]:
        return {"paid": True}

    app.post("/pay")(pay)
    fastapi.protect(app, once, upkeep=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        headers = {"Idempotency-Key": "key-number-one"}
        found = [(await client.post("/pay", json={}, headers=headers)).status_code for _ in range(3)]
    await once.aclose()
    return found


def reports(records: Sequence[logging.LogRecord]) -> list[str]:
    found = [record for record in records if record.levelno == logging.ERROR]
    assert all(record.exc_info is not None or record.exc_text for record in found), "each has its traceback"
    return sorted(record.getMessage().partition(":")[0] for record in found)


@pytest.mark.parametrize("url", ["memory://", "sqlite"])
async def test_broken_exporter_stops_neither_the_start_nor_a_request(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path / 'keys.db'}" if url == "sqlite" else url
    once = OnceKey(url, scope=SINGLE_TENANT, telemetry=BrokenEverywhere(), routes={"POST /pay": Policy()})
    assert await pay_three_times(once) == [200, 200, 200]
    found = reports(caplog.records)
    assert "the exporter BrokenEverywhere failed in expect()" in found
    assert "the exporter BrokenEverywhere failed in on_event()" in found
    assert len(found) == len(set(found)), "each method is reported once"


async def test_log_names_the_methods_that_the_user_wrote_once_each(caplog: pytest.LogCaptureFixture) -> None:
    broken = BrokenMetrics("add", "record", "shift")
    once = OnceKey("memory://", scope=SINGLE_TENANT, telemetry=broken, routes={"POST /pay": Policy()})
    assert await pay_three_times(once) == [200, 200, 200]
    assert reports(caplog.records) == [
        f"the exporter BrokenMetrics failed in {method}()" for method in ("add", "record", "shift")
    ]


async def test_method_that_raises_does_not_keep_the_others_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    whole, broken = BrokenMetrics(), BrokenMetrics("shift")
    for exporter in (whole, broken):
        once = OnceKey("memory://", scope=SINGLE_TENANT, telemetry=exporter, routes={"POST /pay": Policy()})
        assert await pay_three_times(once) == [200, 200, 200]
    assert [name for name in whole.calls if name != "shift"] == broken.calls
    assert reports(caplog.records) == ["the exporter BrokenMetrics failed in shift()"]


def test_hook_of_the_app_and_exporter_are_reported_apart(caplog: pytest.LogCaptureFixture) -> None:
    def hook(event: object) -> None:
        raise RuntimeError("the hook is broken")

    emitter = Emitter(hook, [BrokenMetrics("add")])
    for _ in range(2):
        emitter.send(QueueFull("reserve", "StoreOverloaded"))
    assert [line.partition(";")[0].partition(":")[0] for line in caplog.messages] == [
        "the on_event hook failed on QueueFull",
        "the exporter BrokenMetrics failed in add()",
    ]


def test_series_of_a_tenant_that_cannot_be_dropped_does_not_stop_counting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BrokenMetrics("drop_tenant", tenants=1)
    emitter = Emitter(exporters=[broken])
    for tenant in ("old", "new", "new"):
        emitter.send(Reserved(tenant, "k", "POST /pay", 1))
    monkeypatch.setattr(broken._busiest, "_window_ends", 0.0)
    emitter.send(Reserved("new", "k", "POST /pay", 1))  # three times, so it takes the place of "old"
    assert len(broken.calls) == 4
    assert reports(caplog.records) == ["the exporter BrokenMetrics failed in drop_tenant()"]


@dataclass(frozen=True)
class Frozen(Exporter):
    seen: list[object] = field(default_factory=list)

    def on_event(self, event: object) -> None:
        self.seen.append(event)
        raise RuntimeError("the exporter is broken")


def test_frozen_exporter_that_has_no_hash_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    emitter = Emitter(exporters=[frozen := Frozen()])
    for _ in range(2):
        emitter.send(QueueFull("reserve", "StoreOverloaded"))
    assert len(frozen.seen) == 2
    assert reports(caplog.records) == ["the exporter Frozen failed in on_event()"]
