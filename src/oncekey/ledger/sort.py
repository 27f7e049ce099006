"""Sorts any number of rows by id: it writes sorted runs to temporary files, and merges them.

Memory is bounded by a number of rows, not by the size of the input. The standard library's C code (sort, marshal,
bisect) does all work per row, a batch at a time: two million rows take seconds.
"""

from __future__ import annotations

import marshal
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import count, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from oncekey.errors import LedgerError

Row = tuple[Any, ...]
"""The first member is the id, a string; all are of types that marshal can write."""

FAN_IN = 32
"""How many runs are merged at once, and so how many files are open."""

_id = itemgetter(0)
_LENGTH_BYTES = 8


class Sorter:
    """Takes rows in any order, and returns them sorted by id; rows of one id are in no particular order.

    At most ``rows`` of them are in memory at a time. It writes files to ``folder`` only if there are more.
    """

    def __init__(self, folder: Path, name: str, rows: int) -> None:
        self._folder = folder
        self._name = name
        self._rows = max(rows, 1)
        # During a merge every run has a batch in memory, and the output needs the same room again.
        self._batch = max(rows // (2 * FAN_IN), 1)
        self._numbers = count(1)

    def sort(self, rows: Iterable[Row]) -> Iterator[Row]:
        source = iter(rows)
        run = sorted(islice(source, self._rows), key=_id)
        if len(run) < self._rows:
            return iter(run)
        runs: list[Path] = []
        while run:
            runs.append(self._write([run]))
            run.clear()  # free it before the next run is read
            run = sorted(islice(source, self._rows), key=_id)
        while len(runs) > FAN_IN:
            runs = [*runs[FAN_IN:], self._write(self._merge(runs[:FAN_IN]))]
        return (row for batch in self._merge(runs) for row in batch)

    def _write(self, pieces: Iterable[list[Row]]) -> Path:
        path = self._folder / f"{self._name}-{next(self._numbers)}"
        try:
            with path.open("xb") as file:
                for piece in pieces:
                    for at in range(0, len(piece), self._batch):
                        data = marshal.dumps(piece[at : at + self._batch], 2)  # 2: no table of shared objects
                        file.write(len(data).to_bytes(_LENGTH_BYTES))
                        file.write(data)
        except OSError as error:
            raise LedgerError(
                f"sorting needs room in {self._folder.parent}, and writing there failed: {error.strerror or error}; "
                "make room, or give another temporary folder (--tmp)"
            ) from error
        return path

    def _merge(self, runs: list[Path]) -> Iterator[list[Row]]:
        """Batches in order. Each round takes the rows up to ``bound``, the smallest last id of all batches in memory:
        no row that is still on disk comes before them."""
        sources = [_read(path) for path in runs]
        heads = [next(source, []) for source in sources]
        while any(heads):
            bound = min(head[-1][0] for head in heads if head)
            out: list[Row] = []
            for at, head in enumerate(heads):
                if head and head[0][0] <= bound:
                    cut = bisect_right(head, bound, key=_id)
                    out += head[:cut]
                    heads[at] = head[cut:] or next(sources[at], [])
            out.sort(key=_id)  # Python's sort detects the sorted pieces and merges them
            yield out


def _read(path: Path) -> Iterator[list[Row]]:
    """The batches of a run; its file is deleted at the end."""
    with path.open("rb") as file:
        while length := file.read(_LENGTH_BYTES):
            yield marshal.loads(file.read(int.from_bytes(length)))  # noqa: S302 - this process wrote it
    path.unlink()
