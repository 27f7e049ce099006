"""``oncekey keys re-encrypt`` in a terminal shows how far it is, and nothing of that where there is no terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from oncekey.stores.registry import open_store
from tests.cli.test_re_encrypt import SURE, entry
from tests.encryption.kept_rows import fill


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    store = open_store(url)
    store.migrate()
    fill(store, url)
    store.close()
    return url


def run(url: str, stderr: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oncekey", "keys", "re-encrypt", "--store", url, *SURE]
    environment = os.environ | {"ONCEKEY_KEYS": entry(2, 1), "TERM": "xterm", "COLUMNS": "120"}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=50, check=False
    )


def everything(terminal: int) -> bytes:
    shown = b""
    with suppress(OSError):  # the other end is closed
        while more := os.read(terminal, 65536):
            shown += more
    return shown


def test_terminal_shows_the_rows_and_values_so_far(url: str) -> None:
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(everything, ours)  # beside it: a terminal that is full holds up the command
        done = run(url, theirs)
        os.close(theirs)
        shown = reading.result(50)
    os.close(ours)
    assert done.returncode == 0, done.stdout
    (read,) = re.findall(r"read ([\d,]+) rows", done.stdout)
    with_its_line = int(read) + 1  # the line of the audit about this run
    assert re.search(rf"{with_its_line} rows read, [1-9][\d,]* values rewritten", shown.decode()), shown


def test_no_terminal_gets_the_summary_alone(url: str) -> None:
    done = run(url, subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("read ")
