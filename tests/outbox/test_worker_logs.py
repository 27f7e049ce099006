"""What a worker's log says of a task that fails: its traceback, the attempt, and when it is tried again."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oncekey.outbox import Context
from tests.outbox.outbox_table import OutboxTable
from tests.outbox.workers import drain, make


@pytest.mark.parametrize("in_thread", [False, True])
async def test_failing_task_logs_warnings_with_traceback_and_dead_letter_logs_error(
    outbox: OutboxTable, in_thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(outbox)

    def fail() -> None:
        raise ValueError("indigestible")

    if in_thread:

        @worker.task("poison", max_attempts=2, backoff=0.0)
        def sync_poison(ctx: Context, payload: Any) -> None:
            fail()

    else:

        @worker.task("poison", max_attempts=2, backoff=0.0)
        async def poison(ctx: Context, payload: Any) -> None:
            fail()

    outbox.add("poison")
    with caplog.at_level(logging.WARNING, logger="oncekey"):
        await drain(worker)
    retried, dead = caplog.records
    assert (retried.levelno, dead.levelno) == (logging.WARNING, logging.ERROR)
    assert retried.getMessage().startswith("JobRetried ")
    assert " attempt=1 " in retried.getMessage()
    assert " in_seconds=" in retried.getMessage()
    assert dead.getMessage().startswith("JobDead ")
    assert " attempt=2 " in dead.getMessage()
    for record in (retried, dead):
        assert record.exc_text is not None
        assert 'raise ValueError("indigestible")' in record.exc_text


def _lines(outbox: OutboxTable, folder: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "oncekey", "worker", "tests.outbox.jobs:worker", "--store", outbox.url, "--drain"]
    environment = os.environ | {"ONCEKEY_TEST_LEDGER": str(folder)}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, timeout=50, check=True)
    return done.stderr.splitlines()


def test_worker_command_with_log_format_json_writes_one_object_per_line(outbox: OutboxTable, tmp_path: Path) -> None:
    job_id = outbox.add("poison")
    lines = [json.loads(line) for line in _lines(outbox, tmp_path, "--log-format", "json")]
    assert [(line["level"], line["event"]) for line in lines] == [
        *[("WARNING", "JobRetried")] * 2,
        ("ERROR", "JobDead"),
    ]
    for attempt, line in enumerate(lines, 1):
        assert line["logger"] == "oncekey"
        assert line["time"].endswith("+00:00")
        assert line["message"].startswith(line["event"])
        assert (line["fields"]["job_id"], line["fields"]["attempt"]) == (job_id, attempt)
        assert line["traceback"].endswith(f"ValueError: cannot be digested, try {attempt}")


def test_worker_command_with_log_level_error_writes_only_dead_letters(outbox: OutboxTable, tmp_path: Path) -> None:
    outbox.add("poison")
    text = "\n".join(_lines(outbox, tmp_path, "--log-level", "error"))
    assert " ERROR JobDead " in text
    assert "JobRetried" not in text
    assert text.endswith("ValueError: cannot be digested, try 3")
