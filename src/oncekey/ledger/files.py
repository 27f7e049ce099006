"""Reads ledgers from CSV and JSON Lines files, line by line; the caller names the columns.

A line that cannot be read as an entry raises a LedgerError with file and line number. Only empty lines are skipped.
Currencies are compared in upper case, as ISO 4217 writes them.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import orjson

from oncekey.core.values import value
from oncekey.errors import LedgerError
from oncekey.ledger.report import Entry

MAX_LINE_BYTES = 1024 * 1024
"""The longest line. A longer one is an error of the file, such as a JSON array in one line or a missing quote, and may
not fit in memory."""

MAX_DECIMALS = 30
_MAX_DIGITS = 60
_WHOLE = re.compile(rf"-?[0-9]{{1,{_MAX_DIGITS}}}")
_SUFFIXES = {".csv": ",", ".tsv": "\t", ".jsonl": None, ".ndjson": None}


@value
class Columns:
    """The columns of a file: names of CSV columns, or of members of a JSON object, with a dot for inner ones
    (``metadata.key``). None: the ledger has no such column, and the entry's value is empty or 0."""

    id: str = "id"
    amount: str | None = "amount"
    currency: str | None = "currency"
    state: str | None = "state"


class LedgerFile:
    """The entries of a file; iterate over it. ``extra`` of each entry is its place: ``line 7``.

    ``decimals``  amounts have up to so many decimal places ("12.34", with 2) and are turned into minor units; 0: they
                  are already whole numbers of minor units
    ``states``    for states of this file, their names in the other file
    ``delimiter`` between the columns of a CSV file
    """

    def __init__(
        self,
        path: Path | str,
        columns: Columns | None = None,
        *,
        decimals: int = 0,
        states: Mapping[str, str] | None = None,
        delimiter: str | None = None,
    ) -> None:
        self.path = Path(path)
        self._columns = columns or Columns()
        self._states = dict(states or {})
        self._file: BinaryIO | None = None
        if self.path.suffix.lower() not in _SUFFIXES:
            hint = "; `jq -c '.[]'` makes lines of a JSON array" if self.path.suffix.lower() == ".json" else ""
            raise LedgerError(f"{path}: a ledger's name must end in {', '.join(_SUFFIXES)}{hint}")
        if not 0 <= decimals <= MAX_DECIMALS:
            raise LedgerError(f"{path}: decimals must lie between 0 and {MAX_DECIMALS}, and not be {decimals}")
        if delimiter is not None and len(delimiter) != 1:
            raise LedgerError(f"{path}: the delimiter must be one character, not {delimiter!r}")
        self._delimiter = delimiter or _SUFFIXES[self.path.suffix.lower()]
        self._is_csv = _SUFFIXES[self.path.suffix.lower()] is not None
        self._decimals = decimals
        self._decimal = re.compile(rf"(-?)([0-9]{{1,{_MAX_DIGITS}}})(?:\.([0-9]{{1,{max(decimals, 1)}}}))?")

    @property
    def size(self) -> int:
        """In bytes."""
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise self._unreadable(error) from error

    @property
    def position(self) -> int:
        """How many bytes have been read."""
        return self._file.tell() if self._file is not None and not self._file.closed else 0

    def __iter__(self) -> Iterator[Entry]:
        try:
            with self.path.open("rb") as self._file:
                yield from self._csv(self._file) if self._is_csv else self._json_lines(self._file)
        except OSError as error:
            raise self._unreadable(error) from error

    # -- formats ---------------------------------------------------------------------------------------------------

    def _csv(self, file: BinaryIO) -> Iterator[Entry]:
        rows = csv.reader(self._text(file), delimiter=self._delimiter or ",", strict=True)
        start = 1
        try:
            names = next((row for row in rows if row), None)
            if names is None:
                raise LedgerError(f"{self.path}: it is empty; the first line must name the columns")
            columns = self._columns
            at_id = self._find(names, columns.id)
            at_amount, at_currency, at_state = (
                None if name is None else self._find(names, name)
                for name in (columns.amount, columns.currency, columns.state)
            )
            width = len(names)
            entry = self._entry
            start = rows.line_num + 1
            for row in rows:
                line, start = start, rows.line_num + 1  # a quoted value may contain line breaks
                if len(row) != width:
                    if not row:
                        continue
                    self._refuse(line, f"it has {len(row)} values, and the first line names {width} columns")
                yield entry(
                    line,
                    row[at_id],
                    0 if at_amount is None else row[at_amount],
                    "" if at_currency is None else row[at_currency],
                    "" if at_state is None else row[at_state],
                )
        except csv.Error as error:
            self._refuse(start, f"it is not CSV: {error}")

    def _find(self, names: list[str], name: str) -> int:
        if names.count(name) != 1:
            there = "more than once" if name in names else "not"
            raise LedgerError(
                f"{self.path}: the column {name!r} is {there} in its first line; "
                f"columns there: {', '.join(map(repr, names))}"
            )
        return names.index(name)

    def _json_lines(self, file: BinaryIO) -> Iterator[Entry]:
        columns = self._columns
        get_id, get_amount, get_currency, get_state = (
            None if name is None else _getter(name)
            for name in (columns.id, columns.amount, columns.currency, columns.state)
        )
        assert get_id is not None  # noqa: S101 - Columns.id is a string
        for line, data in self._lines(file):
            try:
                row = orjson.loads(data)
            except orjson.JSONDecodeError as error:
                if not data.strip():
                    continue
                self._refuse(line, f"it is not JSON: {error}")
            if not isinstance(row, dict):
                self._refuse(line, f"it is a JSON {_kind(row)}, not an object with the members of an entry")
            try:
                amount = 0 if get_amount is None else get_amount(row)
                if type(amount) is float and get_amount is not None:
                    # Parse again to get the digits as they were written: a float may have lost some, and orjson makes
                    # a float of an integer past 64 bits.
                    amount = get_amount(json.loads(data, parse_float=str))
                entry = self._entry(
                    line,
                    get_id(row),
                    amount,
                    "" if get_currency is None else get_currency(row),
                    "" if get_state is None else get_state(row),
                )
            except KeyError as error:
                self._refuse(line, f"it has no member {error.args[0]!r}; members there: {', '.join(map(repr, row))}")
            yield entry

    # -- one entry -------------------------------------------------------------------------------------------------

    def _entry(self, line: int, ident: Any, amount: Any, currency: Any, state: Any) -> Entry:
        if type(ident) is not str:
            if type(ident) is not int:
                self._refuse(line, f"the id is {_named(ident)}, and must be a string")
            ident = str(ident)
        if not ident:
            self._refuse(line, "the id is empty")
        if type(currency) is not str or type(state) is not str:
            wrong, kind = ("currency", currency) if type(currency) is not str else ("state", state)
            self._refuse(line, f"the {wrong} is {_named(kind)}, and must be a string")
        if type(amount) is not int or self._decimals:
            amount = self._minor_units(line, amount)
        if self._states:
            state = self._states.get(state, state)
        return Entry(ident, amount, currency.upper(), state, f"line {line}")

    def _minor_units(self, line: int, amount: Any) -> int:
        text = str(amount) if type(amount) is int else amount
        if type(text) is not str:
            self._refuse(line, f"the amount is {_named(amount)}, and must be a number")
        if self._decimals:
            if (parts := self._decimal.fullmatch(text)) is not None:
                sign, whole, rest = parts.groups(default="")
                return int(f"{sign}{whole}{rest:0<{self._decimals}}")
            self._refuse(line, f"the amount {text!r} is not a number with up to {self._decimals} decimal places")
        if _WHOLE.fullmatch(text) is None:
            self._refuse(
                line,
                f"the amount {text!r} is not a whole number of minor units (cents); "
                "where a file has decimal amounts, say how many places (--decimals 2)",
            )
        return int(text)

    # -- lines -----------------------------------------------------------------------------------------------------

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        for line, data in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=1):
            if len(data) == MAX_LINE_BYTES and not data.endswith(b"\n"):
                self._refuse(line, f"it is longer than {MAX_LINE_BYTES:,} bytes: is this a file of lines?")
            yield line, data

    def _text(self, file: BinaryIO) -> Iterator[str]:
        encoding = "utf-8-sig"  # spreadsheets write a byte order mark
        for line, data in self._lines(file):
            try:
                yield data.decode(encoding)
            except UnicodeDecodeError as error:
                self._refuse(line, f"it is not UTF-8: {error.reason} at its byte {error.start + 1}")
            encoding = "utf-8"

    def _refuse(self, line: int, why: str) -> NoReturn:
        raise LedgerError(f"{self.path}, line {line}: {why}")

    def _unreadable(self, error: OSError) -> LedgerError:
        return LedgerError(f"{self.path}: it cannot be read: {error.strerror or error}")


def _getter(name: str) -> Callable[[dict[str, Any]], Any]:
    """A function that returns a member of an object; KeyError if the object does not have it."""
    names = name.split(".")
    if len(names) == 1:
        return lambda row: row[name]

    def walk(row: dict[str, Any]) -> Any:
        if name in row:
            return row[name]
        found: Any = row
        for part in names:
            if not isinstance(found, dict) or part not in found:
                raise KeyError(name)
            found = found[part]
        return found

    return walk


def _kind(found: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(found), "number")


def _named(found: Any) -> str:
    return "empty (null)" if found is None else f"{found!r}"[:80]
