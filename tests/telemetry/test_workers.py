"""Several workers without PROMETHEUS_MULTIPROC_DIR: the number is read from the command line, and a WARNING says it."""

from __future__ import annotations

import logging
import sys

import pytest
from prometheus_client import CollectorRegistry

from oncekey.telemetry import prometheus
from oncekey.telemetry.prometheus import Prometheus
from oncekey.telemetry.workers import workers_asked


@pytest.mark.parametrize(
    ("line", "environ", "asked"),
    [
        ("/app/bin/gunicorn -w 4 app:app", {}, ("gunicorn", 4)),
        ("/app/bin/gunicorn -w4 app:app", {}, ("gunicorn", 4)),
        ("gunicorn --workers=4 app:app", {}, ("gunicorn", 4)),
        ("gunicorn app:app", {"GUNICORN_CMD_ARGS": "--bind :80 --workers 3"}, ("gunicorn", 3)),
        ("gunicorn -w 1 app:app", {"GUNICORN_CMD_ARGS": "-w 3", "WEB_CONCURRENCY": "5"}, ("gunicorn", 1)),
        ("/lib/site-packages/uvicorn/__main__.py app:app --workers 2", {}, ("uvicorn", 2)),
        ("uvicorn app:app", {"WEB_CONCURRENCY": "5"}, ("uvicorn", 5)),
        ("uvicorn app:app", {"WEB_CONCURRENCY": "many"}, ("uvicorn", 1)),
        ("fastapi run --workers 2", {}, ("fastapi", 2)),
        ("hypercorn app:app", {"WEB_CONCURRENCY": "5"}, ("hypercorn", 1)),
        ("gunicorn --worker-class gthread --threads 8 app:app", {}, ("gunicorn", 1)),
        ("oncekey worker app:worker -w 4", {"WEB_CONCURRENCY": "5"}, ("", 1)),
        ("pytest -w 4", {}, ("", 1)),
        ("", {}, ("", 1)),
    ],
)
def test_number_of_workers_is_that_of_the_command_line(
    line: str, environ: dict[str, str], asked: tuple[str, int]
) -> None:
    assert workers_asked(line.split(), environ) == asked


@pytest.mark.parametrize(("workers", "lines"), [("3", 1), ("1", 0)])
def test_several_workers_without_a_folder_are_a_warning_once(
    workers: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["gunicorn", "-w", workers, "app:app"])
    prometheus._warn_of_workers.cache_clear()
    for _ in range(2):
        Prometheus(registry=CollectorRegistry())
    prometheus._warn_of_workers.cache_clear()
    found = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(found) == lines
    assert all("gunicorn starts 3 workers and PROMETHEUS_MULTIPROC_DIR is not set" in line for line in caplog.messages)
