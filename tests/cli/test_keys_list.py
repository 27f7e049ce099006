"""``oncekey keys list``: filters, masks, and nothing that a terminal obeys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oncekey.cli.output import plain
from oncekey.core.record import ENDPOINT_MARK
from oncekey.core.states import State
from oncekey.telemetry.redaction import redact
from tests.cli.key_table import KeyTable, Run

HOUR = 3600.0


def keys(out: str) -> list[str]:
    return [each["key"] for each in json.loads(out)["keys"]]


@pytest.fixture
def full(table: KeyTable) -> KeyTable:
    for number, state in enumerate((State.COMPLETED, State.UNKNOWN, State.IN_PROGRESS, State.PENDING, State.FAILED)):
        table.put(f"order-{number}-of-today", state, age=number * HOUR)
    table.put("order-9-of-today", State.UNKNOWN, scope="zeta", operation="POST /refunds", age=9 * HOUR)
    return table


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ([], "012349"),
        (["--state", "unknown"], "19"),
        (["--scope", "acme"], "01234"),
        (["--scope", "acm"], ""),
        (["--operation", "POST /refunds"], "9"),
        (["--older-than", "90m"], "2349"),
        (["--older-than", "3h"], "349"),
        (["--older-than", "10800.5"], "49"),
        (["--older-than", "1d"], ""),
        (["--state", "unknown", "--older-than", "2h", "--scope", "zeta"], "9"),
        (["--limit", "2"], "01"),
    ],
)
def test_list_shows_keys_that_match_all_filters(full: KeyTable, operate: Run, options: list[str], numbers: str) -> None:
    """All that are given hold, in the order of scope and key."""
    code, out, error = operate("keys", "list", "--json", "--reveal", *options)
    assert (code, error) == (0, "")
    assert keys(out) == [f"order-{number}-of-today" for number in numbers]
    assert json.loads(out)["more"] == ("--limit" in options)


def test_list_masks_keys_in_text_and_json(full: KeyTable, operate: Run) -> None:
    """The same masks in text and JSON: enough to tell keys apart, too little to use one."""
    code, out, error = operate("keys", "list", "--limit", "5")
    head, *lines = out.splitlines()
    assert (code, len(lines), head.split()[:2]) == (0, 5, ["SCOPE", "KEY"])
    assert error == "oncekey: these are the first 5; --limit shows more\n"
    as_json = operate("keys", "list", "--json")[1]
    for number in "01234":
        key = f"order-{number}-of-today"
        assert key not in out + as_json
        assert redact(key) in lines[int(number)]
        assert redact(key) == keys(as_json)[int(number)]
    assert "order-3-of-today" in operate("keys", "list", "--reveal")[1]
    assert "asked" in lines[1]
    assert "TimeoutError" in lines[1]
    assert "lease is over for 1 h 59 min" in lines[2]


def test_list_without_keys_says_so(table: KeyTable, operate: Run) -> None:
    assert operate("keys", "list") == (0, "no such keys\n", "")
    assert json.loads(operate("keys", "list", "--json")[1]) == {"keys": [], "more": False}


def test_control_characters_and_markup_of_a_client_are_escaped(table: KeyTable, operate: Run) -> None:
    """Neither control sequences nor markup: an operator's terminal is not the client's."""
    table.put("key-\x1b[2J\r\u202e-and-more", State.UNKNOWN, scope="[bold red]acme[/]", operation="POST /\x1b]0;x\x07")
    out = operate("keys", "list", "--reveal")[1]
    assert "[bold red]acme[/]" in out
    assert r"key-\x1b[2J\r\u202e-and-more" in out
    assert plain(out.replace("\n", "")) == out.replace("\n", "")
    assert plain("Grüße 日本") == "Grüße 日本"


def test_list_of_keys_per_endpoint_shows_tenant_and_endpoint(table: KeyTable, operate: Run) -> None:
    """Their scope is shown without the mark in it, and asked for by tenant and endpoint."""
    table.put("order-1-of-today", State.COMPLETED, scope=f"acme{ENDPOINT_MARK}POST /payments")
    table.put("order-1-of-today", State.COMPLETED)
    asked = ["keys", "list", "--json", "--scope", "acme"]
    (there,) = json.loads(operate(*asked, "--endpoint", "POST /payments")[1])["keys"]
    assert (there["scope"], there["endpoint"]) == ("acme", "POST /payments")
    (other,) = json.loads(operate(*asked)[1])["keys"]
    assert other["endpoint"] is None
    code, out, _ = operate("keys", "show", "order-1-of-today", "--scope", "acme", "--endpoint", "POST /payments")
    assert (code, "acme, of the endpoint POST /payments" in out) == (0, True)


@pytest.mark.parametrize("text", ["soon", "-1h", "1w", "h"])
def test_malformed_duration_is_refused(table: KeyTable, operate: Run, text: str) -> None:
    code, out, error = operate("keys", "list", "--older-than", text)
    assert (code, out) == (2, "")
    assert "no length of time" in error or "No such option" in error


def test_a_wrong_store_is_not_an_empty_one(operate: Run, tmp_path: Path) -> None:
    """A file that is not there is neither made nor believed; memory is the app's alone."""
    missing = tmp_path / "typo.db"
    for url, words in ((f"sqlite:///{missing}", "there is no file"), ("memory://", "inside of the app's process")):
        for command in (["keys", "list"], ["dead-letters", "list"]):  # the doctor says it as its first line
            code, out, error = operate(*command, "--store", url)
            assert (code, out, words in error) == (1, "", True)
    assert not missing.exists()


@pytest.mark.parametrize("command", [["upkeep", "--once"], ["worker", "tests.outbox.jobs:worker", "--once"]])
def test_command_refuses_a_missing_file_and_says_what_to_run(operate: Run, tmp_path: Path, command: list[str]) -> None:
    """A misspelt path must not become an empty store, in which no job is ever due."""
    missing = tmp_path / "typo.db"
    url = f"sqlite:///{missing}"
    code, out, error = operate(*command, "--store", url)
    assert (code, out, missing.exists()) == (1, "", False)
    assert f"there is no file {missing}" in error
    assert "oncekey migrate" in error
    assert operate("migrate", "--store", url)[0] == 0
    assert operate(*command, "--store", url)[0] == 0


def test_as_a_program_of_its_own(full: KeyTable) -> None:
    """The real command: JSON alone at standard output, and long lines are not cut where there is no terminal."""
    program = [sys.executable, "-m", "oncekey", "keys", "list", "--reveal"]
    environment = {**os.environ, "ONCEKEY_STORE": full.url, "COLUMNS": "20"}
    done = subprocess.run([*program, "--json"], capture_output=True, text=True, check=True, env=environment)
    assert len(keys(done.stdout)) == 6
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
    assert len(done.stdout.splitlines()) == 7
    assert done.stderr == ""
