"""What a file of the repository refers to is in the repository: pages, headings, hazards."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_LISTED = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
    capture_output=True,
    check=True,
    text=True,
).stdout.split("\n")
TEXTS = [
    ROOT / name
    for name in _LISTED
    if name.endswith((".py", ".md", ".sql", ".toml", ".cfg", ".yml", "Makefile", ".ci/run")) and (ROOT / name).is_file()
]
PAGES = [path for path in TEXTS if path.suffix == ".md"]
CODE = [path for path in TEXTS if path.suffix in (".py", ".sql")]
HAZARDS = {
    int(number) for number in re.findall(r"^\| (\d+) \|", (ROOT / "docs/hazards.md").read_text("utf-8"), re.MULTILINE)
}

OUTSIDE = re.compile(
    r"\bDESIGN(?:\.md|,? section)|\b(?:HAZARDS|FINDINGS|STYLE|ENGINES|FIELD)\.md"
    r"|\b[Ss]eeds? 00\d|\bshared/(?:seeds|vectors)"
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_refers_to_a_page_outside_of_the_repository() -> None:
    found = {_name(path): OUTSIDE.findall(path.read_text("utf-8")) for path in TEXTS if path != Path(__file__)}
    assert {name: names for name, names in found.items() if names} == {}


def test_hazard_of_a_comment_is_listed() -> None:
    for path in CODE:
        numbers = {
            int(number)
            for found in re.findall(r"[Hh]azards? (\d+(?:(?:, | and )\d+)*)", path.read_text("utf-8"))
            for number in re.findall(r"\d+", found)
        }
        assert numbers <= HAZARDS, _name(path)


def test_page_that_the_source_names_exists() -> None:
    for path in CODE:
        if "src" in path.parts:
            named = re.findall(r"\bdocs/[\w-]+\.md", path.read_text("utf-8"))
            assert [name for name in named if not (ROOT / name).is_file()] == [], _name(path)


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        page = (path.parent / name) if name else path
        assert page.exists(), target
        if heading and page.suffix == ".md":
            assert heading in _headings(page), target


def _headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
