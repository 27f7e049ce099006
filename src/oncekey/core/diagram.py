"""The state machine as a page: the diagram and the table of ``docs/states.md``, drawn from ``states.TABLE``.

Owns the drawing only. Nothing about the machine may be written here: what is not in the table is not on the
page.
``python -m oncekey.core.diagram > docs/states.md`` writes it; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from oncekey.core.states import TABLE, Actor, Condition, State, Transition

_NO_ROW = "[*]"

_HEAD = """\
# States and moves

<!-- Generated from src/oncekey/core/states.py by `python -m oncekey.core.diagram > docs/states.md`. -->

Every key is one row, in one of these states, and moves only as drawn here: a move that is not on this page
does not exist. Every move compares the row's state and owner in the same statement, so of two moves at once
only one succeeds. `[*]` is no row: the key is unused.
"""

_MIDDLE = """\
## The same as a table

"When" is what must hold in the row at that moment, besides its state and its owner.
"""


def mermaid() -> str:
    """The machine as a Mermaid ``stateDiagram-v2``: one arrow per pair of states, one line of it per move."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for move in TABLE:
        ends = (move.source or _NO_ROW, move.target or _NO_ROW)
        arrows.setdefault(ends, []).append(_label(move))
    lines = ["stateDiagram-v2"]
    for (source, target), labels in arrows.items():
        lines.append(f"    {source} --> {target} : {'<br/>'.join(labels)}")
    return "\n".join(lines) + "\n"


def markdown_table() -> str:
    """The machine as a Markdown table, in the order of ``states.TABLE``."""
    lines = ["| from | event | to | by | when |", "|---|---|---|---|---|"]
    for move in TABLE:
        cells = (
            _cell(move.source, "no row"),
            f"`{move.event}`",
            _cell(move.target, "no row"),
            _actors(move.by),
            _conditions(move.when),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """``docs/states.md``."""
    return f"{_HEAD}\n```mermaid\n{mermaid()}```\n\n{_MIDDLE}\n{markdown_table()}"


def _label(move: Transition) -> str:
    words = f"{move.event} ({_actors(move.by)})"
    return f"{words}, {_conditions(move.when)}" if move.when else words


def _cell(state: State | None, otherwise: str) -> str:
    return f"`{state}`" if state else otherwise


def _actors(by: Iterable[Actor]) -> str:
    wanted = set(by)
    return ", ".join(actor for actor in Actor if actor in wanted)  # in the order of the enum: sets have none


def _conditions(when: Iterable[Condition]) -> str:
    wanted = set(when)
    return ", ".join(condition for condition in Condition if condition in wanted)


if __name__ == "__main__":
    sys.stdout.write(page())
