"""docs/states.md is what the generator draws from the state table, and the drawing leaves nothing out."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from oncekey.core import diagram
from oncekey.core.states import TABLE, State

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def test_the_page_in_the_docs_is_the_generated_one() -> None:
    """docs/states.md never drifts from the table: regenerate it with ``python -m oncekey.core.diagram``."""
    assert PAGE.read_text(encoding="utf-8") == diagram.page()


def test_the_module_prints_the_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m oncekey.core.diagram`` prints exactly the page, to be redirected into the file."""
    monkeypatch.delitem(sys.modules, "oncekey.core.diagram")
    runpy.run_module("oncekey.core.diagram", run_name="__main__")
    assert capsys.readouterr().out == diagram.page()


def test_the_table_has_one_line_for_each_move() -> None:
    """The Markdown table has a head and one line of five cells per row of the state table, in its order."""
    head, rule, *lines = diagram.markdown_table().splitlines()
    assert (head, rule) == ("| from | event | to | by | when |", "|---|---|---|---|---|")
    assert len(lines) == len(TABLE)
    for line, move in zip(lines, TABLE, strict=True):
        source, event, target, by, when = (cell.strip() for cell in line.strip("|").split("|"))
        assert source == (f"`{move.source}`" if move.source else "no row")
        assert event == f"`{move.event}`"
        assert target == (f"`{move.target}`" if move.target else "no row")
        assert set(by.split(", ")) == set(move.by)
        assert set(when.split(", ")) - {""} == set(move.when)


def test_the_diagram_has_one_arrow_for_each_pair_of_states() -> None:
    """Every move is on the arrow between its two states, and no arrow is drawn twice."""
    first, *arrows = diagram.mermaid().splitlines()
    assert first == "stateDiagram-v2"
    labels: dict[tuple[str, str], list[str]] = {}
    for arrow in arrows:
        ends, _, label = arrow.strip().partition(" : ")
        source, _, target = ends.partition(" --> ")
        assert (source, target) not in labels
        labels[source, target] = label.split("<br/>")
    assert sum(map(len, labels.values())) == len(TABLE)
    for move in TABLE:
        of_arrow = labels[move.source or "[*]", move.target or "[*]"]
        assert any(label.startswith(f"{move.event} (") for label in of_arrow)
    assert {end for ends in labels for end in ends} == {"[*]", *State}
