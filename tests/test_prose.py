"""The pages are plain: each begins with what it is for, and names its actors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
RIDDLES = re.compile(r"\b(?:whoever|somebody|nobody|anybody|who has|who have)\b", re.IGNORECASE)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_page_begins_with_a_sentence_before_any_table_or_code(path: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", path.read_text("utf-8"), flags=re.DOTALL)
    title, opening = [part.strip() for part in text.split("\n\n") if part.strip()][:2]
    assert title.startswith("# ")
    assert re.match(r"[\w*`\[]", opening), opening[:80]
    assert not opening.startswith("```")
    assert "." in opening


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_page_names_its_actors(path: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert RIDDLES.findall(prose) == []
