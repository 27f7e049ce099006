"""The summary of a rotation in docs/encryption.md is what the command prints.

``ONCEKEY_WRITE_DOCS=1 pytest tests/encryption/test_rotation_docs.py`` writes it into the page.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from oncekey.core.states import State
from oncekey.encryption.store import sealed
from tests.cli.key_table import KeyTable, runner
from tests.cli.test_re_encrypt import entry
from tests.encryption.rings import ring

PAGE = Path(__file__).parents[2] / "docs" / "encryption.md"
BLOCK = re.compile(r"^( +)```console\n +\$ (oncekey keys re-encrypt .*?)\n.*?^ +```\n", re.MULTILINE | re.DOTALL)
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def test_page_shows_the_real_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table = KeyTable("sqlite:///shop.db")
    table.put("order-7729-51d0", State.COMPLETED)
    table.dead_job()
    raw, table.store = table.store, sealed(table.store, ring(1))  # type: ignore[assignment]
    table.put("order-7731-9c1e", State.COMPLETED)
    table.put("order-7732-88f3", State.FAILED)
    table.execute("UPDATE idempotency_keys SET fingerprint_version = 258 WHERE key <> 'order-7729-51d0'")
    table.store = sealed(raw, ring(2, 1))  # type: ignore[assignment]
    table.put("order-7733-02aa", State.COMPLETED)
    table.execute("UPDATE idempotency_keys SET fingerprint_version = 514 WHERE key = 'order-7733-02aa'")
    table.store = raw
    table.close()
    monkeypatch.setenv("ONCEKEY_KEYS", entry(2, 1))
    run = runner("sqlite:///shop.db", monkeypatch, capsys)

    def printed(block: re.Match[str]) -> str:
        code, out, error = run(*shlex.split(block[2])[1:])
        assert (code, error) == (0, "")
        said = [f"$ {block[2]}", *MOMENT.sub("2026-11-18T09:30:00Z", out).rstrip().splitlines()]
        lines = "\n".join(f"{block[1]}{line}".rstrip() for line in said)
        return f"{block[1]}```console\n{lines}\n{block[1]}```\n"

    text = PAGE.read_text("utf-8")
    now, blocks = BLOCK.subn(printed, text)
    assert blocks == 1
    if os.environ.get("ONCEKEY_WRITE_DOCS"):
        PAGE.write_text(now, encoding="utf-8")
    assert now == PAGE.read_text("utf-8")
