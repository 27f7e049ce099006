"""``oncekey ledger compare``: options, output and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oncekey.cli import main

Run = Callable[..., tuple[int, str, str]]

DOCS = Path(__file__).parents[2] / "docs" / "reconciliation.md"

OURS = "reference,cents,currency,state\npay-1,1000,EUR,completed\npay-2,250,EUR,completed\npay-3,5,EUR,failed\n"
THEIRS = """\
{"id":"ch_2","amount":"2.50","currency":"eur","status":"succeeded","metadata":{"key":"pay-2"}}
{"id":"ch_1","amount":"10.01","currency":"eur","status":"succeeded","metadata":{"key":"pay-1"}}
{"id":"ch_9","amount":"7","currency":"usd","status":"succeeded","metadata":{"key":"pay-9"}}
"""
MAPPING = ["--id", "reference=metadata.key", "--amount", "cents=amount", "--state", "state=status"]
MAPPING += ["--decimals", "0=2", "--means", "succeeded=completed"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs it on ``ours.csv`` and ``theirs.jsonl``: exit code, standard output, standard error."""
    (tmp_path / "ours.csv").write_text(OURS)
    (tmp_path / "theirs.jsonl").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)

    def run(*options: str, files: tuple[str, str] = ("ours.csv", "theirs.jsonl")) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oncekey", "ledger", "compare", *files, *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_different_ledgers_exit_1_with_both_sides(run: Run) -> None:
    """Exit code 1, and each difference with both sides and where they stand."""
    code, out, error = run(*MAPPING)
    assert (code, error) == (1, "")
    assert out == (
        "ours: 3 rows; theirs: 3 rows; ids that agree: 1\n"
        "\nmissing here (theirs has the id, ours has not): 1\n"
        "  pay-9  700 USD completed (line 3)\n"
        "\nmissing there (ours has the id, theirs has not): 1\n"
        "  pay-3  5 EUR failed (line 4)\n"
        "\ndifferent: 1\n"
        "  pay-1  amount: 1000 EUR completed (line 2) here, 1001 EUR completed (line 2) there\n"
    )


def test_equal_ledgers_exit_0(run: Run) -> None:
    """Exit code 0; with the smallest memory, too."""
    files = ("ours.csv", "ours.csv")
    options = ("--id", "reference", "--amount", "cents", "--rows", "2", "--tmp", ".")
    assert run(*options, files=files) == (0, "ours: 3 rows; theirs: 3 rows; ids that agree: 3\nno differences\n", "")


def test_only_their_states_are_translated(run: Run, tmp_path: Path) -> None:
    """A word of ours that theirs uses for something else stays ours."""
    (tmp_path / "one.csv").write_text("id,amount,currency,state\na,1,EUR,succeeded\n")
    code, out, _ = run("--means", "succeeded=completed", files=("one.csv", "one.csv"))
    assert code == 1
    assert "a  state: 1 EUR succeeded (line 2) here, 1 EUR completed (line 2) there" in out


def test_ledger_compare_with_json_prints_one_document(run: Run) -> None:
    code, out, _ = run(*MAPPING, "--json", "--ignore", "amount", "--limit", "0")
    said = json.loads(out)
    assert (code, said["counts"]["different"], said["counts"]["missing_here"], said["findings"]) == (1, 0, 1, [])
    assert {finding["id"] for finding in json.loads(run(*MAPPING, "--json")[1])["findings"]} == {
        *("pay-1", "pay-3", "pay-9")
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "ours.csv: the column 'id' is not in its first line; columns there: 'reference', 'cents'"),
        (MAPPING[:6], "theirs.jsonl, line 1: the amount '2.50' is not a whole number of minor units"),
        ([*MAPPING, "--tmp", "nowhere"], "the temporary folder nowhere cannot be used"),
        ([*MAPPING, "--delimiter", "::"], "must be one character"),
    ],
)
def test_unreadable_ledger_exits_2_with_one_sentence(run: Run, options: list[str], words: str) -> None:
    """Exit code 2, one sentence, and nothing that looks like a result."""
    code, out, error = run(*options)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("oncekey: ")
    assert words in error


def test_files_that_are_not_there(run: Run) -> None:
    code, _, error = run(files=("ours.csv", "theirs.csv"))
    assert (code, error) == (2, "oncekey: theirs.csv: it cannot be read: No such file or directory\n")


@pytest.mark.parametrize(
    "options", [["--decimals", "two"], ["--means", "succeeded"], ["--ignore", "id"], ["--id", "=x"], ["--rows", "1"]]
)
def test_ledger_compare_refuses_wrong_options(run: Run, options: list[str]) -> None:
    code, out, error = run(*options)
    assert (code, out) == (2, "")
    assert options[0] in error


def test_progress_is_shown_on_a_terminal_only(run: Run, tmp_path: Path) -> None:
    """A bar on the terminal's stderr; what is piped has the report and nothing else."""
    outside, inside = pty.openpty()
    command = [sys.executable, "-m", "oncekey", "ledger", "compare", "ours.csv", "theirs.jsonl", *MAPPING]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=inside, cwd=tmp_path, env=environ, check=False)
    os.close(inside)
    shown = os.read(outside, 65536).decode()
    os.close(outside)
    assert done.returncode == 1
    assert done.stdout.decode().startswith("ours: 3 rows")
    assert "reading" in shown
    assert "%" in shown


def test_the_docs_show_it_as_it_is(run: Run, tmp_path: Path) -> None:
    """The example of docs/reconciliation.md: its files, its command, what it prints."""
    text = DOCS.read_text().partition("## Comparing ledgers")[2]
    ours, theirs, shown = re.findall(r"```\n(.*?)```", text, re.DOTALL)[:3]
    (tmp_path / "ours.csv").write_text(ours)
    (tmp_path / "charges.jsonl").write_text(theirs)
    command, _, printed = shown.partition("\n")
    first, second, *options = shlex.split(command.removeprefix("$ oncekey ledger compare "))
    assert run(*options, files=(first, second)) == (1, printed, "")
