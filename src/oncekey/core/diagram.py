"""The state machines as pages: diagrams and tables, drawn from ``states.TABLE`` (keys) and ``jobs.TABLE`` (jobs).

Owns the drawing only. Nothing about a machine may be written here: what is not in its table is not on the page.
``python -m oncekey.core.diagram > docs/states.md`` writes the page of keys. ``python -m oncekey.core.diagram jobs``
prints the part of ``docs/outbox.md`` between the two marks of the job's table. Tests compare both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum

from oncekey.core import jobs, states
from oncekey.core.jobs import JobMove
from oncekey.core.states import Transition

Move = Transition | JobMove

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

JOBS_BEGIN = "<!-- Generated from src/oncekey/core/jobs.py by `python -m oncekey.core.diagram jobs`. -->"
JOBS_END = "<!-- End of the generated part. -->"


def mermaid(table: Sequence[Move]) -> str:
    """The machine as a Mermaid ``stateDiagram-v2``: one arrow per pair of states, one line of it per move."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for move in table:
        ends = (move.source or _NO_ROW, move.target or _NO_ROW)
        arrows.setdefault(ends, []).append(_label(move))
    lines = ["stateDiagram-v2"]
    for (source, target), labels in arrows.items():
        lines.append(f"    {source} --> {target} : {'<br/>'.join(labels)}")
    return "\n".join(lines) + "\n"


def markdown_table(table: Sequence[Move]) -> str:
    """The machine as a Markdown table, in the order of its rows."""
    lines = ["| from | event | to | by | when |", "|---|---|---|---|---|"]
    for move in table:
        cells = (
            _cell(move.source, "no row"),
            f"`{move.event}`",
            _cell(move.target, "no row"),
            _in_order(move.by),
            _in_order(move.when),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """``docs/states.md``."""
    return f"{_HEAD}\n```mermaid\n{mermaid(states.TABLE)}```\n\n{_MIDDLE}\n{markdown_table(states.TABLE)}"


def jobs_part() -> str:
    """The part of ``docs/outbox.md`` about the states of a job, with its two marks."""
    return f"{JOBS_BEGIN}\n\n```mermaid\n{mermaid(jobs.TABLE)}```\n\n{markdown_table(jobs.TABLE)}\n{JOBS_END}\n"


def _label(move: Move) -> str:
    words = f"{move.event} ({_in_order(move.by)})"
    return f"{words}, {_in_order(move.when)}" if move.when else words


def _cell(state: str | None, otherwise: str) -> str:
    return f"`{state}`" if state else otherwise


def _in_order(words: Iterable[StrEnum]) -> str:
    """The words, in the order of their enum: sets have none."""
    wanted = set(words)
    return ", ".join(word for kind in {type(word) for word in wanted} for word in kind if word in wanted)


if __name__ == "__main__":
    sys.stdout.write(jobs_part() if sys.argv[1:] == ["jobs"] else page())
