"""ruff's rules of security (bandit's) hold in every folder, and an exception says why it is one."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from oncekey.core.policy import Policy
from oncekey.core.routes import Routes

ROOT = Path(__file__).parent.parent.parent
RULES = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
FOLDERS = ("src", "tests", "benchmarks", "examples", ".ci")


def test_rules_of_security_are_on_in_every_folder() -> None:
    assert "S" in RULES["select"]
    assert not [code for code in RULES["ignore"] if re.fullmatch(r"S\d*", code)]
    assert not [folder for folder, codes in RULES["per-file-ignores"].items() if "S" in codes]


@pytest.mark.parametrize("folder", FOLDERS)
def test_exception_to_a_rule_of_security_has_a_reason(folder: str) -> None:
    """On its line, or for a whole file in a comment that begins with the code."""
    bare = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            found = re.search(r"# noqa: (?:[A-Z]+\d+, ?)*(S\d{3})(?:, ?[A-Z]+\d+)*(.*)", line)
            if found and not found[2].startswith(" - ") and not re.search(rf"^# {found[1]}: \w", text, re.MULTILINE):
                bare.append(f"{path.relative_to(ROOT)}:{number}")
    assert bare == []


# ---------------------------------------------------------------- what the rules cannot say

PACKAGE = ROOT / "src/oncekey"
CODE = {"eval", "exec", "compile", "__import__"}
UNPICKLERS = {"pickle", "cPickle", "shelve", "dill", "jsonpickle", "yaml", "marshal"}
OWN_FILES = "ledger/sort.py"
"""It reads temporary files that it has written itself, with marshal."""


@cache
def modules() -> dict[str, ast.Module]:
    """Each module that runs in an app, parsed. Not at import: every run that collects this file would wait for it."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "testing"
    }


def test_package_runs_no_text_as_code() -> None:
    found = [
        f"{name}:{each.lineno}"
        for name, tree in modules().items()
        for each in ast.walk(tree)
        if isinstance(each, ast.Call)
        and (
            (isinstance(each.func, ast.Name) and each.func.id in CODE)
            or any(word.arg == "shell" for word in each.keywords)
        )
    ]
    assert found == []


def test_package_unpickles_nothing() -> None:
    users = set()
    for name, tree in modules().items():
        for each in ast.walk(tree):
            if isinstance(each, ast.Import) and {part.name.partition(".")[0] for part in each.names} & UNPICKLERS:
                users.add(name)
            if isinstance(each, ast.ImportFrom) and (each.module or "").partition(".")[0] in UNPICKLERS:
                users.add(name)
    assert users == {OWN_FILES}


def test_secrets_are_compared_in_constant_time() -> None:
    """No ``==`` beside a digest, and ``compare_digest`` wherever a MAC of somebody else is checked."""

    def is_digest(node: ast.expr) -> bool:
        called = node.func if isinstance(node, ast.Call) else None
        return isinstance(called, ast.Attribute) and called.attr in ("digest", "hexdigest")

    for name, tree in modules().items():
        for each in ast.walk(tree):
            if isinstance(each, ast.Compare):
                assert not any(is_digest(side) for side in (each.left, *each.comparators)), f"{name}:{each.lineno}"
    checks = ("core/binding.py", "stores/cache/entries.py", "webhooks/signatures.py")
    for name in checks:
        called = {each.attr for each in ast.walk(modules()[name]) if isinstance(each, ast.Attribute)}
        assert "compare_digest" in called, name


@pytest.mark.parametrize("path", ["/aXb", "/a.b/c", "/a.bb"])
def test_text_of_a_route_is_no_pattern(path: str) -> None:
    routes = Routes(Policy(), {"POST /a.b": Policy(effects="repeatable")})
    found = routes.match("POST", path)
    assert found is not None
    assert found.policy.effects != "repeatable"
