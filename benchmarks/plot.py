"""The picture for the docs: first requests and replays per second, one bar per contestant, as an SVG file.

A few lines of our own instead of a plotting library: two groups of bars, their values beside them, in colours that read
on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.report import Line

SHOWN = ("first@64", "replay@64")
TITLES = {"first@64": "first request", "replay@64": "replay"}
WIDTH, LABEL, VALUE = 780, 210, 170
BAR, GAP, HEAD = 20, 8, 46
COLOURS = {"bare": "#8a8f98", "oncekey": "#2f6fde"}
PEER_COLOUR = "#d98b2b"


def svg(lines: Sequence[Line], title: str) -> str:
    """The whole picture, or an empty one with its title where nothing of it was measured."""
    body: list[str] = []
    top = HEAD
    most = max((line.most for line in lines if line.workload in SHOWN), default=1.0)
    for workload in SHOWN:
        group = sorted((line for line in lines if line.workload == workload), key=lambda line: -line.rate)
        if group:
            body.append(_text(0, top + 14, f"{TITLES[workload]}, requests per second, 64 connections", "h"))
            top += 28
        for line in group:
            body += _bar(line, top, most)
            top += BAR + GAP
        top += GAP * 2
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">'
    )
    style = (
        "<style>text{font:13px system-ui,sans-serif;fill:#57606a}.h{font-weight:600}.t{font-size:15px;font-weight:600}"
        "@media(prefers-color-scheme:dark){text{fill:#c9d1d9}}</style>"
    )
    return "\n".join([head, style, _text(0, 20, title, "t"), *body, "</svg>", ""])


def _bar(line: Line, top: int, most: float) -> list[str]:
    room = WIDTH - LABEL - VALUE
    wide, least, far = (room * value / most for value in (line.rate, line.least, line.most))
    colour = COLOURS.get(line.contestant.split()[0], PEER_COLOUR)
    middle = top + BAR // 2
    ratio = "" if line.ratio is None else f"  ({line.ratio:.2f} of {line.against})"
    return [
        _text(LABEL - 8, middle + 4, line.contestant, anchor="end"),
        f'<rect x="{LABEL}" y="{top}" width="{wide:.1f}" height="{BAR}" fill="{colour}" rx="2"/>',
        f'<path d="M{LABEL + least:.1f} {middle}H{LABEL + far:.1f}" stroke="#57606a" stroke-width="2"/>',
        _text(LABEL + max(wide, far) + 6, middle + 4, f"{line.rate:,.0f}{ratio}"),
    ]


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


def write(lines: Sequence[Line], title: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(lines, title))
    return path
