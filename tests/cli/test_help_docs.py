"""The help of every command stands in the docs, as it is printed.

``ONCEKEY_WRITE_DOCS=1 pytest tests/cli/test_help_docs.py`` writes it into the pages.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.key_table import Run, runner

DOCS = Path(__file__).parents[2] / "docs"
HELP = re.compile(r"^```console\n\$ (oncekey [\w -]*--help)\n.*?^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name != "operations.md")  # that has a test of its own
ROW = re.compile(r"^│ ([\w-]+) ", re.MULTILINE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner("sqlite:///shop.db", monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_the_help_as_it_is_printed(run: Run, page: str) -> None:
    def printed(block: re.Match[str]) -> str:
        code, out, error = run(*shlex.split(block[1])[1:])
        assert (code, error) == (0, ""), block[1]
        lines = "\n".join(line.rstrip() for line in out.strip("\n").splitlines())
        return f"```console\n$ {block[1]}\n{lines}\n```"

    text = (DOCS / page).read_text("utf-8")
    now = HELP.sub(printed, text)
    if os.environ.get("ONCEKEY_WRITE_DOCS"):
        (DOCS / page).write_text(now, encoding="utf-8")
    assert now == (DOCS / page).read_text("utf-8")


def test_every_command_is_on_a_page(run: Run) -> None:
    """A command that is added is shown."""
    shown = "\n".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    commands = set(ROW.findall(run("--help")[1].partition("Commands")[2]))
    assert commands >= {"demo", "migrate", "worker", "upkeep", "keys", "dead-letters", "ledger", "routes", "doctor"}
    for command in commands:
        below = ROW.findall(run(command, "--help")[1].partition("─ Commands")[2])
        for name in [f"{command} {each}" for each in below] or [command]:
            assert f"\n$ oncekey {name} --help\n" in shown, name
