"""docs/states.md and a part of docs/outbox.md are drawn from the state tables, and the drawings leave nothing out."""

from __future__ import annotations

import runpy
import sys
from enum import StrEnum
from pathlib import Path
from types import ModuleType

import pytest

from oncekey.core import diagram, jobs, states

DOCS = Path(__file__).parents[2] / "docs"
MACHINES = pytest.mark.parametrize("machine", [states, jobs])
STATES: dict[ModuleType, type[StrEnum]] = {states: states.State, jobs: jobs.JobState}


def test_the_page_in_the_docs_is_the_generated_one() -> None:
    """docs/states.md never drifts from the table: regenerate it with ``python -m oncekey.core.diagram``."""
    assert (DOCS / "states.md").read_text(encoding="utf-8") == diagram.page()


def test_the_part_about_jobs_in_the_docs_is_the_generated_one() -> None:
    """Replace the part of docs/outbox.md by what ``python -m oncekey.core.diagram jobs`` prints."""
    text = (DOCS / "outbox.md").read_text(encoding="utf-8")
    begin, end = text.index(diagram.JOBS_BEGIN), text.index(diagram.JOBS_END)
    assert text[begin:end] + f"{diagram.JOBS_END}\n" == diagram.jobs_part()


@pytest.mark.parametrize(("arguments", "printed"), [([], diagram.page()), (["jobs"], diagram.jobs_part())])
def test_the_module_prints_the_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], printed: str
) -> None:
    """``python -m oncekey.core.diagram`` prints exactly the page, to be redirected into the file."""
    monkeypatch.setattr(sys, "argv", ["diagram", *arguments])
    monkeypatch.delitem(sys.modules, "oncekey.core.diagram")
    runpy.run_module("oncekey.core.diagram", run_name="__main__")
    assert capsys.readouterr().out == printed


@MACHINES
def test_the_table_has_one_line_for_each_move(machine: ModuleType) -> None:
    """The Markdown table has a head and one line of five cells per row of the state table, in its order."""
    head, rule, *lines = diagram.markdown_table(machine.TABLE).splitlines()
    assert (head, rule) == ("| from | event | to | by | when |", "|---|---|---|---|---|")
    assert len(lines) == len(machine.TABLE)
    for line, move in zip(lines, machine.TABLE, strict=True):
        source, event, target, by, when = (cell.strip() for cell in line.strip("|").split("|"))
        assert source == (f"`{move.source}`" if move.source else "no row")
        assert event == f"`{move.event}`"
        assert target == (f"`{move.target}`" if move.target else "no row")
        assert set(by.split(", ")) == set(move.by)
        assert set(when.split(", ")) - {""} == set(move.when)


@MACHINES
def test_the_diagram_has_one_arrow_for_each_pair_of_states(machine: ModuleType) -> None:
    """Every move is on the arrow between its two states, and no arrow is drawn twice."""
    first, *arrows = diagram.mermaid(machine.TABLE).splitlines()
    assert first == "stateDiagram-v2"
    labels: dict[tuple[str, str], list[str]] = {}
    for arrow in arrows:
        ends, _, label = arrow.strip().partition(" : ")
        source, _, target = ends.partition(" --> ")
        assert (source, target) not in labels
        labels[source, target] = label.split("<br/>")
    assert sum(map(len, labels.values())) == len(machine.TABLE)
    for move in machine.TABLE:
        of_arrow = labels[move.source or "[*]", move.target or "[*]"]
        assert any(label.startswith(f"{move.event} (") for label in of_arrow)
    assert {end for ends in labels for end in ends} == {"[*]", *STATES[machine]}
