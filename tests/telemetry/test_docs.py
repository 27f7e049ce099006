"""docs/metrics.md has every metric and alert that exists, and its examples run.

``ONCEKEY_WRITE_DOCS=1 pytest tests/telemetry/test_docs.py`` writes the tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry

from oncekey import OnceKey
from oncekey.core.states import TABLE, Actor
from oncekey.engine.batching.thread_lane import UNDO
from oncekey.engine.batching.verbs import verbs_of
from oncekey.engine.observed import WORDS
from oncekey.stores.memory import MemoryStore
from oncekey.telemetry import instruments, monitoring, prometheus
from oncekey.telemetry.exporter import FAILED
from oncekey.telemetry.instruments import Instrument, counter_help, counter_name
from oncekey.telemetry.prometheus import metric_name
from oncekey.web.fastapi import protect
from tests.telemetry.pages import number

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head := tuple(head), ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- |", "|---|").replace(" --- |", "---|")


def labels(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def of(each: Instrument) -> tuple[str, str, str]:
    return f"`{metric_name(each.name, each.unit)}`", labels(each.labels), each.help


def tables() -> dict[str, str]:
    """Every table of the page, from the source."""
    rules = yaml.safe_load(monitoring.rules())["groups"][0]["rules"]
    counters = [
        (f"`{metric_name(counter_name(kind))}_total`", labels(kind.labels), counter_help(kind).replace("``", "`"))
        for kind in instruments.COUNTERS
    ]
    usual = {f"`{metric_name(counter_name(kind))}_total`" for kind in instruments.USUAL}
    gauges = (*instruments.PROCESS_GAUGES, *instruments.STORE_GAUGES)
    head = ("metric", "labels", "what it counts")
    return {
        "alerts": table(
            ("alert", "when", "severity"),
            [(f"`{rule['alert']}`", rule["annotations"]["summary"], rule["labels"]["severity"]) for rule in rules],
        ),
        "usual": table(
            (head[0], head[2]),
            [(f"`{metric_name(counter_name(kind))}_total`", counter_help(kind)) for kind in instruments.USUAL],
        ),
        "histograms": table(("metric", "labels", "what it measures"), map(of, instruments.HISTOGRAMS)),
        "gauges": table(("metric", "labels", "what it is"), map(of, gauges)),
        "counters": table(head, sorted(row for row in counters if row[0] not in usual)),
    }


@pytest.mark.parametrize("name", ["alerts", "usual", "histograms", "gauges", "counters"])
def test_page_has_the_tables_of_the_source(name: str) -> None:
    between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->\n)", re.DOTALL)
    if os.environ.get("ONCEKEY_WRITE_DOCS"):
        PAGE.write_text(between.sub(lambda _: tables()[name], PAGE.read_text("utf-8")), encoding="utf-8")
    assert between.findall(PAGE.read_text("utf-8")) == [tables()[name]]


def test_page_lists_every_verb_of_store_error() -> None:
    [listed] = re.findall(r"<!-- verbs -->\n(.*?)<!-- /verbs -->", PAGE.read_text("utf-8"), re.DOTALL)
    cells = "".join(line.split("|")[1] for line in listed.splitlines()[2:])
    verbs = {verb for _, verb, _ in verbs_of(MemoryStore(), None)}
    assert sorted(re.findall(r"`(\w+)`", cells)) == sorted({*verbs, UNDO, "outbox", "any"})


def test_page_says_how_many_alerts_there_are() -> None:
    rules = yaml.safe_load(monitoring.rules())["groups"][0]["rules"]
    number = {11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen"}[len(rules)]
    assert re.findall(r"(\w+) alerts", PAGE.read_text("utf-8"))[0] == number


def blocks(page: Path = PAGE) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the examples use without showing it. Each gets a registry of its own."""
    monkeypatch.chdir(tmp_path)
    registry = CollectorRegistry()
    for function in (prometheus.Prometheus.__init__, prometheus.metrics_app, prometheus.page):
        kept = function.__kwdefaults__ or {}
        if "registry" in kept:
            monkeypatch.setitem(kept, "registry", registry)
        else:
            given = tuple(registry if each is REGISTRY else each for each in function.__defaults__ or ())
            monkeypatch.setattr(function, "__defaults__", given)
    return {"app": FastAPI(), "protect": protect, "tenant_of": lambda request: request.headers["x-tenant"]}


async def paid(names: dict[str, Any]) -> httpx.AsyncClient:
    """One payment and one replay, through the app of the example."""
    app = names["app"]

    async def pay() -> dict[str, bool]:
        return {"paid": True}

    app.post("/payments")(pay)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", follow_redirects=True)
    for _ in range(2):
        headers = {"Idempotency-Key": "key-number-one", "X-Tenant": "acme"}
        assert (await client.post("/payments", json={}, headers=headers)).status_code == 200
    return client


@pytest.mark.filterwarnings("ignore")
async def test_first_example_shows_metrics(names: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    exec(compile(blocks()[0], "metrics.md", "exec"), names)
    client = await paid(names)
    text = (await client.get("/metrics")).text
    assert number(text, "api_idempotency_reserve_created_total", operation="POST /payments") == 1
    assert number(text, "api_idempotency_reserve_replay_total", operation="POST /payments") == 1
    await client.aclose()
    await names["once"].aclose()


async def test_example_with_tenants_runs(names: dict[str, Any]) -> None:
    [source] = [block for block in blocks() if "tenants=20" in block]
    exec(compile("from oncekey import OnceKey\n" + source, "metrics.md", "exec"), names)
    protect(names["app"], names["once"], upkeep=False)
    client = await paid(names)
    registry = names["once"].engine.emitter.exporters[0].registry
    text = prometheus.page(registry=registry)[1].decode()
    assert number(text, "api_idempotency_reserve_created_total", tenant="acme") == 1
    await client.aclose()
    await names["once"].aclose()


async def test_example_of_an_exporter_prints(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    [source] = [block for block in blocks() if "class Printed" in block]
    exec(compile(source, "metrics.md", "exec"), names)
    once: OnceKey = names["once"]
    protect(names["app"], once, upkeep=False)
    await (await paid(names)).aclose()
    await once.aclose()
    said = capsys.readouterr().out
    assert "api.idempotency.reserve.created.count('POST /payments',) +1" in said
    assert "api.idempotency.handler.running('POST /payments',) -1" in said
    assert re.search(r"api\.idempotency\.begin\.duration\('POST /payments',\) \d+\.\d{3} s", said)


TRACING = PAGE.with_name("tracing.md")


async def test_example_of_traces_runs_without_an_sdk(names: dict[str, Any]) -> None:
    [source] = blocks(TRACING)
    exec(compile(source, "tracing.md", "exec"), names)
    await (await paid(names)).aclose()
    await names["once"].aclose()


def test_page_of_traces_has_every_decision_and_outcome() -> None:
    text = TRACING.read_text("utf-8")
    ends = {move.event.value for move in TABLE if Actor.OWNER in move.by} - {"renew", "advance"}
    for word in {*WORDS.values(), *ends, FAILED, "lost"}:
        assert f"`{word}`" in text, word
