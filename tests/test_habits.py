"""The commit hooks run what ``make lint`` runs, with pinned tools of the virtualenv and nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import oncekey

ROOT = Path(__file__).parents[1]
LINT = (ROOT / "Makefile").read_text().partition("\nlint: ")[2].partition("\n\n")[0]
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()


def test_hooks_run_every_tool_of_make_lint_from_the_virtualenv() -> None:
    assert re.findall(r"repo: (.*)", HOOKS) == ["local"]
    assert set(re.findall(r"language: (.*)", HOOKS)) == {"system"}
    tools = set(re.findall(r"entry: \.venv/bin/(\S+)", HOOKS))
    assert tools == set(re.findall(r"\$\(BIN\)/(\S+)", LINT))
    assert len(re.findall(r"entry: ", HOOKS)) == len(re.findall(r"entry: \.venv/bin/", HOOKS))


def test_linters_are_pinned() -> None:
    pins = (ROOT / "requirements" / "dev.txt").read_text()
    for tool in ("ruff", "mypy", "codespell", "import-linter"):
        assert re.search(rf"^{tool}==", pins, re.MULTILINE), tool


def test_version_is_the_newest_one_of_the_changelog() -> None:
    released = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    built = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert built is not None
    assert released[0] == built[1] == oncekey.__version__
    assert len(released) == len(set(released))
