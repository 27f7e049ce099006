"""docs/operations.md shows what the commands really print: each is run, in the order of the page.

``ONCEKEY_WRITE_DOCS=1 pytest tests/cli/test_operations_docs.py`` writes their output into the page.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncekey.core.states import Actor, Event, State
from oncekey.testing.servers import PostgresServer, ServerUnavailable
from tests.cli.key_table import KeyTable, Run, runner

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
HALF_A_MINUTE = 30.0  # so that no minute ends while the page is run
HOUR = 3600.0


@pytest.fixture(scope="module")
def durable_url() -> Iterator[str]:
    server = PostgresServer()
    try:
        server.start()
    except ServerUnavailable as missing:
        pytest.skip(str(missing))
    yield server.database("shop")
    server.stop()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The shop of the page."""
    monkeypatch.chdir(tmp_path)
    table = KeyTable("sqlite:///shop.db")
    table.put("order-7729-51d0", State.COMPLETED, age=2 * HOUR + HALF_A_MINUTE)
    table.put("order-7731-9c1e", State.UNKNOWN, age=3 * HOUR + HALF_A_MINUTE)
    table.put("order-7732-88f3", State.FAILED_RETRYABLE, age=HOUR + HALF_A_MINUTE)
    late = table.put("order-7733-02aa", State.UNKNOWN, age=2 * 60 + HALF_A_MINUTE)
    table.move(late, Event.POSTPONE, Actor.RECONCILER, last_error="the provider does not answer")
    half_done = table.half_done("order-7734-1b7c", operation="POST /rides")
    table.age(half_done, HOUR + HALF_A_MINUTE)
    table.put("order-7735-6e10", State.IN_PROGRESS, scope="zeta", operation="POST /refunds", age=HALF_A_MINUTE)
    table.dead_job(age=5 * HOUR + HALF_A_MINUTE)
    table.close()
    return runner("sqlite:///shop.db", monkeypatch, capsys)


def stable(text: str) -> str:
    """Without what is another every time: moments, seconds, connections, trailing blanks."""
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-11-16T09:30:00Z", text)
    text = re.sub(r"\b[1-9]\d* s\b", "30 s", text)
    text = re.sub(r"\b\d+ of (\d+) are in use", r"12 of \1 are in use", text)
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def test_page_shows_the_real_output_of_every_command(run: Run, durable_url: str) -> None:
    """Every command of the page, its output and its errors as in a terminal, 100 columns wide."""
    shop = "postgresql://app@db/shop"
    assert run("migrate", "--store", durable_url)[0] == 0

    def printed(block: re.Match[str]) -> str:
        shown = []
        for command in re.findall(r"^\$ (oncekey .*)$", block[1], re.MULTILINE):
            _, out, error = run(*(durable_url if word == shop else word for word in shlex.split(command)[1:]))
            said = stable(out + error)
            if shop in command:
                said = re.sub(r"^postgres.*$", shop, said, count=1, flags=re.MULTILINE)
            shown.append(f"$ {command}\n{said}\n")
        return "```console\n" + "\n".join(shown) + "```"

    page = PAGE.read_text(encoding="utf-8")
    now = BLOCK.sub(printed, page)
    if os.environ.get("ONCEKEY_WRITE_DOCS"):
        PAGE.write_text(now, encoding="utf-8")
    assert now == PAGE.read_text(encoding="utf-8")


def test_every_command_is_on_the_page(run: Run) -> None:
    """A command that is added is shown."""
    page = PAGE.read_text(encoding="utf-8")
    for group, names in (("keys", "list show resolve forget"), ("dead-letters", "list show retry discard")):
        assert set(re.findall(r"^│ (\w+) ", run(group, "--help")[1], re.MULTILINE)) == set(names.split())
        for name in names.split():
            assert f"$ oncekey {group} {name} --help" in page
