"""docs/security.md names tests that exist, has every line that it claims to have, and no verdict without a reason."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import oncekey
from oncekey.cli.app import app as command_line
from oncekey.client.spelling import checked_key, new_key
from oncekey.core.problems import Situation, problem
from oncekey.errors import ConfigurationError
from oncekey.stores.registry import KNOWN

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/security.md").read_text("utf-8")
TESTS = sorted(set(re.findall(r"`((?:tests|src)/[\w/]+\.py)::(test_\w+)`", PAGE)))
TARGETS = sorted(set(re.findall(r"`make (\w+)`", PAGE)))
VERDICTS = ("**holds**", "**app**", "**n/a**", "**not held**")
REQUIREMENTS = {
    "1.1": 2,
    "1.2": 10,
    "1.3": 12,
    "1.4": 3,
    "1.5": 3,
    "2.1": 3,
    "2.2": 3,
    "2.3": 5,
    "2.4": 2,
    "4.1": 5,
    "4.2": 5,
    "4.3": 2,
    "4.4": 4,
    "8.1": 4,
    "8.2": 4,
    "8.3": 3,
    "8.4": 2,
    "11.1": 4,
    "11.2": 5,
    "11.3": 5,
    "11.4": 4,
    "11.5": 2,
    "11.6": 2,
    "11.7": 2,
    "12.1": 5,
    "12.2": 2,
    "12.3": 5,
    "13.1": 4,
    "13.2": 6,
    "13.3": 4,
    "13.4": 7,
    "14.1": 2,
    "14.2": 8,
    "14.3": 3,
    "15.1": 5,
    "15.2": 5,
    "15.3": 7,
    "15.4": 4,
    "16.1": 1,
    "16.2": 5,
    "16.3": 4,
    "16.4": 3,
    "16.5": 4,
}
"""How many requirements a section of ASVS 5.0.0 has, in the chapters that the page goes through."""


@cache
def names_in(path: str) -> frozenset[str]:
    """The functions and methods that a file defines."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def rows(head: str) -> list[list[str]]:
    """The cells of each row of every table whose head begins so."""
    found, inside = [], False
    for line in PAGE.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.startswith(head):
            inside = True
        elif inside and not line.startswith("|---"):
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


THREATS = rows("| # | asset |")
RISKS = rows("| risk |")
LINES = rows("| # | requirement |")


@pytest.mark.parametrize(("path", "name"), TESTS, ids=[name for _, name in TESTS])
def test_test_that_is_named_exists(path: str, name: str) -> None:
    assert name in names_in(path)


@pytest.mark.parametrize("target", TARGETS)
def test_target_that_is_named_exists(target: str) -> None:
    assert f"\n{target}: " in (ROOT / "Makefile").read_text("utf-8")


def test_every_threat_is_numbered_and_has_a_test() -> None:
    assert [row[0] for row in THREATS] == [f"T{number}" for number in range(1, len(THREATS) + 1)]
    assert len(THREATS) >= 13 + 10
    assert [row[0] for row in THREATS if "::test_" not in row[5] or len(row) != 7] == []
    assert {row[3] for row in THREATS} == {"high", "medium", "low"}


@pytest.mark.parametrize("row", THREATS, ids=[row[0] for row in THREATS])
def test_threat_has_a_test_that_ci_runs(row: list[str]) -> None:
    """The marker ``faults`` is for ``make faults`` only, which CI does not run."""
    named = re.findall(r"`((?:tests|src)/[\w/]+\.py)::(test_\w+)`", row[5])
    assert [each for each in named if each not in only_by_faults()] != []
    assert all(each not in only_by_faults() or "by `make faults` only" in row[5] for each in named)


@cache
def only_by_faults() -> frozenset[tuple[str, str]]:
    found = set()
    for path in {path for path, _ in TESTS}:
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        whole = any(isinstance(each, ast.Assign) and "mark.faults" in ast.unparse(each) for each in tree.body)
        for each in ast.walk(tree):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = [ast.unparse(mark) for mark in each.decorator_list]
                if whole or "pytest.mark.faults" in marks:
                    found.add((path, each.name))
    return frozenset(found)


def test_every_risk_of_the_top_ten_is_there_with_a_test() -> None:
    assert [row[0].partition(" ")[0] for row in RISKS] == [f"API{number}" for number in range(1, 11)]
    assert [row[0] for row in RISKS if "::test_" not in row[3]] == []


def test_every_requirement_of_the_chapters_is_there_once() -> None:
    listed = Counter(number for row in LINES for number in row[0].split(", "))
    wanted = {f"{section}.{number}" for section, count in REQUIREMENTS.items() for number in range(1, count + 1)}
    assert set(listed) == wanted
    assert [number for number, times in listed.items() if times > 1] == []


@pytest.mark.parametrize("row", LINES, ids=[row[0] for row in LINES])
def test_requirement_that_holds_has_a_test_and_every_other_one_a_reason(row: list[str]) -> None:
    _, requirement, verdict, why = row
    assert requirement
    assert verdict.startswith(VERDICTS)
    if "**holds**" in verdict:
        assert "::test_" in why or "`make " in why
    words = re.sub(r"`[^`]*`", "", why).split()
    assert len(words) >= 3 or "::test_" in why


# ---------------------------------------------------------------- claims of the page that no other test shows


def test_client_sends_no_key_that_is_too_long() -> None:
    assert checked_key("k" * 255) == "k" * 255
    with pytest.raises(ConfigurationError, match="255"):
        checked_key("k" * 256)
    assert len(new_key()) == 36


def test_every_kind_of_store_is_in_the_docs() -> None:
    stores = (ROOT / "docs/stores.md").read_text("utf-8")
    kinds = re.findall(r"[\w+]+(?=://)", KNOWN)
    assert len(kinds) >= 6
    assert [kind for kind in kinds if f"{kind}://" not in stores] == []


CRYPTOGRAPHY = {
    "encryption/envelope.py": "values at rest",
    "core/fingerprint.py": "fingerprints",
    "core/binding.py": "bound keys",
    "stores/cache/entries.py": "cache entries",
    "webhooks/signatures.py": "webhooks",
    "core/downstream.py": "downstream keys",
    "telemetry/redaction.py": "masks in logs",
    "admin/changes.py": "masks in logs",
}
NAMES_ONLY = {
    "core/routes.py": "shortens long paths",
    "engine/process.py": "owner tokens",
    "engine/transactions/adapters/one_message.py": "names of prepared statements",
    "stores/dynamodb/items.py": "names of items",
    "stores/dynamodb/parts.py": "names of parts",
    "stores/dynamodb/store.py": "the name of a process",
    "limits.py": "names of tenants in the storage of rates",
    "stores/mysql/kept.py": "names of values that are too long to compare",
    "stores/redis/epochs.py": "the name of an epoch",
    "stores/redis/scripts.py": "names of scripts",
}
"""Hashes and random texts that are names, and hide nothing."""


def test_inventory_names_every_module_with_cryptography() -> None:
    package = ROOT / "src/oncekey"
    users = set()
    for path in package.rglob("*.py"):
        place = path.relative_to(package)
        if place.parts[0] in ("testing", "demo"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        modules = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        modules |= {name.name for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names}
        if {module.partition(".")[0] for module in modules} & {"hashlib", "hmac", "secrets", "cryptography"}:
            users.add(place.as_posix())
    assert users == CRYPTOGRAPHY.keys() | NAMES_ONLY.keys()
    inventory = [row[0] for row in rows("| where |")]
    assert not [named for named in CRYPTOGRAPHY.values() if not any(named in row for row in inventory)]


@pytest.mark.parametrize("name", ["upkeep", "worker"])
def test_metrics_listen_on_the_loopback_address(name: str) -> None:
    command = get_command(command_line).commands[name]  # type: ignore[attr-defined]
    (option,) = (each for each in command.params if each.name == "metrics_host")
    assert option.default == "127.0.0.1"


@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
@pytest.mark.parametrize("situation", list(Situation))
def test_every_answer_of_oncekeys_own_is_not_to_be_stored(situation: Situation, profile: str) -> None:
    answer = problem(profile, situation)  # type: ignore[arg-type]
    assert (b"cache-control", b"no-store") in answer.headers


@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
@pytest.mark.parametrize("situation", list(Situation))
def test_no_answer_names_a_version(situation: Situation, profile: str) -> None:
    answer = problem(profile, situation)  # type: ignore[arg-type]
    shown = b" ".join([answer.body, *(name + b" " + value for name, value in answer.headers)]).decode()
    assert oncekey.__version__ not in shown
    assert "python" not in shown.lower()
    assert not {b"server", b"x-powered-by"} & {name for name, _ in answer.headers}


def test_app_does_not_import_the_testing_package() -> None:
    run = (
        "import sys, oncekey, oncekey.web.asgi, oncekey.web.wsgi, oncekey.web.status, oncekey.upkeep, oncekey.outbox\n"
        "from oncekey import OnceKey, SINGLE_TENANT\n"
        "OnceKey('memory://', scope=SINGLE_TENANT).close()\n"
        "sys.exit(any(name.startswith('oncekey.testing') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", run], check=False).returncode == 0


def test_page_of_reports_says_what_to_expect() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    for heading in ("Report", "What to expect", "Supported versions", "In scope", "Out of scope"):
        assert re.search(rf"^## {heading}", text, re.MULTILINE), heading
    assert re.search(r"within \w+ (?:working )?days", text)
    assert not re.search(r"[\w.]+@[\w.]+\.\w+|https?://", text)
