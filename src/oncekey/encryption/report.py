"""What a walk over the kept values of a store has found, in numbers by key.

Not every value that does not open harms: no retry and no worker needs the reasons in the audit, the jobs that have
ended, and the rows that are expired. So they are counted apart. A key that only these are under is not needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oncekey.core.fingerprint import KEY_STEP
from oncekey.core.jobs import JobState
from oncekey.core.states import FINAL, State
from oncekey.encryption.keyring import PLAIN
from oncekey.stores.api import Outbox
from oncekey.stores.kept_api import Kept, KeptJob, KeptKey, KeptLine

NAMED = 3
"""How many rows that are not final are named for each key."""
ENDED = frozenset({JobState.DONE, JobState.CANCELLED})
"""No worker and no operator runs such a job again."""


@dataclass(slots=True)
class RowsUnder:
    """Rows that one key is needed for."""

    rows: int = 0
    until: float = 0.0
    """When the last of those that are final expires."""
    unsettled: int = 0
    """How many are not final: their time begins when they are."""
    named: list[KeptKey] = field(default_factory=list)
    """Some of those that are not final."""

    def add(self, row: KeptKey) -> None:
        self.rows += 1
        if row.state in FINAL:
            self.until = max(self.until, row.expires_at)
        else:
            self.unsettled += 1
            if len(self.named) < NAMED:
                self.named.append(row)


@dataclass(slots=True)
class NotOpened:
    """Numbers of values that do not open: the key is not in the ring, or the value was changed or moved."""

    values: Counter[int] = field(default_factory=Counter)
    reasons: Counter[int] = field(default_factory=Counter)
    """Of ``values``: reasons in the audit, which an operator's command writes as a rule, and not the app."""
    ended: Counter[int] = field(default_factory=Counter)
    """Of ``values``: those of jobs that have ended, and of rows that are expired."""
    jobs: Counter[int] = field(default_factory=Counter)
    """Of ``values``: those of jobs that have not ended."""

    @property
    def needed(self) -> Counter[int]:
        """Those that a retry or a worker needs."""
        return self.values - self.reasons - self.ended

    @property
    def of_the_app(self) -> Counter[int]:
        """Those that show under which keys the app writes."""
        return self.values - self.reasons

    def add(self, row: Kept, numbers: Sequence[int], store: Any) -> None:
        """``numbers``: the keys of the values of this row that do not open. ``store`` has the row."""
        self.values.update(numbers)
        if isinstance(row, KeptLine):
            self.reasons.update(numbers)
        elif numbers and _has_ended(row, store):
            self.ended.update(numbers)
        elif isinstance(row, KeptJob):
            self.jobs.update(numbers)

    def clear(self) -> None:
        for numbers in (self.values, self.reasons, self.ended, self.jobs):
            numbers.clear()


def _has_ended(row: Kept, store: Any) -> bool:
    if isinstance(row, KeptJob) and isinstance(store, Outbox):
        job = store.job(row.id)
        return job is None or job.state in ENDED
    return isinstance(row, KeptKey) and row.state is State.EXPIRED  # a request starts it over without reading it


@dataclass(slots=True)
class Report:
    """Numbers of values, by the number of the key that they were found under; ``PLAIN``: they were not encrypted."""

    current: int
    """The number of the current key; ``PLAIN``: the ring does not encrypt."""
    walks: int = 0
    """How many walks have written. One that only reads comes before them."""
    rows: int = 0
    """Of the walk that only reads, as ``found``."""
    found: Counter[int] = field(default_factory=Counter)
    read: int = 0
    """Rows of the last walk, as all that follows but ``rewritten`` and ``opened``."""
    rewritten: Counter[int] = field(default_factory=Counter)
    """Of all walks."""
    changed: Counter[int] = field(default_factory=Counter)
    """The app changed, deleted or held their rows meanwhile: only the next walk can tell under which key they are."""
    not_opened: NotOpened = field(default_factory=NotOpened)
    """They stay as they are."""
    refused: Counter[int] = field(default_factory=Counter)
    """The store does not take the new value, which is a little longer."""
    waiting: Counter[int] = field(default_factory=Counter)
    """They open and were not written: in a dry run, or because the current key is not proven."""
    opened: Counter[int] = field(default_factory=Counter)
    """Of all walks: they open. Reasons in the audit are not counted, since an operator's command writes them."""
    doubted: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """Some rows with a value that does not open, and with a fingerprint of the same number."""
    fingerprints: dict[int, RowsUnder] = field(default_factory=dict)
    """The rows whose fingerprint was made with a key."""
    rows_under: dict[int, RowsUnder] = field(default_factory=dict)
    """The rows with such a fingerprint, or with a value under the key that does not open."""

    @property
    def lost(self) -> Counter[int]:
        """All values that do not open."""
        return self.not_opened.values

    @property
    def left(self) -> Counter[int]:
        """What a walk has left under another key, or may have. What neither a retry nor a worker needs is not in it."""
        return self.changed + self.not_opened.needed + self.refused + self.waiting

    @property
    def is_wrong(self) -> bool:
        """The current key opens none of the values that name it."""
        return self.current != PLAIN and bool(self.unopened and not self.opened[self.current])

    @property
    def is_proven(self) -> bool:
        """The current key is the one of the app: it opens all values of the app that name it, and there are some."""
        return self.current == PLAIN or bool(self.opened[self.current] and not self.unopened)

    @property
    def unopened(self) -> int:
        """How many values that name the current key it does not open. Reasons in the audit do not count."""
        return self.not_opened.of_the_app[self.current]

    def begin(self) -> None:
        """A walk begins."""
        self.read = 0
        counts = (self.changed, self.not_opened, self.refused, self.waiting)
        for numbers in (*counts, self.doubted, self.fingerprints, self.rows_under):
            numbers.clear()

    def count_row(self, row: KeptKey, not_opened: Sequence[int]) -> None:
        """Count a row for each key that it needs. A row that is expired is started over without a look at it."""
        if row.state is State.EXPIRED:
            return
        number = row.fingerprint_version // KEY_STEP
        self.fingerprints.setdefault(number, RowsUnder()).add(row)
        for needed in {number, *not_opened}:
            self.rows_under.setdefault(needed, RowsUnder()).add(row)
