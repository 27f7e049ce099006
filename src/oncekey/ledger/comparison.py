"""Compares two ledgers by id, the app's ("ours") and the provider's ("theirs"): missing, different and duplicate ids.

``compare(ours, theirs)`` takes any two iterables of Entry, in any order and of any size. It sorts both by id in
temporary files (``sort.py``) and reads them side by side, so its memory does not grow with them. The report does
not grow either: it counts everything and keeps the first findings of each kind.

It does not guess: an amount that is not an integer, or a missing id, ends the comparison with a LedgerError.
``files.py`` reads entries from CSV and JSON Lines.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from oncekey.errors import LedgerError
from oncekey.ledger.report import Entry, Finding, Kind, Report
from oncekey.ledger.sort import Row, Sorter

__all__ = ["Entry", "Field", "Finding", "Kind", "Report", "compare"]

Field = Literal["amount", "currency", "state"]

FIELDS: tuple[Field, ...] = get_args(Field)

ROWS_IN_MEMORY = 200_000
"""Rows of both sides together: about 80 MB, with entries of the usual length."""

KEPT = 10
"""How many entries of one id are compared and shown. An id with more entries is only reported as a duplicate, so that
one hostile id cannot use much memory."""

PROGRESS_EVERY = 10_000


def compare(
    ours: Iterable[Entry],
    theirs: Iterable[Entry],
    *,
    ignore: Collection[Field] = (),
    limit: int = 1_000,
    rows_in_memory: int = ROWS_IN_MEMORY,
    folder: Path | str | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Report:
    """Compare two ledgers by id.

    ``ignore``         fields that may differ
    ``limit``          how many findings of each kind are kept; all are counted
    ``rows_in_memory`` how many rows are held in memory; the others are sorted in temporary files
    ``folder``         for these files, which are removed; the system's temporary folder by default
    ``on_progress``    called every 10,000 ids, after both are read, with the number of ids compared so far
    """
    for field in ignore:
        if field not in FIELDS:
            raise LedgerError(f"compare(ignore=…): there is no field {field!r}; it takes {', '.join(FIELDS)}")
    compared = [field for field in FIELDS if field not in ignore]
    try:
        temporary = tempfile.TemporaryDirectory(prefix="oncekey-ledger-", dir=folder)
    except OSError as error:
        raise LedgerError(
            f"the temporary folder {folder or tempfile.gettempdir()} cannot be used: {error.strerror}; "
            "give another one (--tmp)"
        ) from error
    with temporary as name:
        ours_in, theirs_in = _Checked("ours", ours), _Checked("theirs", theirs)
        share = rows_in_memory // 2
        sorted_ours = Sorter(Path(name), "ours", share).sort(ours_in)
        sorted_theirs = Sorter(Path(name), "theirs", share).sort(theirs_in)
        walk = _Walk(compared, limit, on_progress)
        walk.run(_groups(sorted_ours), _groups(sorted_theirs))
    return Report(ours_in.count, theirs_in.count, walk.same, walk.counts, walk.findings())


class _Checked:
    """Entries as rows, each checked: with wrong types a comparison would report wrong differences, or miss some."""

    def __init__(self, side: str, entries: Iterable[Any]) -> None:
        self._side = side
        self._entries = entries  # Any: they come from files and drivers, so their types are checked at run time
        self.count = 0

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for number, entry in enumerate(self._entries, start=1):
            if not (
                isinstance(entry, Entry)
                and type(entry[1]) is int
                and type(entry[0]) is type(entry[2]) is type(entry[3]) is str
                and entry[0]
                and (type(entry[4]) is str or _is_plain(entry[4]))
            ):
                raise LedgerError(f"{self._side}, entry {number}: {_complaint(entry)}")
            yield tuple(entry)
        self.count = number


def _is_plain(extra: object) -> bool:
    """Whether it can be written to a temporary file and shown: None, text, numbers, and lists and dicts of them."""
    if extra is None or type(extra) in (str, int, float, bool):
        return True
    if isinstance(extra, dict):
        return all(type(name) is str and _is_plain(item) for name, item in extra.items())
    return isinstance(extra, list | tuple) and all(_is_plain(item) for item in extra)


def _complaint(entry: object) -> str:
    if not isinstance(entry, Entry):
        return f"it is a {type(entry).__name__}, not an Entry(id, amount, currency, state)"
    if type(entry.amount) is not int:
        return f"the amount {entry.amount!r} of {entry.id!r} is not an integer of minor units"
    for field in ("id", "currency", "state"):
        if type(getattr(entry, field)) is not str:
            return f"the {field} {getattr(entry, field)!r} is not a string"
    if not entry.id:
        return "the id is empty"
    return f"the extra of {entry.id!r} takes plain values: None, strings, numbers, and lists and dicts of them"


_Group = tuple[str, int, list[Row]]
"""An id, the number of its rows, and the first of them."""


def _groups(rows: Iterator[Row]) -> Iterator[_Group]:
    """Sorted rows, grouped by id."""
    first = next(rows, None)
    if first is None:
        return
    last, number, kept = first[0], 1, [first]
    for row in rows:
        if row[0] == last:
            number += 1
            if len(kept) < KEPT:
                kept.append(row)
        else:
            yield last, number, kept
            last, number, kept = row[0], 1, [row]
    yield last, number, kept


class _Walk:
    """Reads both sides at once, from the smallest id to the largest."""

    def __init__(self, compared: list[Field], limit: int, on_progress: Callable[[int], None] | None) -> None:
        self._compared = compared
        self._limit = limit
        self._on_progress = on_progress
        self.same = 0
        self.counts: Counter[Kind] = Counter()
        self._kept: dict[Kind, list[Finding]] = {kind: [] for kind in Kind}

    def run(self, ours: Iterator[_Group], theirs: Iterator[_Group]) -> None:
        walked = 0
        here, there = next(ours, None), next(theirs, None)
        while here is not None or there is not None:
            walked += 1
            if self._on_progress is not None and walked % PROGRESS_EVERY == 0:
                self._on_progress(walked)
            if here is not None and there is not None and here[0] == there[0]:
                self._both(here, there)
                here, there = next(ours, None), next(theirs, None)
            elif there is None or (here is not None and here[0] < there[0]):
                assert here is not None  # noqa: S101 - for the type checker: see the loop's condition
                self._found(Kind.MISSING_THERE, here, None)
                if here[1] > 1:
                    self._found(Kind.DUPLICATE_HERE, here, None)
                here = next(ours, None)
            else:
                self._found(Kind.MISSING_HERE, None, there)
                if there[1] > 1:
                    self._found(Kind.DUPLICATE_THERE, None, there)
                there = next(theirs, None)

    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for found in self._kept.values() for finding in found)

    def _both(self, here: _Group, there: _Group) -> None:
        if here[1] == there[1] == 1 and here[2][0][1:4] == there[2][0][1:4]:
            self.same += 1
            return
        fields: tuple[Field, ...] = ()
        if here[1] <= KEPT and there[1] <= KEPT:
            fields = tuple(field for field in self._compared if _values(here, field) != _values(there, field))
        if fields:
            self._found(Kind.DIFFERENT, here, there, fields)
        if here[1] > 1:
            self._found(Kind.DUPLICATE_HERE, here, there)
        if there[1] > 1:
            self._found(Kind.DUPLICATE_THERE, here, there)
        if not fields and here[1] == there[1] == 1:
            self.same += 1  # they differ only in ignored fields

    def _found(self, kind: Kind, here: _Group | None, there: _Group | None, fields: tuple[Field, ...] = ()) -> None:
        self.counts[kind] += 1
        if len(self._kept[kind]) >= self._limit:
            return
        known = here or there
        assert known is not None  # noqa: S101 - the caller passes at least one
        self._kept[kind].append(
            Finding(
                kind,
                known[0],
                _entries(here),
                _entries(there),
                here[1] if here is not None else 0,
                there[1] if there is not None else 0,
                fields,
            )
        )


def _values(group: _Group, field: Field) -> set[object]:
    at = 1 + FIELDS.index(field)
    return {row[at] for row in group[2]}


def _entries(group: _Group | None) -> tuple[Entry, ...]:
    return () if group is None else tuple(Entry(*row) for row in group[2])
