"""What a ledger comparison found: as data, as JSON, as text, and as an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from oncekey.core.values import value


class Entry(NamedTuple):
    """One line of a ledger."""

    id: str
    amount: int
    """In minor units (cents): an integer, so that rounding cannot make two amounts differ."""
    currency: str
    state: str
    extra: Any = None
    """Helps to find the entry again, such as a line number: plain values only. It is shown, and not compared."""


class Kind(StrEnum):
    """What can be wrong with an id. "Here" is our ledger, "there" is theirs."""

    MISSING_HERE = "missing_here"
    MISSING_THERE = "missing_there"
    DIFFERENT = "different"
    DUPLICATE_HERE = "duplicate_here"
    DUPLICATE_THERE = "duplicate_there"


@value
class Finding:
    """One id that is not the same on both sides."""

    kind: Kind
    id: str
    ours: tuple[Entry, ...]
    """The entries with this id, the first few if there are many."""
    theirs: tuple[Entry, ...]
    rows_ours: int
    """How many entries have this id, including those that are not shown."""
    rows_theirs: int
    fields: tuple[str, ...] = ()
    """The fields that differ, if the kind is ``different``."""


@value
class Report:
    """The outcome of a comparison. All findings are counted; of each kind the first ``limit`` are kept."""

    rows_ours: int
    rows_theirs: int
    same: int
    """Ids with one entry on both sides and the same values."""
    counts: Mapping[Kind, int]
    findings: tuple[Finding, ...]
    """By kind, then by id."""

    @property
    def is_same(self) -> bool:
        return not any(self.counts.values())

    @property
    def exit_code(self) -> int:
        """0: the same, 1: different. (2 is for ledgers that cannot be read: LedgerError.)"""
        return 0 if self.is_same else 1

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {
            "same": self.is_same,
            "rows": {"ours": self.rows_ours, "theirs": self.rows_theirs},
            "ids_the_same": self.same,
            "counts": {str(kind): self.counts[kind] for kind in Kind},
            "listed": len(self.findings),
            "findings": [_finding_as_json(finding) for finding in self.findings],
        }

    def as_text(self) -> str:
        """Readable text: a summary, then one line per finding."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"ours: {_rows(self.rows_ours)}; theirs: {_rows(self.rows_theirs)}; ids that agree: {self.same:,}"
        if self.is_same:
            yield "no differences"
        for kind in Kind:
            if not (found := self.counts[kind]):
                continue
            yield f"\n{_TITLES[kind]}: {found:,}"
            listed = [finding for finding in self.findings if finding.kind is kind]
            width = min(max((len(_shown(finding.id)) for finding in listed), default=0), 40)
            for finding in listed:
                yield f"  {_shown(finding.id):{width}}  {_said(finding)}"
            if found > len(listed):
                yield f"  … and {found - len(listed):,} more"


_TITLES = {
    Kind.MISSING_HERE: "missing here (theirs has the id, ours has not)",
    Kind.MISSING_THERE: "missing there (ours has the id, theirs has not)",
    Kind.DIFFERENT: "different",
    Kind.DUPLICATE_HERE: "duplicate here (ours has the id more than once)",
    Kind.DUPLICATE_THERE: "duplicate there (theirs has the id more than once)",
}


def _said(finding: Finding) -> str:
    match finding.kind:
        case Kind.MISSING_HERE:
            return _side(finding.theirs, finding.rows_theirs)
        case Kind.MISSING_THERE:
            return _side(finding.ours, finding.rows_ours)
        case Kind.DUPLICATE_HERE:
            return f"{_rows(finding.rows_ours)}: {_side(finding.ours, finding.rows_ours)}"
        case Kind.DUPLICATE_THERE:
            return f"{_rows(finding.rows_theirs)}: {_side(finding.theirs, finding.rows_theirs)}"
        case Kind.DIFFERENT:
            ours, theirs = _side(finding.ours, finding.rows_ours), _side(finding.theirs, finding.rows_theirs)
            return f"{', '.join(finding.fields)}: {ours} here, {theirs} there"


def _side(entries: tuple[Entry, ...], rows: int) -> str:
    text = " + ".join(_entry(entry) for entry in entries)
    return text if rows == len(entries) else f"{text} + {rows - len(entries):,} more"


def _entry(entry: Entry) -> str:
    words = [str(entry.amount), _shown(entry.currency), _shown(entry.state)]
    if entry.extra is not None:
        words.append(f"({_shown(str(entry.extra))})")
    return " ".join(word for word in words if word)


def _shown(text: str) -> str:
    """Text from a file, with control characters and line breaks escaped, so that a terminal can show it."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number:,} rows"


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    members: dict[str, Any] = {"kind": str(finding.kind), "id": finding.id}
    if finding.fields:
        members["fields"] = list(finding.fields)
    for side, entries in (("ours", finding.ours), ("theirs", finding.theirs)):
        members[side] = [_entry_as_json(entry) for entry in entries]
    members["rows"] = {"ours": finding.rows_ours, "theirs": finding.rows_theirs}
    return members


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    members = entry._asdict()
    del members["id"]  # the finding has it
    if entry.extra is None:
        del members["extra"]
    return members
