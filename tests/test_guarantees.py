"""Every test that docs/guarantees.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/guarantees.md").read_text("utf-8")
ORDINARY = TEXT[TEXT.index("## Ordinary code") : TEXT.index("## Guards, and what notices")]
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", ORDINARY)


def test_every_line_of_ordinary_code_names_a_test() -> None:
    lines = [line for line in ORDINARY.splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 20
    assert [line for line in lines if "`tests/" not in line] == []


@pytest.mark.parametrize(("path", "test"), NAMED, ids=[f"{path}::{test}" for path, test in NAMED])
def test_named_test_exists(path: str, test: str) -> None:
    assert f"def {test}" in (ROOT / path).read_text("utf-8")
