"""The commit hooks run what ``make lint`` runs, with pinned tools of the virtualenv and nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

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
